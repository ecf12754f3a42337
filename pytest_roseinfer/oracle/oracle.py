"""The oracle: expected contents of a paged cache, in plain Python lists.

It shares no code with any cache. A token is a number that encodes the sequence that wrote it and
its position; a page is a list of tokens and a refcount. Successive sequences of one name write
different tokens, and so does a sequence after a truncation. If sequences have texts, the number
encodes the text and the position instead, so that equal prefixes have equal tokens.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pytest_roseinfer.oracle.pages import (
    AT_ONCE,
    NEXT_TRY,
    Absence,
    BlockCounts,
    Page,
    State,
    Windows,
    first_live,
    share_as,
    token_of,
)
from pytest_roseinfer.oracle.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Self

    from pytest_roseinfer.oracle.pages import Table, Window
    from pytest_roseinfer.oracle.texts import Branch, TextSlice

FORK_SHARES = ("blocks", "full blocks", "nothing")
"""Choices of ``KVCacheAdapter.fork_shares``."""


class Shape(Protocol):
    """The part of a cache's spec that the oracle needs."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def windows(self) -> Sequence[int | None]: ...


class Step(Protocol):
    """The part of an operation that the oracle needs to judge its room."""

    def fits(self, oracle: Any, /) -> bool: ...
    def changed_seqs(self) -> list[int]: ...


def always(stored: int, length: int) -> bool:  # noqa: ARG001
    """Return True: any sequence may be truncated to any length."""
    return True


AnyState = TypeVar("AnyState", bound=State)


