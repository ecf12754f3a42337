"""Parts of the oracle: tokens, pages, states of capabilities, and counts of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

POSITIONS = 1 << 16
"""Longest sequence whose tokens all have distinct numbers."""
NAMES = 1 << 16
"""Number of names, those of padding and texts included."""
PADDING_SEQUENCE = 1 << 15
"""Name for the tokens of padding rows."""
TEXTS = PADDING_SEQUENCE + 1
"""Name of the first text; the others follow."""
NAMESPACES = 1 << 8
"""Number of namespaces of texts."""
EPOCHS = 1 << 8
"""Number of epochs of texts."""


def token_of(seq: int, position: int, life: int = 0) -> int:
    """Return the token at a position of a sequence that was freed or truncated ``life`` times."""
    return (life * NAMES + seq) * POSITIONS + position


def padding_token(row: int) -> int:
    """Return the token of a padding row, which belongs to no sequence."""
    return token_of(PADDING_SEQUENCE, row)


def text_token(text: int, position: int, namespace: int = 0, epoch: int = 0) -> int:
    """Return the token at a position of a text."""
    return token_of(TEXTS + text, position, epoch * NAMESPACES + namespace)


class TextPlace(NamedTuple):
    """The place of a token in a text."""

    text: int
    position: int
    namespace: int
    epoch: int
    """Epoch in which it was written, plus a multiple of ``EPOCHS`` if it follows older tokens."""

    @property
    def space(self) -> str:
        """Its namespace and epoch in words; empty if both are the first."""
        older, epoch = divmod(self.epoch, EPOCHS)
        words = [f"namespace {self.namespace}"] * bool(self.namespace)
        words += [f"epoch {epoch}" + " after older tokens" * bool(older)] * bool(self.epoch)
        return ", ".join(words)


def token_parts(token: int) -> tuple[int, int, int]:
    """Split a token into sequence, position and life."""
    named, position = divmod(token, POSITIONS)
    life, seq = divmod(named, NAMES)
    return seq, position, life


def token_label(token: int) -> str:
    """Return a short label of a token, such as "0.3" for position 3 of sequence 0."""
    if place := text_place(token):
        return f"t{place.text}{f'({place.space})' * bool(place.space)}.{place.position}"
    seq, position, life = token_parts(token)
    return f"{seq}(life {life + 1}).{position}" if life else f"{seq}.{position}"


def text_place(token: int) -> TextPlace | None:
    """Return the place of a token in its text; None if it belongs to no text."""
    seq, position, life = token_parts(token)
    if seq < TEXTS:
        return None
    epoch, namespace = divmod(life, NAMESPACES)
    return TextPlace(seq - TEXTS, position, namespace, epoch)


Table = Sequence[int | None]
"""Blocks of a sequence; None for one that was freed."""


@dataclass(slots=True, eq=False)
class Page:
    """The tokens of one block; sequences that share the block refer to the same object."""

    tokens: list[int]
    holders: int = 1
    removed_tokens: list[int] = field(default_factory=list)
    """Tokens cut off by truncations, on this page or on the one that it was copied from."""

    def copy_prefix(self, prefix: Sequence[int]) -> Page:
        """Return a copy for a sequence that holds only these first tokens of it."""
        removed_tokens = [*self.removed_tokens, *self.tokens[len(prefix) :]]
        return Page(list(prefix), removed_tokens=removed_tokens)


def share_as(sequences: Mapping[int, list[Page]], tables: Mapping[int, Table]) -> None:
    """Replace pages in place, so that they are shared as a cache shares blocks.

    Blocks after a sequence's last page hold no token yet.
    """
    shared: dict[int | None, Page] = {}
    for seq, blocks in tables.items():
        pages = sequences[seq]
        for at, block in enumerate(blocks[: len(pages)]):
            page = Page(pages[at].tokens, 0, pages[at].removed_tokens)
            pages[at] = shared.setdefault(block, page)
            pages[at].holders += 1


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that are written in one call."""

    rows: Sequence[tuple[int, int]]
    """Sequences, and the number of tokens appended to each."""
    tokens: Sequence[int]
    layout: str = "plain"
    """Memory layout of the tensors that are passed to the cache."""


