"""The oracle against lists of tokens, counts of pages, and its own predictions.

A random history appends, forks, truncates and frees; afterwards everything is compared. The oracle
decides what every cache must do, and a mistake in it could hide one of a cache.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pytest

from pytest_roseinfer.oracle.oracle import FORK_SHARES, Oracle
from pytest_roseinfer.oracle.pages import AT_ONCE, NEXT_TRY, BlockCounts, State, Windows, first_live

_HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "runs-and-failures.md"
_STEPS = 40
_CAPACITY = 10_000
_WINDOWS = (None, 3, 6, 3)


class _KeptPages(State):
    """Full pages that must never change, as those of a prefix cache."""

    oracle: Oracle

    def __init__(self) -> None:
        self.pages: dict[int, list[list[int]]] = {}
        """Tokens of the first pages of each sequence, which are kept."""

    def keeps(self, seq: int, at: int) -> bool:
        return at < len(self.pages.get(seq, []))

    def on_fork(self, parent: int, child: int, shared: int) -> None:
        own = self.oracle.sequences
        assert shared == len([page for page in own[child] if page in own[parent]])
        self.pages[child] = self.pages.get(parent, [])[:shared]

    def on_truncate(self, seq: int, pages: int) -> None:
        # A truncation keeps all pages that are left; a copy replaces the last one.
        assert pages in {len(self.oracle.sequences[seq]) - copied for copied in range(2)}
        self.pages[seq] = self.pages.get(seq, [])[:pages]

    def on_release(self, seq: int) -> None:
        self.pages.pop(seq, None)

    def keep_full_pages(self, oracle: Oracle, seq: int) -> None:
        pages = range(oracle.length(seq) // oracle.block_size)
        self.pages[seq] = [oracle.tokens_on(seq, at) for at in pages]


@dataclass(slots=True)
class _History:
    """A random history of an oracle, and the tokens that each sequence must have."""

    oracle: Oracle
    draw: random.Random
    rows: dict[int, list[int]] = field(default_factory=dict)
    kept: _KeptPages | None = None
    next_name: int = 0

    def run(self) -> None:
        for _ in range(_STEPS):
            step = self.draw.choice([self.append, self.append, self.fork, self.truncate, self.free])
            step()
            self.check()

    def append(self) -> None:
        oracle, draw = self.oracle, self.draw
        names = [*draw.sample(sorted(self.rows), min(len(self.rows), 2)), self.next_name]
        self.next_name += 1
        rows = [(seq, draw.randint(1, 2 * oracle.block_size)) for seq in names]
        tokens = oracle.new_tokens(rows)
        assert not {*tokens} & {*chain.from_iterable(self.rows.values())}
        needed, distinct = oracle.pages_needed(rows), _distinct(oracle)
        predicted = oracle.block_counts()
        assert all(predicted.append(*row) for row in rows)
        oracle.append(rows, tokens)
        if oracle.windows.frees == NEXT_TRY or not oracle.windows.of_layer:
            self.compare_free(predicted)
        if not self.kept:
            assert _distinct(oracle) - distinct == needed
        written = iter(tokens)
        for seq, count in rows:
            self.rows[seq] = self.rows.get(seq, []) + [next(written) for _ in range(count)]
        if self.kept and draw.random() < 0.5:
            self.kept.keep_full_pages(oracle, draw.choice(names))

    def fork(self) -> None:
        if not self.rows:
            return
        parent, child = self.draw.choice(sorted(self.rows)), self.next_name
        self.next_name += 1
        predicted = self.oracle.block_counts()
        assert predicted.fork(parent)
        self.oracle.fork(parent, child)
        self.compare_free(predicted)
        self.rows[child] = list(self.rows[parent])

    def truncate(self) -> None:
        if not self.rows:
            return
        seq = self.draw.choice(sorted(self.rows))
        length = self.draw.choice(
            [each for each in range(len(self.rows[seq]) + 1) if self.has_live(seq, each)]
        )
        predicted = self.oracle.block_counts()
        assert predicted.truncate(seq, length)
        self.oracle.truncate(seq, length)
        self.compare_free(predicted)
        self.rows[seq] = self.rows[seq][:length]

    def has_live(self, seq: int, length: int) -> bool:
        """Return True if no page that a sequence of this length needs has left its window."""
        size = self.oracle.block_size
        gone = self.oracle.windows.out_of_window_pages
        return all(gone[each][seq] <= first_live(each, length) // size for each in gone)

    def free(self) -> None:
        if self.rows:
            seq = self.draw.choice(sorted(self.rows))
            self.oracle.free(seq)
            del self.rows[seq]

    def compare_free(self, predicted: BlockCounts) -> None:
        """Compare a prediction with the pages of each group that have not left its window.

        A kept page still takes a block after its last sequence has made a copy.
        """
        if self.kept:
            return
        assert predicted.free == self.oracle.block_counts().free
        free = Counter(dict.fromkeys(predicted.free, _CAPACITY))
        for window, gone in self.oracle.windows.out_of_window_pages.items():
            sequences = self.oracle.sequences.items()
            held = {id(page) for seq, pages in sequences for page in pages[gone[seq] :]}
            free[None if self.oracle.windows.shared_pool else window] -= len(held)
        assert predicted.free == free

    def check(self) -> None:
        oracle = self.oracle
        assert {*oracle.sequences} == {*self.rows}
        for seq, tokens in self.rows.items():
            assert oracle.tokens(seq) == tokens
            assert oracle.length(seq) == len(tokens)
            assert oracle.count_on_last_page(seq) == len(tokens[_page_begin(oracle, tokens) :])
        holders = Counter(chain.from_iterable(map(id, each) for each in oracle.sequences.values()))
        for pages in oracle.sequences.values():
            assert [page.holders for page in pages] == [holders[id(page)] for page in pages]
        for seq, tokens in self.rows.items():
            for layer, window in enumerate(oracle.windows.of_layer):
                live = tokens[-window + 1 :] if window else tokens
                assert oracle.live(seq, layer) == live
        for seq, pages in oracle.sequences.items():
            gone = oracle.windows.out_of_window_pages
            held = [[page.holders for page in pages[each[seq] :]] for each in gone.values()]
            counts = [*oracle.block_counts().holders_of(seq)]
            assert [len(each) for each in counts] == [len(each) for each in held]
            if not oracle.windows.of_layer:
                assert counts == held
        if self.kept:
            for seq, kept in self.kept.pages.items():
                pages = oracle.sequences[seq]
                assert [page.tokens for page in pages[: len(kept)]] == kept


def _page_begin(oracle: Oracle, tokens: list[int]) -> int:
    return (len(tokens) - 1) // oracle.block_size * oracle.block_size if tokens else 0


def test_state_of_a_capability_is_made_once() -> None:
    oracle = Oracle(4, 8)
    assert oracle.state(_KeptPages) is None
    state = oracle.ensure_state(_KeptPages)
    assert isinstance(state, _KeptPages)
    assert oracle.ensure_state(_KeptPages) is oracle.state(_KeptPages) is state


def test_pages_are_shared_as_the_tables_of_a_cache_say() -> None:
    oracle = Oracle(2, 8)
    for seq in range(2):
        oracle.append([(seq, 4)], oracle.new_tokens([(seq, 4)]))
    oracle.adopt_sharing(lambda layer: [{0: [3, 5], 1: [3, 6]}][layer])
    first, second = oracle.sequences[0], oracle.sequences[1]
    assert first[0] is second[0]
    assert [page.holders for page in (*first, *second)] == [2, 1, 2, 1]
    assert oracle.pages_free() == 8 - 3


def test_tables_of_each_window_are_adopted() -> None:
    oracle = Oracle(2, 8, windows=Windows((None, 3), shared_pool=False))
    for seq in range(2):
        oracle.append([(seq, 6)], oracle.new_tokens([(seq, 6)]))
    tables: list[dict[int, list[int | None]]] = [
        {0: [1, 2, 3], 1: [1, 4, 5]},
        {0: [None, 7, 8], 1: [None, None, 9]},
    ]
    oracle.adopt_sharing(tables.__getitem__)
    assert oracle.blocks_of(None, 1) == [1, 4, 5]
    assert oracle.blocks_of(3, 0) == [None, 7, 8]
    assert [oracle.count_out_of_window(seq, 1) for seq in range(2)] == [1, 2]
    assert oracle.block_counts().free == {None: 8 - 5, 3: 8 - 3}


def test_pages_that_leave_a_window_are_counted_once() -> None:
    oracle = Oracle(1, 8, windows=Windows((None, 3)))
    for length in range(1, 6):
        oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
        assert oracle.windows.pop_newly_out_of_window() == (length > 2)


def _distinct(oracle: Oracle) -> int:
    return len({id(page) for pages in oracle.sequences.values() for page in pages})


@pytest.mark.sampled_cases
@pytest.mark.parametrize("copies", [False, True], ids=["truncates in place", "truncates a copy"])
@pytest.mark.parametrize("shares", FORK_SHARES)
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_histories_without_windows(block_size: int, shares: str, *, copies: bool) -> None:
    for seed in range(8):
        oracle = Oracle(block_size, _CAPACITY, shares, truncate_copies=copies)
        _History(oracle, random.Random(seed)).run()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_kept_pages_never_change(block_size: int) -> None:
    for seed in range(12):
        kept = _KeptPages()
        oracle = kept.oracle = Oracle(block_size, _CAPACITY, states={_KeptPages: kept})
        _History(oracle, random.Random(seed), kept=kept).run()


@pytest.mark.sampled_cases
@pytest.mark.parametrize("shared_pool", [False, True], ids=["own pools", "one pool"])
@pytest.mark.parametrize("frees", [AT_ONCE, NEXT_TRY])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_histories_with_windows(block_size: int, frees: str, *, shared_pool: bool) -> None:
    for seed in range(8):
        windows = Windows(_WINDOWS, shared_pool, frees)
        oracle = Oracle(block_size, _CAPACITY, "blocks", windows=windows)
        _History(oracle, random.Random(seed)).run()


def test_tokens_of_every_truncation_of_a_page_are_remembered() -> None:
    """A quantised block may still have their scale, and a message names them."""
    oracle = Oracle(4, _CAPACITY, truncate_copies=False)
    oracle.append([(0, 3)], [10, 11, 12])
    oracle.truncate(0, 2)
    oracle.append([(0, 1)], [13])
    oracle.truncate(0, 1)
    oracle.append([(0, 1)], [14])
    (page,) = oracle.sequences[0]
    assert page.tokens == [10, 14]
    assert page.removed_tokens == [12, 11, 13]


def test_truncation_within_a_kept_page_needs_a_block_for_a_copy() -> None:
    kept = _KeptPages()
    oracle = kept.oracle = Oracle(4, 1, truncate_copies=True, states={_KeptPages: kept})
    oracle.append([(0, 4)], oracle.new_tokens([(0, 4)]))
    assert oracle.truncations_fit([(0, 2)])
    kept.keep_full_pages(oracle, 0)
    assert not oracle.truncations_fit([(0, 2)])


def test_example_of_the_how_to_holds() -> None:
    (example,) = (
        block.partition("```")[0]
        for block in _HOW_TO.read_text().split("```python\n")[1:]
        if "import Oracle" in block
    )
    assert example.count("assert ") == 3
    exec(example, {})
