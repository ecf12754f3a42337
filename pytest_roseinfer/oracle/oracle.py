"""The oracle: what a paged cache must hold, in plain Python lists.

It shares no code with any cache. A token is a number that says which sequence wrote it and
at which position; a page is a list of them and a count of holders. Sequences that have the
same name, one after another, write different tokens, and so does one that was cut. Where sequences
have texts, the number says which text and which position instead: it is the same wherever the text
is, up to there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pytest_roseinfer.oracle.pages import (
    AT_ONCE,
    NEXT_TRY,
    Absence,
    Page,
    Room,
    State,
    Windows,
    first_live,
    share_as,
    text_token,
    token_of,
)
from pytest_roseinfer.oracle.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from pytest_roseinfer.oracle.pages import Table, Window
    from pytest_roseinfer.oracle.texts import Branch, Said

# What the oracle must know of a cache: what its adapter declares of it, and its shape.


FORK_SHARES = ("blocks", "full blocks", "nothing")


class Shape(Protocol):
    """What the oracle must know of a cache's spec."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def windows(self) -> Sequence[int | None]: ...


def always(stored: int, length: int) -> bool:  # noqa: ARG001
    """Say that any sequence may be cut."""
    return True


AnyState = TypeVar("AnyState", bound=State)


@dataclass(slots=True)
class Oracle:
    """Sequences of tokens on pages, with as many pages as the cache has blocks."""

    block_size: int
    capacity: int
    fork_shares: str = "blocks"
    """As ``KVCacheAdapter.fork_shares``."""
    branches: tuple[Branch, ...] = ()
    """What sequences say, if the cache is told."""
    texts: Texts | None = field(init=False)
    truncate_copies: bool = False
    """As ``TruncationTraits.copies``."""
    can_truncate: Callable[[int, int], bool] = always
    """Whether a sequence of so many tokens may be cut to so many."""
    finds_blocks: bool = False
    """A cache may share blocks that hold the same, so that it may have more room than is known."""
    atomic_batches: bool = True
    """As ``KVCacheAdapter.atomic_batches``."""
    sequences: dict[int, list[Page]] = field(default_factory=dict)
    lives: Counter[int] = field(default_factory=Counter)
    """How often a sequence of each name was freed or cut."""
    unseen: Counter[int] = field(default_factory=Counter)
    """How many tokens of its last page a sequence was cut off from, which others may see."""
    windows: Windows = field(default_factory=Windows)
    """The groups of layers that have the same blocks."""
    states: dict[type[State], State] = field(default_factory=dict)
    """The parts of capabilities, by their kinds."""

    @classmethod
    def of(cls, adapter: Any, spec: Shape, branches: tuple[Branch, ...] = ()) -> Self:
        """Begin an oracle for an empty cache of this shape, as the adapter declares it."""
        kinds = [
            kind
            for kind in chain.from_iterable(each.states for each in adapter.capabilities)
            if (not kind.any_of or adapter.abilities.intersection(kind.any_of))
            and all(attrgetter(name)(adapter) == due for name, due in kind.where.items())
        ]
        shared = adapter.windows.pools == "shared"
        return cls(
            spec.block_size,
            spec.num_blocks,
            adapter.fork_shares,
            branches,
            adapter.truncation.copies,
            partial(adapter.can_truncate, spec),
            adapter.prefixes.shares == "equal prefixes",
            adapter.atomic_batches,
            windows=Windows(spec.windows, shared, adapter.windows.gives_back),
            states={kind: kind.of(adapter) for kind in kinds},
        )

    def __post_init__(self) -> None:
        self.texts = Texts(self.branches) if self.branches else None

    def state(self, kind: type[AnyState]) -> AnyState | None:
        """Return the part of a capability, if the cache has it."""
        found = self.states.get(kind)
        return found if isinstance(found, kind) else None

    def begun(self, kind: type[AnyState]) -> AnyState:
        """Return the part of a capability, which begins empty where the cache has none yet."""
        found = self.state(kind)
        if found is None:
            found = self.states[kind] = kind()
        return found

    def keeps(self, seq: int, at: int) -> bool:
        """Return True for a page of a sequence that stays as it is, whoever holds it."""
        return any(state.keeps(seq, at) for state in self.states.values())

    def _cut_states(self, seq: int, pages: int) -> None:
        for state in self.states.values():
            state.cut(seq, pages)

    def tokens(self, seq: int) -> list[int]:
        pages = range(len(self.sequences.get(seq, [])))
        return [token for at in pages for token in self.tokens_on(seq, at)]

    def tokens_on(self, seq: int, at: int) -> list[int]:
        """List the tokens that a sequence sees of one of its pages."""
        pages = self.sequences[seq]
        tokens = pages[at].tokens
        return tokens[: len(tokens) - self.unseen[seq]] if at == len(pages) - 1 else tokens

    def length(self, seq: int) -> int:
        """Count the tokens that a sequence sees; all its pages but the last are full."""
        if not (pages := self.sequences.get(seq)):
            return 0
        return (len(pages) - 1) * self.block_size + len(pages[-1].tokens) - self.unseen[seq]

    def on_last(self, seq: int) -> int:
        """Count the tokens that a sequence sees of its last page; 0 if it has none."""
        pages = self.sequences.get(seq)
        return len(pages[-1].tokens) - self.unseen[seq] if pages else 0

    def unwritten(self, seq: int) -> int:
        """Count the last tokens of a sequence that are not written yet."""
        return sum(state.unwritten(seq) for state in self.states.values())

    @property
    def absent(self) -> dict[int, Absence]:
        """The sequences that exist, and that only the steps which bring them back may use."""
        return {seq: how for state in self.states.values() for seq, how in state.absent.items()}

    @property
    def named(self) -> set[int]:
        """The names that sequences have."""
        return {*self.sequences, *self.absent}

    @property
    def promised(self) -> list[int]:
        """The names that sequences are to have, though nothing of them is stored."""
        return [name for state in self.states.values() for name in state.promised]

    @property
    def hidden(self) -> list[int]:
        """The sequences that have pages and cannot be read yet."""
        return [seq for state in self.states.values() for seq in state.hidden]

    @property
    def readable(self) -> list[int]:
        """The sequences that can be read."""
        hidden = self.hidden
        return [seq for seq in self.sequences if seq not in hidden]

    @property
    def usable(self) -> list[int]:
        """The sequences that are there, all of whose tokens are written."""
        absent = self.absent
        return [seq for seq in self.sequences if seq not in absent and not self.unwritten(seq)]

    def first_live(self, seq: int, layer: int) -> int:
        """Return the position of the first token that may still be attended to in a layer."""
        return first_live(self.windows.of(layer), self.length(seq))

    def live(self, seq: int, layer: int) -> list[int]:
        """List the tokens of a sequence that may still be attended to in a layer."""
        return self.tokens(seq)[self.first_live(seq, layer) :]

    def given_back(self, seq: int, layer: int) -> int:
        """Count the first pages of a sequence that left the window of a layer and are gone."""
        return self.windows.given_back[self.windows.of(layer)][seq]

    def pool_of(self, layer: int) -> list[int]:
        """List layers, one of each table that names blocks from the pool of this layer."""
        return self.windows.pool_of(layer)

    def pages_free(self) -> int:
        """Count the blocks that are free in every pool."""
        if self.windows.of_layer:
            return min(self.blocks().free.values())
        return self.capacity - len(
            {id(page) for pages in self.sequences.values() for page in pages}
        )

    def free_in(self, layer: int) -> int:
        """Count the blocks that are free in the pool of a layer."""
        windows = self.windows
        return self.blocks().free[None if windows.shared_pool else windows.of(layer)]

    def conditions_met(self, rows: Sequence[tuple[int, int]]) -> list[str]:
        """Say for each row what it finds at the end of its sequence, appended in this order."""
        met = []
        leaving: Counter[int] = Counter()
        for seq, _ in rows:
            pages = self.sequences.get(seq, [])
            last = pages[-1] if pages else None
            if last is None:
                met.append("fresh")
            elif self.on_last(seq) == self.block_size:
                met.append("rollover_shared" if last.holders > 1 else "rollover")
            elif last.holders - leaving[id(last)] > 1 or self.keeps(seq, len(pages) - 1):
                leaving[id(last)] += 1
                met.append("copy_on_write")
            else:
                met.append("in_place")
        return met

    def pages_needed(self, rows: Sequence[tuple[int, int]]) -> int:
        """Count the new pages that appending ``(sequence, tokens)`` rows in this order takes."""
        needed = self.conditions_met(rows).count("copy_on_write")
        for seq, count in rows:
            pages = self.sequences.get(seq)
            room = self.block_size - self.on_last(seq) if pages else 0
            needed += -(-max(0, count - room) // self.block_size)
        return needed

    def room(self, rows: Sequence[tuple[int, int]]) -> str:
        """Say in words how much room there is for rows, and how much they need."""
        if not self.windows.of_layer:
            needed = self.pages_needed(rows)
            return f"{needed} block{'s' * (needed != 1)} needed, {self.pages_free()} free"
        free = self.blocks().free
        if self.windows.shared_pool:
            return f"{free[None]} blocks free for all windows"
        each = (f"{blocks} with window {window}" for window, blocks in free.items())
        return f"blocks free: {', '.join(each)}"

    def fits(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Return True if these rows find room one after the other.

        What a row gives back makes room for its own blocks, and for those of rows behind it. Where
        no layer has a window nothing is given back, and counting what is needed takes less time.
        """
        if not self.windows.of_layer:
            return self.pages_needed(rows) <= self.pages_free()
        blocks = self.blocks()
        return all(blocks.append(*row) for row in rows)

    def new_tokens(self, rows: Sequence[tuple[int, int]]) -> list[int]:
        """List the tokens that appending these rows writes, row by row."""
        return [
            self._token(seq, position)
            for seq, count in rows
            for position in range(self.length(seq), self.length(seq) + count)
        ]

    def _token(self, seq: int, position: int) -> int:
        if not self.texts:
            return token_of(seq, position, self.lives[seq])
        return self._text_token(self.text_of(seq), position)

    def _text_token(self, text: int, position: int) -> int:
        assert self.texts
        owner, namespace = self.texts.owner(text, position), self.texts.namespace(text)
        return text_token(owner, position, namespace)

    def text_of(self, seq: int) -> int:
        """Return the text of a sequence, or the one that it will have when it begins."""
        assert self.texts
        return self.texts.of(seq, self.lives[seq])

    def said(self, rows: Sequence[tuple[int, int]]) -> list[Said]:
        """List, for each row, what the tokens say that appending it writes."""
        if not self.texts:
            return []
        return [
            self.texts.said(self.text_of(seq), self.length(seq), self.length(seq) + count)
            for seq, count in rows
        ]

    def said_by(self, seq: int) -> list[Said]:
        """List what a sequence says so far, as the only row of a write."""
        return [self.texts.said(self.text_of(seq), 0, self.length(seq))] if self.texts else []

    def text_tokens(self, text: int, count: int) -> list[int]:
        """List the first tokens of a text."""
        return [self._text_token(text, at) for at in range(count)]

    def append(self, rows: Sequence[tuple[int, int]], tokens: Sequence[int]) -> None:
        coming = iter(tokens)
        for seq, _ in rows:
            self._slide(seq)
        for seq, count in rows:
            pages = self.sequences.setdefault(seq, [])
            for _ in range(count):
                self._append_token(seq, pages, next(coming))
        self.slide_written(rows)

    def slide_written(self, rows: Sequence[tuple[int, int]]) -> None:
        """Give back what left the windows of rows that were written, if a cache does so at once.

        Room that was reserved is kept until it is written to.
        """
        at_once = self.windows.of_layer and self.windows.gives_back == AT_ONCE
        for seq, _ in rows:
            if at_once and not self.unwritten(seq):
                self._slide(seq)

    def try_in_vain(self, seq: int) -> None:
        """Give back what left the windows of a row that found no room, if a cache does so first."""
        if self.windows.gives_back == NEXT_TRY and seq in self.sequences:
            self._slide(seq)

    def _slide(self, seq: int) -> None:
        if self.windows.of_layer:
            self.windows.slide(seq, self.length(seq), self.block_size)

    def _append_token(self, seq: int, pages: list[Page], token: int) -> None:
        if not pages or self.on_last(seq) == self.block_size:
            pages.append(Page([token]))
            return
        self._own_last(seq)
        pages[-1].tokens.append(token)

    def _own_last(self, seq: int) -> None:
        """Leave a sequence alone on its last page, and nothing there that it does not see."""
        pages = self.sequences[seq]
        last, seen = pages[-1], self.tokens_on(seq, len(pages) - 1)
        del self.unseen[seq]
        if not self._alone_on_last(seq):
            last.holders -= 1
            pages[-1] = last.copied(seen)
            self._cut_states(seq, len(pages) - 1)
        else:
            last.cut += last.tokens[len(seen) :]
            last.tokens = seen

    def _alone_on_last(self, seq: int) -> bool:
        pages = self.sequences[seq]
        return pages[-1].holders == 1 and not self.keeps(seq, len(pages) - 1)

    def fork(self, parent: int, child: int) -> None:
        self.begin_as(parent, child)
        own: list[Page] = []
        for at, page in enumerate(self.sequences[parent]):
            shared = self.shares(parent, at)
            page.holders += shared
            own.append(page if shared else page.copied(self.tokens_on(parent, at)))
            if shared and at == len(self.sequences[parent]) - 1:
                self.unseen[child] = self.unseen[parent]
        self.sequences[child] = own
        self.windows.fork(parent, child)
        for state in self.states.values():
            state.forked(parent, child, sum(page.holders > 1 for page in own))

    def begin_as(self, parent: int, child: int) -> None:
        """Have ``child`` say what ``parent`` says by now, and go on with a text of its own."""
        if self.texts:
            self.texts.fork(self.text_of(parent), child, self.length(parent))

    def adopt_sharing(self, tables_of: Callable[[int], Mapping[int, Table]]) -> None:
        """Share pages as a cache shares blocks, once that was found right.

        ``tables_of`` returns the table of each sequence in a layer. Where layers have windows,
        pages are those of all groups, so none is shared: what each group shares is noted.
        """
        if not self.windows.of_layer:
            share_as(self.sequences, tables_of(0))
            return
        for layer in self.windows.groups:
            self.windows.adopt(self.windows.of(layer), tables_of(layer))

    def blocks_of(self, window: Window, seq: int) -> list[object]:
        """Return for each page what two sequences have in common where they share its block."""
        pages = self.sequences.get(seq, ())
        table = self.windows.tables[window].get(seq, ())
        return [*table[: len(pages)], *map(id, pages[len(table) :])]

    def fork_fits(self, parent: int) -> bool:
        return self.blocks().fork(parent)

    def shares(self, parent: int, at: int) -> bool:
        """Return True if a fork of ``parent`` shares this page."""
        full = len(self.tokens_on(parent, at)) == self.block_size
        return self.fork_shares == "blocks" or (self.fork_shares == "full blocks" and full)

    def may_cut(self, seq: int, length: int) -> bool:
        return self.can_truncate(self.length(seq), length)

    def cuts_fit(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Return True if there is a page for every copy that cutting these rows in order takes.

        Pages that a row gives up are there for its own copy, and for those of rows behind it.
        """
        blocks = self.blocks()
        return all(blocks.cut(*row) for row in rows)

    def blocks(self) -> Room:
        """Count who holds which block."""
        return Room(self, self.windows.given_back, shared_pool=self.windows.shared_pool)

    def cut(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence, and give up the pages behind them."""
        if length == self.length(seq):
            return
        if self.texts:
            self.texts.fork(self.text_of(seq), seq, length)
        self.lives[seq] += 1
        pages = self.sequences[seq]
        kept = -(-length // self.block_size)
        if kept < len(pages):
            del self.unseen[seq]
        for page in pages[kept:]:
            page.holders -= 1
        del pages[kept:]
        self._cut_states(seq, kept)
        self.windows.cut(seq, kept)
        self.unseen[seq] += self.length(seq) - length
        if self.unseen[seq] and (self.truncate_copies or self._alone_on_last(seq)):
            self._own_last(seq)

    def free(self, seq: int) -> None:
        self.lives[seq] += 1
        if self.texts:
            self.texts.forget(seq)
        for state in self.states.values():
            state.freed(seq)
        if seq in self.sequences:
            self.give_up(seq)

    def give_up(self, seq: int) -> None:
        """Take its pages from a sequence."""
        for state in self.states.values():
            state.gave_up(seq)
        self.windows.forget(seq)
        del self.unseen[seq]
        for page in self.sequences.pop(seq):
            page.holders -= 1
