"""Sessions: sequences that have ended keep their blocks, and later ones begin with their tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    KVCacheAdapter,
    Oracle,
    conformance,
    run_history,
)
from pytest_roseinfer import settings as harness_settings
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.sessions import (
    KeepSession,
    ReleaseSession,
    ResumeSession,
    Sessions,
)
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.oracle.pages import text_token
from pytest_roseinfer.search.shrink import keep_valid_steps
from tests.capabilities.caches import session_caches
from tests.capabilities.caches.session_caches import BROKEN, RIGHT, SessionCache
from tests.histories.drawn_histories import check_drawn_histories

if TYPE_CHECKING:
    from pytest_roseinfer.capabilities.operation import Operation

SPEC = CacheSpec(block_size=4, num_blocks=4)


def oracle_after(*steps: Operation, texts: bool = False) -> Oracle:
    oracle = Oracle(4, 4, branches=((0, 0),) if texts else (), states={Sessions: Sessions()})
    for step in steps:
        assert step.possible(oracle)
        assert step.apply(oracle)
    return oracle


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("short_run")
@pytest.mark.parametrize("cache", RIGHT)
def test_cache_with_sessions_passes(cache: type[KVCacheAdapter]) -> None:
    harness_settings.set_current(
        harness_settings.Settings(examples=12, steps=12, seed=1, require_paths=False)
    )
    conformance(cache)().test_histories()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
def test_broken_session_fails(broken: type[KVCacheAdapter]) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(broken, 500, 1, lambda each: run_history(broken, each))


def test_session_keeps_its_blocks_until_it_is_released() -> None:
    oracle = oracle_after(Prefill(0, 6), KeepSession(0))
    assert (oracle.usable, oracle.readable, oracle.pages_free()) == ([], [], 2)
    assert not oracle.fits([(1, 9)])
    assert Append((0,)).possible(oracle)
    assert not Free(0).possible(oracle)
    ReleaseSession(0).apply(oracle)
    assert oracle.pages_free() == 4
    assert not ResumeSession(0, 1).possible(oracle)


def test_each_resumed_sequence_has_all_tokens_and_goes_on_alone() -> None:
    oracle = oracle_after(Prefill(0, 6))
    tokens = oracle.tokens(0)
    for step in (KeepSession(0), ResumeSession(0, 1), ResumeSession(0, 0), Append((0, 1))):
        assert step.possible(oracle)
        assert step.apply(oracle)
    assert oracle.tokens(0)[:6] == oracle.tokens(1)[:6] == tokens
    assert oracle.tokens(0)[6] != oracle.tokens(1)[6]
    assert oracle.pages_free() == 0
    assert not KeepSession(0).possible(oracle)
    assert KeepSession(1).possible(oracle)


def test_text_of_a_session_branches_off_when_it_is_resumed() -> None:
    steps = Prefill(0, 3), KeepSession(0), ResumeSession(0, 1), Append((1,))
    oracle = oracle_after(*steps, texts=True)
    assert oracle.tokens(1) == [*oracle.text_tokens(0, 3), text_token(1, 3)]
    Append((0,)).apply(oracle)
    assert oracle.tokens(0) == oracle.text_tokens(0, 1)


def test_conditions_of_sessions_are_counted() -> None:
    steps = (
        *(Prefill(0, 6), KeepSession(0), ResumeSession(0, 1), Free(1)),
        *(Prefill(2, 8), Free(2), ResumeSession(0, 1)),
    )
    counts = run_history(SessionCache, History(SPEC, steps))
    assert counts == {"session_resumed_twice": 1, "session_resumed_after_pressure": 1}


def test_history_with_a_session_is_saved_described_and_finished() -> None:
    steps = History(SPEC, (Prefill(0, 6), KeepSession(0), ResumeSession(0, 1), ReleaseSession(0)))
    assert History.from_json(json.loads(json.dumps(steps.to_json()))) == steps
    words = steps.describe()
    assert "2. keep sequence 0 as a session" in words
    assert "3. resume the session of sequence 0 as sequence 1" in words
    assert "4. release the session of sequence 0" in words
    unfinished = History(SPEC, (Prefill(0, 6), Prefill(1, 1), KeepSession(0)))
    assert keep_valid_steps(SessionCache, unfinished).operations[-1] == ResumeSession(0, 2)


def test_messages_show_the_blocks_of_a_session() -> None:
    pinned = History(SPEC, (Prefill(0, 6), KeepSession(0)))
    with pytest.raises(Divergence, match=r"refcount 0, and tables name it 1 time"):
        run_history(session_caches.PinsNothing, pinned)
    shared = History(SPEC, (Prefill(0, 6), Fork(0, 1), KeepSession(0), Free(1)))
    with pytest.raises(Divergence, match=r"sequence -1 is the session of sequence 0"):
        run_history(session_caches.PinsOwnBlocksOnly, shared)


class ReturnsNoHandle(SessionCache):
    def keep_session(self, seq: int) -> object:
        super().keep_session(seq)
        return None


class ShowsNoTables(SessionCache):
    session_table: Any = KVCacheAdapter.session_table


def test_mistakes_of_adapters_are_named() -> None:
    with pytest.raises(Divergence, match=r"keep_session\(0\) returned None"):
        run_history(ReturnsNoHandle, History(SPEC, (Prefill(0, 6), KeepSession(0))))
    with pytest.raises(TypeError, match="ShowsNoTables defines keep_session and table: define"):
        conformance(ShowsNoTables)
