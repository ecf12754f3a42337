"""Quantised caches: near is near enough, and what has another's scale is found."""

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


@pytest.mark.many_alike
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", quantised_caches.RIGHT)
def test_a_cache_that_rounds_as_it_says_passes(cache: type[KVCacheAdapter]) -> None:
    settings.set_current(settings.Settings(examples=10, steps=12, seed=1))
    tests = conformance(cache)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()
    if "fork" in cache.abilities:
        tests.test_fork_then_append_equals_copy_then_append()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("broken", quantised_caches.BROKEN, ids=lambda cache: cache.__name__)
def test_one_that_scales_wrongly_is_found(broken: type[KVCacheAdapter], number: int) -> None:
    @hypothesis_settings(max_examples=500, database=None, phases=[Phase.generate], deadline=None)
    @seed(number)
    @given(histories(broken, most_steps=8))
    def look(history: History) -> None:
        run_history(broken, history)

    with pytest.raises(Divergence):
        look()


@pytest.mark.parametrize("tensors", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("over", ["token", "block"])
def test_tokens_are_kept_apart_by_more_than_the_tolerance(over: str, tensors: str) -> None:
    """No row of any token, layer, head or kind may pass for that of another."""
    spec = CacheSpec(num_layers=2, num_heads=2, head_dim=8, block_size=3)
    tolerance = Tolerance(1 / 16, over, tensors)
    tokens = [token_of(seq, at, life) for seq in (0, 1) for at in range(6) for life in (0, 1)]
    rows = torch.stack(Payload(spec, tolerance=tolerance).all_layers(tokens)).flatten(0, 3).float()
    assert rows.abs().max() < 2
    limit = rows.abs().amax(-1) * 2 / 16
    apart = (rows[:, None] - rows).abs().amax(-1) > torch.maximum(limit[:, None], limit)
    assert (apart | torch.eye(len(rows), dtype=torch.bool)).all()


def test_the_next_block_or_token_has_another_scale() -> None:
    for over, apart in (("token", 1), ("block", 4)):
        payload = Payload(CacheSpec(block_size=4), tolerance=Tolerance(1 / 250, over))
        keys, values = payload.layer([token_of(0, at * apart) for at in range(40)], 0)
        sizes = keys.abs().amax((1, 2))
        assert sizes.max() > 16 * sizes.min()
        assert ((sizes[1:] / sizes[:-1]).log2().abs() > 0.9).sum() > 25
        assert ((values.abs().amax((1, 2)) / sizes).log2().abs() > 0.9).sum() > 25


SPEC = CacheSpec(dtype="int8", block_size=4, num_blocks=2)


def appends(times: int, seq: int = 0) -> list[Append]:
    return [Append((seq,))] * times


def test_what_was_cut_still_counts_for_the_block_it_stood_in() -> None:
    """A cache may keep the scale that larger tokens needed, which are cut."""
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


def test_a_failure_says_how_much_too_large_it_is() -> None:
    steps = (*appends(4, 3), Free(3), *appends(2))
    run_history(Int8Blocks, History(SPEC, steps))
    with pytest.raises(Divergence, match=re.escape(f"found {ANY_NAN}, or its scale is")):
        run_history(KeepsAnOldScale, History(SPEC, steps))
    two_layers = History(replace(SPEC, num_layers=2), tuple(appends(1)))
    with pytest.raises(Divergence, match=r"found [\d.]+ times that, up to [\d.e-]+ off where 1/"):
        run_history(WritesOneScaleForAllLayers, two_layers)


def test_what_is_untouched_is_checked_of_quantised_caches_alone() -> None:
    checked = {}
    for cache, dtype in ((Int8Tokens, "int8"), (CutCache, "float32")):
        machine = HistoryRunner(cache, History(replace(SPEC, dtype=dtype), tuple(appends(2))))
        machine.run()
        checked[cache] = machine.invariant_checks["unwritten_positions"]
    assert checked == {Int8Tokens: 2, CutCache: 0}


def test_attention_is_held_to_what_is_read() -> None:
    steps = tuple(appends(4))
    run_history(Attends, History(SPEC, steps))
    with pytest.raises(Divergence, match="attend: sequence 0"):
        run_history(AttendsWithOneScale, History(SPEC, steps))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (0.1, "tolerance['int8'] is 0.1: write Tolerance(1 / 250)"),
        (Tolerance(0.5), "of_greatest lies between 0 and 0.25"),
        (Tolerance(0.1, over="head"), "over is 'token' or 'block'"),
        (Tolerance(0.1, tensors="int8"), "tensors is the name of a torch dtype"),
    ],
)
def test_a_tolerance_that_makes_no_sense_is_refused(said: Any, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)):
        conformance(type("Wrong", (Int8Tokens,), {"tolerance": {"int8": said}}))


def test_a_name_without_a_tolerance_is_no_dtype() -> None:
    with pytest.raises(TypeError, match="dtypes is"):
        conformance(type("Wrong", (Int8Tokens,), {"tolerance": {}}))
