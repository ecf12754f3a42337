"""Histories begin with texts that a cache may find, and with all kinds of others still."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer.capabilities.writes import Prefill
from pytest_roseinfer.histories.preludes import PrefixCandidates
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.run.machine import HistoryRunner
from tests.capabilities.caches.text_cache import TextCache
from tests.capabilities.caches.windowed_text_cache import WindowedTextCache
from tests.histories.drawn import drawn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer import History, KVCacheAdapter


class Texts(TextCache):
    head_counts = head_dims = (1,)


class TextsOfWindows(WindowedTextCache):
    head_counts: ClassVar[Any] = (1,)
    head_dims: ClassVar[Any] = (1,)


class TextsOfLongBlocks(TextsOfWindows):
    block_sizes: ClassVar[Any] = (4, 5, 8)


@pytest.mark.parametrize(("cache", "few"), [(Texts, 4), (TextsOfWindows, 5)])
def test_one_beginning_in_a_few_finds_something(cache: type[KVCacheAdapter], few: int) -> None:
    """As ``prefix_hit`` counts them. At least one of each history finds nothing: the first.

    In the long run it is one in 2.8, and in 3.4 with windows.
    """
    counted: Counter[str] = Counter()

    def count(history: History) -> None:
        machine = HistoryRunner(cache, history)
        for met in machine.steps():
            rows, length = machine.completed_steps[-1].rows(), machine.oracle.length
            counted["begun"] += sum(times == length(seq) for seq, times in rows)
            counted["found"] += met["prefix_hit"]

    for number in range(20):
        drawn(cache, 5, number, count)
    print(counted)
    assert counted["found"] >= counted["begun"] / few


def test_texts_part_at_every_place_of_a_block() -> None:
    kinds: Counter[str] = Counter()
    drawn(TextsOfLongBlocks, 160, 1, lambda history: kinds.update(kinds_of(history)))
    print(kinds)
    assert kinds.keys() >= {
        "nothing was said before",
        "parts 1 before an edge",
        "parts at an edge",
        "parts 1 behind an edge",
        "parts inside of a block",
        "goes on",
        "is the beginning of another",
        "is another",
        "a live one said it",
        "one said it that is preempted",
        "one said it that is gone",
    }


def kinds_of(history: History) -> Iterator[str]:
    """Yield what each prompt has in common with those before it."""
    oracle = Oracle.of(TextsOfWindows, history.spec, history.texts)
    said: dict[int, list[int]] = {}
    size = history.spec.block_size
    for step in history.operations:
        if isinstance(step, Prefill):
            tokens = oracle.new_tokens(step.rows())
            by, common = max(
                ((seq, _common(tokens, other)) for seq, other in said.items()),
                key=lambda each: each[1],
                default=(0, 0),
            )
            if not common:
                yield "nothing was said before"
            else:
                yield from _kinds(common, len(tokens), len(said[by]), size)
                away = "one said it that is preempted" if by in oracle.absent else ""
                live = "a live one said it" if by in oracle.sequences else ""
                yield away or live or "one said it that is gone"
        step.apply(oracle)
        said.update({seq: oracle.tokens(seq) for seq in oracle.sequences})


def _kinds(common: int, count: int, other: int, size: int) -> Iterator[str]:
    if common == count:
        yield "is another" if count == other else "is the beginning of another"
    elif common == other:
        yield "goes on"
    elif size > 3:
        behind = common % size
        inside = {0: "at an edge", 1: "1 behind an edge", size - 1: "1 before an edge"}
        yield f"parts {inside.get(behind, 'inside of a block')}"


def _common(tokens: list[int], other: list[int]) -> int:
    """Count the first tokens that two have in common."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(other)))


def test_names_and_lengths_are_those_that_may_find_something() -> None:
    """Texts 1 and 2 part from text 0 behind 5 tokens and 2; 3 is 0 in another namespace."""
    oracle = Oracle(4, 9, branches=((0, 0), (0, 5), (0, 2), (0, 99, 1)))
    said = PrefixCandidates(oracle, least=4)
    oracle.append([(0, 6)], oracle.new_tokens([(0, 6)]))
    assert not said.names(1, [])
    said.note()
    assert [said.common_prefix_length(seq) for seq in (1, 2, 3, 4)] == [5, 2, 6, 6]
    assert Counter(said.names(1, [])) == {1: 12, 3: 1, 4: 4}
    assert said.lengths(1) == [6, 7, 8, 9]
    assert said.lengths(4) == [3, 4, 5, 6, 7, 8, 9]
    assert said.lengths(2) == []
    oracle.free(0)  # text 1 is the next that has its name
    said.note()
    assert Counter(said.names(5, [0])) == {0: 12, 5: 12, 7: 1, 8: 4}


def test_a_part_of_a_block_comes_again_where_that_can_be_found() -> None:
    oracle = Oracle(4, 9, branches=((0, 0), (0, 2)))
    said = PrefixCandidates(oracle, least=1)
    oracle.append([(0, 3)], oracle.new_tokens([(0, 3)]))
    said.note()
    assert set(said.names(1, [])) == {1, 2}
    assert said.lengths(1) == [3, 4, 5]
    assert said.lengths(2) == [2, 3, 4, 5]