class Absence(NamedTuple):
    """The absence of a sequence, which must be brought back before other steps use it."""

    description: str
    """The reason, as in "swapped out"."""
    tokens: list[int]
    """Tokens of the sequence when it is back."""


class State:
    """A capability's part of the oracle, with callbacks for the events of sequences."""

    any_of: ClassVar[Collection[str]] = ()
    """Methods of an adapter; any one of them enables the state."""
    required_attributes: ClassVar[Mapping[str, Any]] = {}
    """Values of adapter attributes; together they enable the state."""
    enabled_by: ClassVar[str] = ""
    """Adapter attribute that must not be 0, False or empty; empty for none."""
    uncertain_room: ClassVar[bool] = False
    """True if a step may find less room than the oracle counts."""
    spared_blocks: ClassVar[str] = ""
    """Description of the blocks that ``blocks_to_spare`` counts."""

    @classmethod
    def applies_to(cls, adapter: Any) -> bool:
        """Return True for an adapter whose methods and attributes enable the state."""
        if cls.any_of and not adapter.abilities.intersection(cls.any_of):
            return False
        if cls.enabled_by and not attrgetter(cls.enabled_by)(adapter):
            return False
        values = cls.required_attributes.items()
        return all(attrgetter(name)(adapter) == value for name, value in values)

    @classmethod
    def of(cls, adapter: Any, spec: Any) -> Self:  # noqa: ARG003
        """Make the state for an empty cache of this spec, with the adapter's declarations."""
        return cls()

    @property
    def pending_seqs(self) -> Collection[int]:
        """Names reserved for sequences that have not begun."""
        return ()

    @property
    def absent(self) -> Mapping[int, Absence]:
        """Sequences that must be brought back before other steps may use them."""
        return {}

    @property
    def hidden(self) -> Collection[int]:
        """Sequences that have pages but cannot be read yet."""
        return ()

    @property
    def ended(self) -> Mapping[int, str]:
        """Descriptions of ended sequences whose pages are kept, by the names of these pages."""
        return {}

    def unwritten(self, seq: int) -> int:  # noqa: ARG002
        """Count the last tokens of a sequence that are not written yet, or that are drafts."""
        return 0

    def on_write(self, seq: int, begin: int, end: int) -> None:
        """Handle a write of one call that extends a sequence from ``begin`` tokens to ``end``."""

    def on_fork(self, parent: int, child: int, shared: int) -> None:
        """Handle the start of a fork, whose first ``shared`` pages are shared."""

    def on_truncate(self, seq: int, pages: int) -> None:
        """Handle a truncation of a sequence to its first ``pages`` pages."""

    def on_cut(self, seq: int, length: int) -> None:
        """Handle a truncation of a sequence to its first ``length`` tokens."""

    def on_release(self, seq: int) -> None:
        """Handle the release of all pages of a sequence."""

    def on_free(self, seq: int) -> None:
        """Handle the end of a sequence."""

    def keeps(self, seq: int, at: int) -> bool:  # noqa: ARG002
        """Return True for a page that is never changed: a write to it makes a copy."""
        return False

    def blocks_to_spare(self, seqs: Collection[int]) -> int:  # noqa: ARG002
        """Count the blocks that must be free beyond a step's need, so that it is not refused."""
        return 0

    def allows_truncation(self, seq: int, length: int) -> bool:  # noqa: ARG002
        """Return False for a length above 0 that a longer sequence cannot be truncated to."""
        return True

    def lengths_to_try(self, seq: int) -> Collection[int]:  # noqa: ARG002
        """Return lengths to which truncations of a sequence are worth a try."""
        return ()


# Sliding windows and counts of blocks
#
# In a layer of window W a token attends to itself and the W - 1 before it, as vLLM and transformers
# count. So the last W - 1 of the stored tokens are live: the next token may attend to them, and no
# later token to any before them. Layers of one window form a group, and have equal tables; a block
# is freed in a group when none of its tokens is live there or will be.


