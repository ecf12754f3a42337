"""Events of prefix caches: a reader of them finds what lookups find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheSpec,
    Divergence,
    History,
    conformance,
    run_history,
)
from pytest_roseinfer import settings as harness_settings
from pytest_roseinfer.capabilities.epochs import Reset
from pytest_roseinfer.capabilities.events import EventReplay
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.writes import Append, Prefill
from pytest_roseinfer.oracle.texts import WHOLE
from tests.capabilities.caches.event_caches import BROKEN, EventCache, SendsRemovedWhileACopyLives
from tests.capabilities.caches.keyed_caches import KeyedCache
from tests.capabilities.caches.paged_cache import PagedCache
from tests.capabilities.caches.text_cache import TextCache
from tests.capabilities.caches.windowed_text_cache import WindowedTextCache
from tests.histories.drawn_histories import check_drawn_histories
from tests.slow import few_or_many_examples

if TYPE_CHECKING:
    from pytest_roseinfer import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import Event
    from pytest_roseinfer.capabilities.operation import Operation

TWO_BLOCKS = BlockStored(["a", "b"], None, [1, 2, 3, 4])


def matched(token_ids: list[int], *events: Event, namespace: int = 0) -> int:
    """Count the tokens that a reader finds in blocks of two."""
    return EventReplay(2).after(events).match_prefix(token_ids, namespace)


def history(*steps: Operation) -> History:
    """Return a history on 8 blocks, in which sequences 0 and 1 have equal texts."""
    texts = (0, 0), (0, WHOLE), (0, 0)
    return History(CacheSpec(block_size=2, num_blocks=8), steps, texts=texts)


@pytest.mark.usefixtures("short_run")
@few_or_many_examples(8, 60)
def test_cache_that_sends_events_passes(examples: int) -> None:
    harness_settings.set_current(harness_settings.Settings(examples=examples, steps=20, seed=1))
    tests = conformance(EventCache)()
    tests.test_histories()
    tests.test_permuting_a_batch_permutes_the_result()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("broken", BROKEN, ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("seed_number", range(3))
def test_broken_events_fail(broken: type[KVCacheAdapter], seed_number: int) -> None:
    with pytest.raises(Divergence):
        check_drawn_histories(broken, 500, seed_number, lambda each: run_history(broken, each))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], 0),
        ([TWO_BLOCKS], 4),
        ([TWO_BLOCKS, BlockRemoved(["a"])], 0),
        ([TWO_BLOCKS, BlockRemoved(["b", "c"])], 2),
        ([TWO_BLOCKS, BlockRemoved(["a"]), BlockStored(["a"], None, [1, 2])], 4),
        ([TWO_BLOCKS, TWO_BLOCKS, BlockRemoved(["b"])], 2),
        ([TWO_BLOCKS, AllBlocksCleared()], 0),
        ([BlockStored(["b"], "a", [3, 4]), BlockStored(["a"], None, [1, 2])], 4),
        ([TWO_BLOCKS, BlockStored(["c"], "b", [5, 6])], 4),
        ([TWO_BLOCKS, BlockStored(["c"], "b", [5, 0])], 4),
        ([TWO_BLOCKS, BlockStored(["c"], "a", [5, 6])], 4),
        ([BlockStored(["a"], None, [1, 2], 1)], 0),
    ],
)
def test_reader_follows_events(events: list[Event], expected: int) -> None:
    assert matched([1, 2, 3, 4, 5], *events) == expected


def test_namespaces_are_separate() -> None:
    other = BlockStored(["c"], None, [1, 2], 1)
    assert matched([1, 2, 3, 4], TWO_BLOCKS, other, namespace=1) == 2
    assert matched([1, 2, 3, 4], TWO_BLOCKS, other, namespace=2) == 0


def test_one_of_two_hashes_of_a_block_is_enough() -> None:
    twice = BlockStored(["a"], None, [1, 2]), BlockStored(["x"], None, [1, 2])
    after = BlockStored(["b"], "a", [3, 4])
    assert matched([1, 2, 3, 4], *twice, after) == 4
    assert matched([1, 2, 3, 4], *twice, after, BlockRemoved(["x"])) == 4


def test_removed_event_while_a_copy_lives_is_a_stale_reader() -> None:
    steps = history(Prefill(0, 1), Prefill(1, 1), Append((0, 1)), Free(0), Prefill(2, 14))
    run_history(EventCache, steps)
    with pytest.raises(Divergence, match=r"0 tokens of text 0, and match_prefix\(\) finds 2"):
        run_history(SendsRemovedWhileACopyLives, steps)


def test_blocks_that_are_stored_again_are_counted() -> None:
    steps = Prefill(0, 4), Free(0), Reset(), Prefill(1, 4)
    assert run_history(EventCache, history(*steps))["block_stored_again"] == 2
    assert run_history(EventCache, history(*steps[:3]))["block_stored_again"] == 0


NO_HASH: Any = [None]


class Returns(TextCache):
    """A cache whose events are a value of a wrong type."""

    value: Any

    def events(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    "value",
    [
        None,
        "events",
        [FileNotFoundError],
        [BlockStored([NO_HASH], None, [1, 2])],
        [BlockStored(["a"], NO_HASH, [1, 2])],
        [BlockStored(["a"], None, ["1", "2"])],  # type: ignore[list-item]
        [BlockRemoved(NO_HASH[0])],
        [BlockRemoved([NO_HASH])],
    ],
    ids=repr,
)
def test_value_that_is_no_list_of_events_is_refused(value: Any) -> None:
    broken = type("ReturnsAValue", (Returns,), {"value": value})
    with pytest.raises(Divergence, match=r"events\(\) returned .*: return a list of BlockStored"):
        run_history(broken, history(Append((0,))))


class EventsWithoutTexts(PagedCache):
    def events(self) -> list[Event]:
        return []


class EventsWithWindows(WindowedTextCache):
    def events(self) -> list[Event]:
        return []


class EventsWithKeys(KeyedCache):
    def events(self) -> list[Event]:
        return []


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (EventsWithoutTexts, "defines events and must then define match_prefix"),
        (EventsWithWindows, "defines events, which cannot be judged with windows yet"),
        (EventsWithKeys, "defines events, which cannot be judged with key_parts yet"),
    ],
)
def test_events_that_cannot_be_judged_are_refused(
    adapter: type[KVCacheAdapter], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        conformance(adapter)
