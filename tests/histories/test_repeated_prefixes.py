"""Repeated prefixes: histories begin with texts that a cache may find, and with others."""

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
from tests.histories.drawn_histories import check_drawn_histories

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


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "one_in"), [(Texts, 4), (TextsOfWindows, 5)])
def test_histories_often_find_a_prefix(cache: type[KVCacheAdapter], one_in: int) -> None:
    """Compare counts of ``prefix_hit``; the first prompt of each history finds nothing.

    In long runs the ratio is one in 2.8, and one in 3.4 with windows.
    """
    counts: Counter[str] = Counter()

    def count(history: History) -> None:
        machine = HistoryRunner(cache, history)
        for conditions in machine.steps():
            rows, length = machine.completed_steps[-1].rows(), machine.oracle.length
            counts["begun"] += sum(count == length(seq) for seq, count in rows)
            counts["found"] += conditions["prefix_hit"]

    for seed_number in range(20):
        check_drawn_histories(cache, 5, seed_number, count)
    print(counts)
    assert counts["found"] >= counts["begun"] / one_in


@pytest.mark.slow
def test_texts_branch_at_every_position_of_a_block() -> None:
    kinds: Counter[str] = Counter()
    check_drawn_histories(
        TextsOfLongBlocks, 160, 1, lambda history: kinds.update(kinds_of(history))
    )
    print(kinds)
    assert kinds.keys() >= {
        "nothing is in common",
        "branches 1 before an edge",
        "branches at an edge",
        "branches 1 after an edge",
        "branches inside a block",
        "continues",
        "is a prefix of another",
        "equals another",
        "of a live sequence",
        "of a preempted sequence",
        "of a freed sequence",
    }


def kinds_of(history: History) -> Iterator[str]:
    """Yield the kinds of common prefixes that each prompt has with earlier ones."""
    oracle = Oracle.of(TextsOfWindows, history.spec, history.texts)
    stored: dict[int, list[int]] = {}
    size = history.spec.block_size
    for step in history.operations:
        if isinstance(step, Prefill):
            tokens = oracle.new_tokens(step.rows())
            seq_with_most, common = max(
                ((seq, _common(tokens, other)) for seq, other in stored.items()),
                key=lambda each: each[1],
                default=(0, 0),
            )
            if not common:
                yield "nothing is in common"
            else:
                yield from _kinds(common, len(tokens), len(stored[seq_with_most]), size)
                preempted = "of a preempted sequence" if seq_with_most in oracle.absent else ""
                live = "of a live sequence" if seq_with_most in oracle.sequences else ""
                yield preempted or live or "of a freed sequence"
        step.apply(oracle)
        stored.update({seq: oracle.tokens(seq) for seq in oracle.sequences})


def _kinds(common: int, count: int, other: int, size: int) -> Iterator[str]:
    if common == count:
        yield "equals another" if count == other else "is a prefix of another"
    elif common == other:
        yield "continues"
    elif size > 3:
        offset = common % size
        inside = {0: "at an edge", 1: "1 after an edge", size - 1: "1 before an edge"}
        yield f"branches {inside.get(offset, 'inside a block')}"


def _common(tokens: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(tokens, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(other)))


def test_candidates_are_names_and_lengths_that_may_find_a_prefix() -> None:
    """Texts 1 and 2 branch off text 0 after 5 and 2 tokens; text 3 is 0 in another namespace."""
    oracle = Oracle(4, 9, branches=((0, 0), (0, 5), (0, 2), (0, 99, 1)))
    candidates = PrefixCandidates(oracle, least=4)
    oracle.append([(0, 6)], oracle.new_tokens([(0, 6)]))
    assert not candidates.names(1, [])
    candidates.note()
    assert [candidates.common_prefix_length(seq) for seq in (1, 2, 3, 4)] == [5, 2, 6, 6]
    assert Counter(candidates.names(1, [])) == {1: 12, 3: 1, 4: 4}
    assert candidates.lengths(1) == [6, 7, 8, 9]
    assert candidates.lengths(4) == [3, 4, 5, 6, 7, 8, 9]
    assert candidates.lengths(2) == []
    oracle.free(0)  # text 1 is the next text of this name
    candidates.note()
    assert Counter(candidates.names(5, [0])) == {0: 12, 5: 12, 7: 1, 8: 4}


def test_candidates_include_partial_blocks_with_small_least() -> None:
    oracle = Oracle(4, 9, branches=((0, 0), (0, 2)))
    candidates = PrefixCandidates(oracle, least=1)
    oracle.append([(0, 3)], oracle.new_tokens([(0, 3)]))
    candidates.note()
    assert set(candidates.names(1, [])) == {1, 2}
    assert candidates.lengths(1) == [3, 4, 5]
    assert candidates.lengths(2) == [2, 3, 4, 5]