AT_ONCE, NEXT_TRY = "at once", "next try"
Window = int | None
"""Window of a layer, which identifies its group; None for full attention."""


def first_live(window: Window, length: int) -> int:
    """Return the first position that the token after ``length`` stored ones may attend to."""
    return max(0, length - window + 1) if window else 0


@dataclass(slots=True)
class Windows:
    """Windows of layers, and the number of pages that each sequence has freed in each group."""

    of_layer: Sequence[Window] = ()
    """Window of each layer; empty if no layer has one, so that all layers are one group."""
    shared_pool: bool = False
    """True if all groups allocate from one pool, where each block belongs to one group."""
    frees: str = AT_ONCE
    """Value of ``WindowTraits.frees``."""
    out_of_window_pages: dict[Window, Counter[int]] = field(init=False)
    """Number of first pages that are freed, by group and sequence."""
    tables: dict[Window, dict[int, Table]] = field(init=False)
    """Tables by group and sequence, recorded for a cache with prefix reuse; empty otherwise."""
    num_newly_out_of_window: int = field(init=False, default=0)
    """Number of pages freed since ``pop_newly_out_of_window``."""

    def __post_init__(self) -> None:
        self.out_of_window_pages = {window: Counter() for window in self.of_layer or (None,)}
        self.tables = {window: {} for window in self.out_of_window_pages}

    def of(self, layer: int) -> Window:
        """Return the window of a layer."""
        return self.of_layer[layer] if self.of_layer else None

    @property
    def sizes(self) -> list[int]:
        """Distinct windows of layers, without full attention."""
        return [window for window in self.out_of_window_pages if window]

    @property
    def groups(self) -> list[int]:
        """First layer of each group."""
        return (
            [self.of_layer.index(window) for window in self.out_of_window_pages]
            if self.of_layer
            else [0]
        )

    def pool_of(self, layer: int) -> list[int]:
        """List this layer, and the first layer of each other group that shares its pool."""
        group = self.of(layer)
        others = [
            window for window in self.out_of_window_pages if self.shared_pool and window != group
        ]
        return [layer, *map(self.of_layer.index, others)]

    def slide(self, seq: int, length: int, block_size: int) -> None:
        """Free the pages of a sequence of this length that have left their windows."""
        for window, freed in self.out_of_window_pages.items():
            num_freed = first_live(window, length) // block_size
            self.num_newly_out_of_window += max(0, num_freed - freed[seq])
            freed[seq] = max(freed[seq], num_freed)

    def adopt(self, window: Window, tables: Mapping[int, Table]) -> None:
        """Record the tables of a group, and the first pages that sequences do not hold there."""
        self.tables[window] = dict(tables)
        for seq, table in tables.items():
            num_freed = next(
                (at for at, block in enumerate(table) if block is not None), len(table)
            )
            self.out_of_window_pages[window][seq] = num_freed

    def pop_newly_out_of_window(self) -> int:
        """Return the number of pages freed since the last call, and reset it."""
        count, self.num_newly_out_of_window = self.num_newly_out_of_window, 0
        return count

    def fork(self, parent: int, child: int) -> None:
        for freed in self.out_of_window_pages.values():
            freed[child] = freed[parent]

    def on_truncate(self, seq: int, pages: int) -> None:
        for freed in self.out_of_window_pages.values():
            freed[seq] = min(freed[seq], pages)

    def forget(self, seq: int) -> None:
        for freed in self.out_of_window_pages.values():
            del freed[seq]
        for tables in self.tables.values():
            tables.pop(seq, None)


