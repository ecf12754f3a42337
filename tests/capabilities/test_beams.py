"""Reorders of sequences: each gets, at once, the tokens that another one had."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, conformance, run_history
from pytest_roseinfer import settings as harness_settings
from pytest_roseinfer.capabilities.beams import Reorder
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.oracle.pages import text_token
from pytest_roseinfer.search.shrink import simpler_steps
from tests.capabilities.caches.beam_caches import BROKEN, RIGHT, BeamCache, ReordersOneByOne
from tests.histories.drawn_histories import check_drawn_histories

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(block_size=4)
PROMPTS = (Prefill(0, 5), Prefill(1, 2), Prefill(2, 4))


def oracle_after(*steps: Operation, texts: bool = False, fork_shares: str = "blocks") -> Oracle:
    oracle = Oracle(4, 9, fork_shares, branches=((0, 0),) if texts else ())
    for step in steps:
        assert step.possible(oracle)
        assert step.apply(oracle)
    return oracle


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", RIGHT)
def test_cache_that_reorders_passes(cache: type[KVCacheAdapter]) -> None:
    harness_settings.set_current(
        harness_settings.Settings(examples=12, steps=12, seed=1, require_paths=False)
    )
    conformance(cache)().test_histories()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
def test_broken_reorder_fails(broken: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(broken, 500, 1, lambda each: run_history(broken, each))


def test_sequences_get_the_tokens_of_their_sources_at_once() -> None:
    oracle = oracle_after(*PROMPTS)
    before = {seq: oracle.tokens(seq) for seq in (0, 1, 2)}
    Reorder((0, 1, 2), (1, 2, 1)).apply(oracle)
    assert [oracle.tokens(seq) for seq in (0, 1, 2)] == [before[1], before[2], before[1]]
    assert oracle.sequences[0] == oracle.sequences[2]
    assert [page.holders for seq in (0, 1) for page in oracle.sequences[seq]] == [2, 1]
    assert oracle.pages_free() == 7
    Append((0, 1, 2)).apply(oracle)
    assert oracle.tokens(0)[:2] == oracle.tokens(2)[:2] == before[1]
    new = [oracle.tokens(seq)[-1] for seq in (0, 1, 2)]
    assert len({*new, *before[0], *before[1], *before[2]}) == 3 + 5 + 2 + 4


def test_exchanged_twice_is_as_before() -> None:
    exchange = Reorder((0, 1), (1, 0))
    oracle = oracle_after(*PROMPTS, exchange, exchange)
    assert oracle.tokens(0) == oracle_after(*PROMPTS).tokens(0)
    Append((0,)).apply(oracle)
    again = oracle.tokens(0)[-1]
    assert again != oracle_after(*PROMPTS, Append((0,))).tokens(0)[-1]


def test_text_moves_with_the_tokens() -> None:
    oracle = oracle_after(*PROMPTS, Reorder((0, 1), (1, 1)), Append((0, 1)), texts=True)
    assert oracle.tokens(1) == oracle.text_tokens(0, 3)
    assert oracle.tokens(0) == [text_token(0, 0), text_token(0, 1), text_token(1, 2)]


def test_dropped_blocks_make_room_for_copies() -> None:
    full = (Prefill(0, 16), Prefill(1, 16), Prefill(2, 4))
    for fork_shares, sources, fits in (
        ("blocks", (0, 0, 0), True),
        ("nothing", (0, 0, 2), True),
        ("nothing", (0, 0, 0), False),
        ("full blocks", (0, 0, 0), True),
    ):
        oracle = oracle_after(*full, fork_shares=fork_shares)
        assert oracle.pages_free() == 0
        assert Reorder((0, 1, 2), sources).fits(oracle) == fits


def test_sources_are_among_the_sequences() -> None:
    oracle = oracle_after(*PROMPTS)
    assert Reorder((0, 1), (1, 1)).possible(oracle)
    for seqs, sources in (((0, 1), (1, 2)), ((0, 0), (0, 0)), ((0, 3), (0, 3))):
        assert not Reorder(seqs, sources).possible(oracle)


def test_conditions_of_reorders_are_counted() -> None:
    steps = (*PROMPTS, Reorder((0, 1, 2), (1, 0, 2)), Reorder((0, 1), (0, 0)))
    counts = run_history(BeamCache, History(SPEC, steps))
    assert counts == {"beams_exchanged": 2, "beam_taken_twice": 1, "beam_dropped": 1}


def test_history_with_a_reorder_is_saved_described_and_shrunk() -> None:
    step = Reorder((0, 1), (1, 0))
    steps = History(SPEC, (*PROMPTS, step))
    assert History.from_json(json.loads(json.dumps(steps.to_json()))) == steps
    assert "4. reorder tokens; these sequences get: 0 those of 1, 1 those of 0" in steps.describe()
    assert Reorder((0,), (1,)) in [*simpler_steps(step, {})]


def test_message_names_the_sequence_whose_tokens_are_found() -> None:
    steps = (Prefill(0, 2), Prefill(1, 2), Reorder((0, 1), (1, 0)))
    message = "sequence 1, layer 0, K: position 0.*expected sequence 0, token 0, found sequence 1"
    with pytest.raises(Divergence, match=message):
        run_history(ReordersOneByOne, History(SPEC, steps))
