"""Quantised caches: rounding within the tolerance passes, and wrong scales fail."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    Oracle,
    Tolerance,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.payload import ANY_NAN, Payload
from pytest_roseinfer.capabilities.truncation import Truncate
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.oracle.pages import token_of
from pytest_roseinfer.run.machine import HistoryRunner
from tests.capabilities.caches import quantised_caches
from tests.capabilities.caches.quantised_caches import (
    Attends,
    AttendsWithOneScale,
    Int8Blocks,
    Int8Tokens,
    KeepsAnOldScale,
    WritesOneScaleForAllLayers,
)
from tests.capabilities.caches.truncating_caches import CutCache

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", quantised_caches.RIGHT)
def test_right_quantised_cache_passes(cache: type[KVCacheAdapter]) -> None:
    settings.set_current(settings.Settings(examples=10, steps=12, seed=1))
    tests = conformance(cache)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    if "fork" in cache.abilities:
        tests.test_fork_then_append_equals_copy_then_append()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed_number", range(3))
@pytest.mark.parametrize("broken", quantised_caches.BROKEN, ids=lambda cache: cache.__name__)
def test_broken_quantised_cache_fails(broken: type[KVCacheAdapter], seed_number: int) -> None:
    @hypothesis_settings(max_examples=500, database=None, phases=[Phase.generate], deadline=None)
    @seed(seed_number)
    @given(histories(broken, max_steps=8))
    def check(history: History) -> None:
        run_history(broken, history)

    with pytest.raises(Divergence):
        check()


@pytest.mark.parametrize("tensors", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("over", ["token", "block"])
def test_tokens_differ_by_more_than_the_tolerance(over: str, tensors: str) -> None:
    """Rows of different tokens, layers, heads or kinds must differ by more than the tolerance."""
    spec = CacheSpec(num_layers=2, num_heads=2, head_dim=8, block_size=3)
    tolerance = Tolerance(1 / 16, over, tensors)
    tokens = [token_of(seq, at, life) for seq in (0, 1) for at in range(6) for life in (0, 1)]
    rows = torch.stack(Payload(spec, tolerance=tolerance).all_layers(tokens)).flatten(0, 3).float()
    assert rows.abs().max() < 2
    limit = rows.abs().amax(-1) * 2 / 16
    distinct = (rows[:, None] - rows).abs().amax(-1) > torch.maximum(limit[:, None], limit)
    assert (distinct | torch.eye(len(rows), dtype=torch.bool)).all()


def test_neighbouring_blocks_and_tokens_have_different_scales() -> None:
    for over, distinct in (("token", 1), ("block", 4)):
        payload = Payload(CacheSpec(block_size=4), tolerance=Tolerance(1 / 250, over))
        keys, values = payload.layer([token_of(0, at * distinct) for at in range(40)], 0)
        magnitudes = keys.abs().amax((1, 2))
        assert magnitudes.max() > 16 * magnitudes.min()
        assert ((magnitudes[1:] / magnitudes[:-1]).log2().abs() > 0.9).sum() > 25
        assert ((values.abs().amax((1, 2)) / magnitudes).log2().abs() > 0.9).sum() > 25


SPEC = CacheSpec(dtype="int8", block_size=4, num_blocks=2)


def appends(times: int, seq: int = 0) -> list[Append]:
    return [Append((seq,))] * times


def test_truncated_tokens_count_for_the_scale_of_their_block() -> None:
    """A cache may keep the scale of larger tokens that were truncated."""
    oracle = Oracle(4, 2)
    oracle.append([(0, 3)], range(3))
    oracle.fork(0, 1)
    oracle.truncate(0, 1)
    oracle.append([(0, 1)], [7])
    (page,) = oracle.sequences[0]
    assert (page.tokens, page.removed_tokens) == ([0, 7], [1, 2])
    for seq in range(12):
        steps = (*appends(3, seq), Truncate(seq, 1), *appends(2, seq))
        run_history(Int8Blocks, History(SPEC, steps))


def test_failure_names_the_factor_of_a_wrong_scale() -> None:
    steps = (*appends(4, 3), Free(3), *appends(2))
    run_history(Int8Blocks, History(SPEC, steps))
    with pytest.raises(Divergence, match=re.escape(f"found {ANY_NAN}, or its scale is")):
        run_history(KeepsAnOldScale, History(SPEC, steps))
    two_layers = History(replace(SPEC, num_layers=2), tuple(appends(1)))
    with pytest.raises(Divergence, match=r"found [\d.]+ times that, up to [\d.e-]+ off where 1/"):
        run_history(WritesOneScaleForAllLayers, two_layers)


def test_unwritten_positions_are_checked_for_quantised_caches_only() -> None:
    check_counts = {}
    for cache, dtype in ((Int8Tokens, "int8"), (CutCache, "float32")):
        machine = HistoryRunner(cache, History(replace(SPEC, dtype=dtype), tuple(appends(2))))
        machine.run()
        check_counts[cache] = machine.invariant_checks["unwritten_positions"]
    assert check_counts == {Int8Tokens: 2, CutCache: 0}


def test_attention_is_compared_with_the_tokens_read_back() -> None:
    steps = tuple(appends(4))
    run_history(Attends, History(SPEC, steps))
    with pytest.raises(Divergence, match="attend: sequence 0"):
        run_history(AttendsWithOneScale, History(SPEC, steps))


@pytest.mark.parametrize(
    ("tolerance", "message"),
    [
        (0.1, "tolerance['int8'] is 0.1: write Tolerance(1 / 250)"),
        (Tolerance(0.5), "of_greatest lies between 0 and 0.25"),
        (Tolerance(0.1, over="head"), "over is 'token' or 'block'"),
        (Tolerance(0.1, tensors="int8"), "tensors is the name of a torch dtype"),
    ],
)
def test_invalid_tolerance_is_refused(tolerance: Any, message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        conformance(type("Wrong", (Int8Tokens,), {"tolerance": {"int8": tolerance}}))


def test_dtype_name_without_a_tolerance_is_refused() -> None:
    with pytest.raises(TypeError, match="dtypes is"):
        conformance(type("Wrong", (Int8Tokens,), {"tolerance": {}}))