class StoredSequences(Protocol):
    """The part of the oracle that ``BlockCounts`` needs."""

    @property
    def block_size(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def truncate_copies(self) -> bool: ...
    @property
    def sequences(self) -> Mapping[int, Sequence[object]]:
        """Pages of each sequence, including freed ones."""

    def length(self, seq: int, /) -> int: ...
    def keeps(self, seq: int, at: int, /) -> bool: ...
    def shares(self, parent: int, at: int, /) -> bool: ...
    def blocks_of(self, window: Window, seq: int, /) -> list[object]: ...


class BlockCounts:
    """Numbers of free blocks in each pool, and holders of the others.

    ``append``, ``fork`` and ``truncate`` apply a step, and return True if there was room for it.
    """

    def __init__(
        self,
        stored: StoredSequences,
        out_of_window_pages: Mapping[Window, Mapping[int, int]],
        *,
        shared_pool: bool,
    ) -> None:
        """Count the blocks; ``out_of_window_pages`` is as in ``Windows``."""
        self.stored = stored
        self.out_of_window_pages = out_of_window_pages
        self.shared_pool = shared_pool
        self.holders: dict[Window, Counter[object]] = {}
        self.free = Counter(dict.fromkeys(map(self._pool, out_of_window_pages), stored.capacity))
        """Number of free blocks by group; under the key None if all groups share one pool."""
        for window, freed in out_of_window_pages.items():
            holders = Counter[object]()
            for seq in stored.sequences:
                holders.update(stored.blocks_of(window, seq)[freed[seq] :])
            self.holders[window] = holders
            self.free[self._pool(window)] -= len(holders)

    def holders_of(self, seq: int) -> Iterator[list[int]]:
        """Yield the refcounts of a sequence's blocks, for each group."""
        for window, freed in self.out_of_window_pages.items():
            blocks = self.stored.blocks_of(window, seq)[freed[seq] :]
            yield [self.holders[window][block] for block in blocks]

    def _pool(self, window: Window) -> Window:
        return None if self.shared_pool else window

    def _take(self, window: Window, blocks: int) -> None:
        self.free[self._pool(window)] -= blocks

    def _drop(self, window: Window, blocks: Sequence[object]) -> None:
        for block in blocks:
            self.holders[window][block] -= 1
            self.free[self._pool(window)] += not self.holders[window][block]

    def _copy_on_write(self, window: Window, block: object, *, cached: bool = False) -> None:
        """Copy a block that is shared, or that must be kept unchanged."""
        if cached or self.holders[window][block] > 1:
            self.holders[window][block] -= 1  # not free before the copy is made
            self._take(window, 1)

    def _has_enough_blocks(self) -> bool:
        return min(self.free.values()) >= 0

    def append(self, seq: int, count: int) -> bool:
        size, length = self.stored.block_size, self.stored.length(seq)
        blocks_of_group = {
            window: self.stored.blocks_of(window, seq) for window in self.out_of_window_pages
        }
        for window, freed in self.out_of_window_pages.items():
            self._drop(
                window, blocks_of_group[window][freed[seq] : first_live(window, length) // size]
            )
        for window, blocks in blocks_of_group.items():
            if length % size:
                cached = self.stored.keeps(seq, len(blocks) - 1)
                self._copy_on_write(window, blocks[-1], cached=cached)
            self._take(window, -(-(length + count) // size) - len(blocks))
        return self._has_enough_blocks()

    def slide_appended(self, seq: int, count: int) -> None:
        """Free the blocks that left their windows by an append, if no other sequence holds them."""
        size, length = self.stored.block_size, self.stored.length(seq)
        for window, freed in self.out_of_window_pages.items():
            before = max(freed[seq], first_live(window, length) // size)
            self.free[self._pool(window)] += first_live(window, length + count) // size - before

    def fork(self, parent: int) -> bool:
        for window, freed in self.out_of_window_pages.items():
            shared_pages = range(freed[parent], len(self.stored.sequences[parent]))
            self._take(window, sum(not self.stored.shares(parent, at) for at in shared_pages))
        return self._has_enough_blocks()

    def truncate(self, seq: int, length: int) -> bool:
        size = self.stored.block_size
        num_pages = -(-length // size)
        cut = length % size and length < self.stored.length(seq)
        for window, freed in self.out_of_window_pages.items():
            blocks = self.stored.blocks_of(window, seq)
            self._drop(window, blocks[max(num_pages, freed[seq]) :])
            if cut and self.stored.truncate_copies and num_pages > freed[seq]:
                self._copy_on_write(
                    window, blocks[num_pages - 1], cached=self.stored.keeps(seq, num_pages - 1)
                )
        return self._has_enough_blocks()