@dataclass(slots=True)
class Oracle:
    """Sequences of tokens on pages, with as many pages as the cache has blocks."""

    block_size: int
    capacity: int
    fork_shares: str = "blocks"
    """Value of ``KVCacheAdapter.fork_shares``."""
    branches: tuple[Branch, ...] = ()
    """Texts of sequences; empty if the cache gets no token ids."""
    texts: Texts | None = field(init=False)
    """Texts and their forks; None if sequences have no texts."""
    truncate_copies: bool = False
    """Value of ``TruncationTraits.copies``."""
    can_truncate: Callable[[int, int], bool] = always
    """Predicate of stored tokens and new length; True if the cache allows that truncation."""
    finds_blocks: bool = False
    """True if the cache may share equal blocks, and so have more room than the oracle counts."""
    atomic_batches: bool = True
    """Value of ``KVCacheAdapter.atomic_batches``."""
    sequences: dict[int, list[Page]] = field(default_factory=dict)
    """Pages of each sequence."""
    lives: Counter[int] = field(default_factory=Counter)
    """Times that sequences were freed or truncated, by name."""
    truncated_on_last: Counter[int] = field(default_factory=Counter)
    """Tokens that a truncation cut off each sequence's last page, which other holders may use."""
    windows: Windows = field(default_factory=Windows)
    """Groups of layers that have equal tables."""
    states: dict[type[State], State] = field(default_factory=dict)
    """States of capabilities, by kind."""

    @classmethod
    def of(cls, adapter: Any, spec: Shape, branches: tuple[Branch, ...] = ()) -> Self:
        """Make an oracle for an empty cache of this shape, with the adapter's declarations."""
        every = chain.from_iterable(each.states for each in adapter.capabilities)
        kinds = [kind for kind in every if kind.applies_to(adapter)]
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
            windows=Windows(spec.windows, shared, adapter.windows.frees),
            states={kind: kind.of(adapter, spec) for kind in kinds},
        )

    def __post_init__(self) -> None:
        self.texts = Texts(self.branches) if self.branches else None

    def state(self, kind: type[AnyState]) -> AnyState | None:
        """Return the state of a capability; None if the cache does not have it."""
        state = self.states.get(kind)
        return state if isinstance(state, kind) else None

    def ensure_state(self, kind: type[AnyState]) -> AnyState:
        """Return the state of a capability; add an empty one if the cache does not have it."""
        state = self.state(kind)
        if state is None:
            state = self.states[kind] = kind()
        return state

    def keeps(self, seq: int, at: int) -> bool:
        """Return True for a page that is never changed: a write to it makes a copy."""
        return any(state.keeps(seq, at) for state in self.states.values())

    def _cut_states(self, seq: int, pages: int) -> None:
        for state in self.states.values():
            state.on_truncate(seq, pages)

    def tokens(self, seq: int) -> list[int]:
        """List the tokens of a sequence."""
        pages = range(len(self.sequences.get(seq, [])))
        return [token for at in pages for token in self.tokens_on(seq, at)]

    def tokens_on(self, seq: int, at: int) -> list[int]:
        """List the tokens of a sequence on one of its pages."""
        pages = self.sequences[seq]
        tokens = pages[at].tokens
        return (
            tokens[: len(tokens) - self.truncated_on_last[seq]] if at == len(pages) - 1 else tokens
        )

    def length(self, seq: int) -> int:
        """Count the tokens of a sequence, whose pages are full except for the last."""
        if not (pages := self.sequences.get(seq)):
            return 0
        return (
            (len(pages) - 1) * self.block_size + len(pages[-1].tokens) - self.truncated_on_last[seq]
        )

    def count_on_last_page(self, seq: int) -> int:
        """Count the tokens of a sequence on its last page; 0 if it has no page."""
        pages = self.sequences.get(seq)
        return len(pages[-1].tokens) - self.truncated_on_last[seq] if pages else 0

    def unwritten(self, seq: int) -> int:
        """Count the last tokens of a sequence that are not written yet, or that are drafts."""
        return sum(state.unwritten(seq) for state in self.states.values())

    @property
    def absent(self) -> dict[int, Absence]:
        """Sequences that must be brought back before other steps may use them."""
        return {seq: how for state in self.states.values() for seq, how in state.absent.items()}

    @property
    def named(self) -> set[int]:
        """Names of all sequences, absent ones included."""
        return {*self.sequences, *self.absent}

    @property
    def pending_seqs(self) -> list[int]:
        """Names reserved for sequences that have not begun."""
        return [name for state in self.states.values() for name in state.pending_seqs]

    @property
    def hidden(self) -> list[int]:
        """Sequences that have pages but cannot be read yet."""
        return [seq for state in self.states.values() for seq in state.hidden]

    @property
    def ended(self) -> dict[int, str]:
        """Descriptions of ended sequences whose pages are kept, by the names of these pages."""
        return {name: each for state in self.states.values() for name, each in state.ended.items()}

    @property
    def readable(self) -> list[int]:
        """Sequences that can be read."""
        hidden = {*self.hidden, *self.ended}
        return [seq for seq in self.sequences if seq not in hidden]

    @property
    def usable(self) -> list[int]:
        """Sequences that go on, are not absent, and whose tokens are all written."""
        absent = {*self.absent, *self.ended}
        return [seq for seq in self.sequences if seq not in absent and not self.unwritten(seq)]

    def first_live(self, seq: int, layer: int) -> int:
        """Return the position of the first token that may still be attended to in a layer."""
        return first_live(self.windows.of(layer), self.length(seq))

    def live(self, seq: int, layer: int) -> list[int]:
        """List the tokens of a sequence that may still be attended to in a layer."""
        return self.tokens(seq)[self.first_live(seq, layer) :]

    def count_out_of_window(self, seq: int, layer: int) -> int:
        """Count the first pages of a sequence that are freed because they left a layer's window."""
        return self.windows.out_of_window_pages[self.windows.of(layer)][seq]

    def pool_of(self, layer: int) -> list[int]:
        """List this layer, and one layer of each other group that shares its pool."""
        return self.windows.pool_of(layer)

    def pages_free(self) -> int:
        """Count the blocks that are free in every pool."""
        if self.windows.of_layer:
            return min(self.block_counts().free.values())
        return self.capacity - len(
            {id(page) for pages in self.sequences.values() for page in pages}
        )

    def pages_free_after(self, seq: int, count: int) -> int:
        """Count the blocks that are free in every pool after a row is written; -1 without room."""
        blocks = self.block_counts()
        if not blocks.append(seq, count):
            return -1
        if self.windows.frees == AT_ONCE:
            blocks.slide_appended(seq, count)
        return min(blocks.free.values())

    def free_in(self, layer: int) -> int:
        """Count the blocks that are free in the pool of a layer."""
        windows = self.windows
        return self.block_counts().free[None if windows.shared_pool else windows.of(layer)]

    def conditions_met(self, rows: Sequence[tuple[int, int]]) -> list[str]:
        """Return the condition that each row meets, such as "fresh", appended in this order."""
        met = []
        leaving: Counter[int] = Counter()
        for seq, _ in rows:
            pages = self.sequences.get(seq, [])
            last = pages[-1] if pages else None
            if last is None:
                met.append("fresh")
            elif self.count_on_last_page(seq) == self.block_size:
                met.append("rollover_shared" if last.holders > 1 else "rollover")
            elif last.holders - leaving[id(last)] > 1 or self.keeps(seq, len(pages) - 1):
                leaving[id(last)] += 1
                met.append("copy_on_write")
            else:
                met.append("in_place")
        return met

    def pages_needed(self, rows: Sequence[tuple[int, int]]) -> int:
        """Count the new pages for appending ``(sequence, tokens)`` rows in this order."""
        needed = self.conditions_met(rows).count("copy_on_write")
        for seq, count in rows:
            pages = self.sequences.get(seq)
            room = self.block_size - self.count_on_last_page(seq) if pages else 0
            needed += -(-max(0, count - room) // self.block_size)
        return needed

    def describe_free_blocks(self, rows: Sequence[tuple[int, int]]) -> str:
        """Describe the free blocks, and the blocks that rows need."""
        if not self.windows.of_layer:
            needed = self.pages_needed(rows)
            return f"{needed} block{'s' * (needed != 1)} needed, {self.pages_free()} free"
        free = self.block_counts().free
        if self.windows.shared_pool:
            return f"{free[None]} blocks free for all windows"
        each = (f"{blocks} with window {window}" for window, blocks in free.items())
        return f"blocks free: {', '.join(each)}"

    def fits(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Return True if there is room for these rows, one after the other.

        Blocks that a row frees make room for its own blocks, and for those of later rows. Without
        windows no row frees blocks, and a plain count of needed pages is faster.
        """
        if not self.windows.of_layer:
            return self.pages_needed(rows) <= self.pages_free()
        blocks = self.block_counts()
        return all(blocks.append(*row) for row in rows)

    def takes_blocks(self, step: Step) -> bool:
        """Return True if a step would not fit if no block were free."""
        return not step.fits(self._with_capacity(self.capacity - self.pages_free()))

    def fits_to_spare(self, step: Step) -> bool:
        """Return True if a step fits with all blocks that states may set aside for other use."""
        spared = self.blocks_to_spare({*step.changed_seqs()})
        return not spared or step.fits(self._with_capacity(self.capacity - spared))

    def blocks_to_spare(self, seqs: Collection[int] = ()) -> int:
        """Count the blocks that states may set aside for other use, in a step of ``seqs``."""
        return sum(state.blocks_to_spare(seqs) for state in self.states.values())

    def describe_spared_blocks(self) -> str:
        """Describe the blocks that states may set aside for other use."""
        return " or ".join(filter(None, (state.spared_blocks for state in self.states.values())))

    def _with_capacity(self, capacity: int) -> Self:
        """Return a copy with the same sequences in another number of blocks."""
        other = copy(self)
        other.capacity = capacity
        return other

    @property
    def uncertain_room(self) -> bool:
        """True if a step may find more or less room than is counted here."""
        return self.finds_blocks or any(state.uncertain_room for state in self.states.values())

    @property
    def judges_capacity(self) -> bool:
        """False with windows, and where a cache admits row by row."""
        return not self.windows.of_layer and self.atomic_batches

    def exceeds_capacity(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Return True if these rows have no room even where all equal blocks are shared.

        Pages with different first tokens are never one block. False unless ``judges_capacity``.
        """
        if not self.judges_capacity:
            return False
        first_tokens = {page.tokens[0] for pages in self.sequences.values() for page in pages}
        for seq, count in rows:
            tokens = self.new_tokens([(seq, count)])
            first_tokens.update(tokens[-self.length(seq) % self.block_size :: self.block_size])
        return len(first_tokens) > self.capacity

    def new_tokens(self, rows: Sequence[tuple[int, int]]) -> list[int]:
        """List the tokens that appending these rows writes, row by row."""
        tokens: list[int] = []
        for seq, count in rows:
            begin, end = self.length(seq), self.length(seq) + count
            if self.texts:
                tokens += self.texts.tokens(self.text_of(seq), begin, end)
            else:
                life = self.lives[seq]
                tokens += [token_of(seq, position, life) for position in range(begin, end)]
        return tokens

    def text_of(self, seq: int) -> int:
        """Return the text of a sequence, which may not have begun yet."""
        assert self.texts
        return self.texts.of(seq, self.lives[seq])

    def text_slices(self, rows: Sequence[tuple[int, int]]) -> list[TextSlice]:
        """List the token ids that appending each row writes; empty without texts."""
        if not self.texts:
            return []
        return [
            self.texts.text_slice(self.text_of(seq), self.length(seq), self.length(seq) + count)
            for seq, count in rows
        ]

    def stored_text(self, seq: int) -> list[TextSlice]:
        """List the token ids of a sequence so far, as a write of this row alone."""
        return [self.texts.text_slice(self.text_of(seq), 0, self.length(seq))] if self.texts else []

    def text_tokens(self, text: int, count: int) -> list[int]:
        """List the first tokens of a text."""
        assert self.texts
        return self.texts.tokens(text, 0, count)

    def begin_epoch(self, stored: Mapping[int, int]) -> None:
        """Give all tokens that are written from now on other keys and values.

        ``stored`` has the number of tokens of each sequence that keeps those that it has.
        """
        if self.texts:
            lengths = stored.items()
            self.texts.begin_epoch({seq: (self.text_of(seq), length) for seq, length in lengths})

    def mixes_epochs(self, seq: int) -> bool:
        """Return True if a sequence has tokens of an earlier epoch."""
        return self.texts is not None and self.texts.mixes_epochs(self.text_of(seq))

    def tokens_written_again(self, seq: int, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of a sequence as they are if all of them are written again."""
        if not self.texts:
            return list(tokens)
        self.texts.write_again(seq, self.text_of(seq))
        return self.text_tokens(self.text_of(seq), len(tokens))

    def append(self, rows: Sequence[tuple[int, int]], tokens: Sequence[int]) -> None:
        """Append tokens to several sequences; a row is a sequence and its number of tokens."""
        coming = iter(tokens)
        for seq, _ in rows:
            self._slide(seq)
        for seq, count in rows:
            pages = self.sequences.setdefault(seq, [])
            begin = self.length(seq)
            for _ in range(count):
                self._append_token(seq, pages, next(coming))
            for state in self.states.values():
                state.on_write(seq, begin, begin + count)
        self.slide_written(rows)

    def slide_written(self, rows: Sequence[tuple[int, int]]) -> None:
        """Free the pages outside the windows of written rows, if the cache does so at once.

        Reserved room is kept until it is written to.
        """
        at_once = self.windows.of_layer and self.windows.frees == AT_ONCE
        for seq, _ in rows:
            if at_once and not self.unwritten(seq):
                self._slide(seq)

    def slide_refused(self, seq: int) -> None:
        """Free the pages outside the windows of a refused row, if the cache does so first."""
        if self.windows.frees == NEXT_TRY and seq in self.sequences:
            self._slide(seq)

    def _slide(self, seq: int) -> None:
        if self.windows.of_layer:
            self.windows.slide(seq, self.length(seq), self.block_size)

    def _append_token(self, seq: int, pages: list[Page], token: int) -> None:
        if not pages or self.count_on_last_page(seq) == self.block_size:
            pages.append(Page([token]))
            return
        self._make_last_writable(seq)
        pages[-1].tokens.append(token)

    def _make_last_writable(self, seq: int) -> None:
        """Give a sequence a last page of its own, with only its own tokens; copy it if shared."""
        pages = self.sequences[seq]
        last, tokens = pages[-1], self.tokens_on(seq, len(pages) - 1)
        del self.truncated_on_last[seq]
        if not self._owns_last(seq):
            last.holders -= 1
            pages[-1] = last.copy_prefix(tokens)
            self._cut_states(seq, len(pages) - 1)
        else:
            last.removed_tokens += last.tokens[len(tokens) :]
            last.tokens = tokens

    def _owns_last(self, seq: int) -> bool:
        pages = self.sequences[seq]
        return pages[-1].holders == 1 and not self.keeps(seq, len(pages) - 1)

    def fork(self, parent: int, child: int) -> None:
        """Begin a sequence with all tokens of another one, on shared pages if the cache shares."""
        self.branch_text(parent, child)
        pages_of_fork: list[Page] = []
        for at, page in enumerate(self.sequences[parent]):
            shared = self.shares(parent, at)
            page.holders += shared
            pages_of_fork.append(page if shared else page.copy_prefix(self.tokens_on(parent, at)))
            if shared and at == len(self.sequences[parent]) - 1:
                self.truncated_on_last[child] = self.truncated_on_last[parent]
        self.sequences[child] = pages_of_fork
        self.windows.fork(parent, child)
        for state in self.states.values():
            state.on_fork(parent, child, sum(page.holders > 1 for page in pages_of_fork))

    def rename(self, seq: int, other: int) -> None:
        """Give the tokens and pages of a sequence to another name, which no sequence has."""
        pages = self.sequences[other] = self.sequences.pop(seq)
        self.truncated_on_last[other] = self.truncated_on_last.pop(seq, 0)
        self.windows.fork(seq, other)
        self.windows.forget(seq)
        for state in self.states.values():
            state.on_fork(seq, other, len(pages))
            state.on_release(seq)

    def branch_text(self, parent: int, child: int) -> None:
        """Give ``child`` a text that branches off the text of ``parent`` at its present length."""
        if self.texts:
            self.texts.fork(self.text_of(parent), child, self.length(parent))

    def adopt_sharing(self, tables_of: Callable[[int], Mapping[int, Table]]) -> None:
        """Share pages as a cache shares blocks, after its tables were checked.

        ``tables_of`` returns the table of each sequence in a layer. If layers have windows, a page
        stands for the blocks of all groups and is not shared; the tables of each group are recorded
        instead.
        """
        if not self.windows.of_layer:
            share_as(self.sequences, tables_of(0))
            return
        for layer in self.windows.groups:
            self.windows.adopt(self.windows.of(layer), tables_of(layer))

    def blocks_of(self, window: Window, seq: int) -> list[object]:
        """Return a key for the block of each page, equal for sequences that share the block."""
        pages = self.sequences.get(seq, ())
        table = self.windows.tables[window].get(seq, ())
        return [*table[: len(pages)], *map(id, pages[len(table) :])]

    def fork_fits(self, parent: int) -> bool:
        return self.block_counts().fork(parent)

    def shares(self, parent: int, at: int) -> bool:
        """Return True if a fork of ``parent`` shares this page."""
        full = len(self.tokens_on(parent, at)) == self.block_size
        return self.fork_shares == "blocks" or (self.fork_shares == "full blocks" and full)

    def allows_truncation(self, seq: int, length: int) -> bool:
        stored = self.length(seq)
        return self.can_truncate(stored, length) and (
            length in (0, stored)
            or all(state.allows_truncation(seq, length) for state in self.states.values())
        )

    def lengths_to_try(self, seq: int) -> list[int]:
        """List lengths to which truncations of a sequence are worth a try; often none."""
        every = (state.lengths_to_try(seq) for state in self.states.values())
        return sorted({*chain.from_iterable(every)} & {*range(1, self.length(seq))})

    def truncations_fit(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Return True if there is room for all copies of truncating these rows in order.

        Pages that a row frees make room for its own copy, and for those of later rows.
        """
        blocks = self.block_counts()
        return all(blocks.truncate(*row) for row in rows)

    def block_counts(self) -> BlockCounts:
        """Count the free blocks, and the holders of the others."""
        return BlockCounts(
            self, self.windows.out_of_window_pages, shared_pool=self.windows.shared_pool
        )

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence, and release the pages after them."""
        if length == self.length(seq):
            return
        if self.texts:
            self.texts.fork(self.text_of(seq), seq, length)
        self.lives[seq] += 1
        pages = self.sequences[seq]
        num_pages = -(-length // self.block_size)
        if num_pages < len(pages):
            del self.truncated_on_last[seq]
        for page in pages[num_pages:]:
            page.holders -= 1
        del pages[num_pages:]
        self._cut_states(seq, num_pages)
        for state in self.states.values():
            state.on_cut(seq, length)
        self.windows.on_truncate(seq, num_pages)
        self.truncated_on_last[seq] += self.length(seq) - length
        if self.truncated_on_last[seq] and (self.truncate_copies or self._owns_last(seq)):
            self._make_last_writable(seq)

    def drop_unwritten(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence; the others were never written."""
        pages = self.sequences[seq]
        num_pages = -(-length // self.block_size)
        for page in pages[num_pages:]:
            page.holders -= 1
        del pages[num_pages:]
        if within := length % self.block_size:
            pages[-1] = Page(pages[-1].tokens[:within], pages[-1].holders)
        self._cut_states(seq, num_pages)

    def replace_last(self, seq: int, count: int, tokens: Sequence[int]) -> None:
        """Replace the last ``count`` tokens of a sequence, whose pages no other one holds."""
        length, pages = self.length(seq) - count, self.sequences[seq]
        last = pages[-(-length // self.block_size) - 1] if length else None
        self.drop_unwritten(seq, length)
        if last and (within := length % self.block_size):
            pages[-1].removed_tokens = [*last.removed_tokens, *last.tokens[within:]]
        self.append([(seq, len(tokens))], tokens)

    def preview(self) -> Self:
        """Return a copy that can get other texts and lives of sequences."""
        other = copy(self)
        other.lives = Counter(self.lives)
        other.texts = self.texts.copied() if self.texts else None
        return other

    def free(self, seq: int) -> None:
        """Remove a sequence, and release its pages."""
        self.lives[seq] += 1
        if self.texts:
            self.texts.forget(seq)
        for state in self.states.values():
            state.on_free(seq)
        if seq in self.sequences:
            self.release_pages(seq)

    def release_pages(self, seq: int) -> None:
        """Release all pages of a sequence."""
        for state in self.states.values():
            state.on_release(seq)
        self.windows.forget(seq)
        del self.truncated_on_last[seq]
        for page in self.sequences.pop(seq):
            page.holders -= 1
