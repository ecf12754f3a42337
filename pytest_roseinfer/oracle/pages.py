"""The parts of the oracle: tokens, pages, states of capabilities, and room for blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

POSITIONS = 1 << 16
"""The longest sequence whose tokens have numbers of their own."""
NAMES = 1 << 16
PADDING_SEQUENCE = 1 << 15
TEXTS = PADDING_SEQUENCE + 1


def token_of(seq: int, position: int, life: int = 0) -> int:
    """Number the token at a position of a sequence that was freed or cut ``life`` times."""
    return (life * NAMES + seq) * POSITIONS + position


def padding_token(row: int) -> int:
    """Number the token that a padding row writes, which belongs in no sequence."""
    return token_of(PADDING_SEQUENCE, row)


def text_token(text: int, position: int, namespace: int = 0) -> int:
    """Number the token at a position of a text."""
    return token_of(TEXTS + text, position, namespace)


def token_parts(token: int) -> tuple[int, int, int]:
    """Split a token into sequence, position and life."""
    named, position = divmod(token, POSITIONS)
    life, seq = divmod(named, NAMES)
    return seq, position, life


def token_label(token: int) -> str:
    seq, position, life = token_parts(token)
    if seq >= TEXTS:
        return f"t{seq - TEXTS}{f'(namespace {life})' * bool(life)}.{position}"
    return f"{seq}(life {life + 1}).{position}" if life else f"{seq}.{position}"


def text_place(token: int) -> tuple[int, int, int] | None:
    """Return the text, position and namespace of a token; None if it is no text's."""
    seq, position, life = token_parts(token)
    return (seq - TEXTS, position, life) if seq >= TEXTS else None


Table = Sequence[int | None]
"""The blocks of a sequence; None for one that was given back."""


@dataclass(slots=True, eq=False)
class Page:
    """The tokens of one block. Sequences that share it hold the same object."""

    tokens: list[int]
    holders: int = 1
    cut: list[int] = field(default_factory=list)
    """Tokens that stood there before a sequence was cut, or on the page that this one copies."""

    def copied(self, seen: Sequence[int]) -> Page:
        """Return a copy for a sequence that sees so much of it."""
        return Page(list(seen), cut=[*self.cut, *self.tokens[len(seen) :]])


def share_as(sequences: Mapping[int, list[Page]], tables: Mapping[int, Table]) -> None:
    """Share pages as a cache shares blocks."""
    pages: dict[int | None, Page] = {}
    for seq, blocks in tables.items():
        own = sequences[seq]
        for at, block in enumerate(blocks):
            own[at] = pages.setdefault(block, Page(own[at].tokens, 0, own[at].cut))
            own[at].holders += 1


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that are written together."""

    rows: Sequence[tuple[int, int]]
    """Sequences, and how many of the tokens are appended to each."""
    tokens: Sequence[int]
    layout: str = "plain"
    """How they lie in memory when they are handed over."""


class Absence(NamedTuple):
    """A sequence that exists, and that no step may use before it is brought back."""

    words: str
    """The reason, as in "swapped out"."""
    tokens: list[int]
    """The tokens that it has when it returns."""


class State:
    """A capability's part of the oracle, which is told the events in the life of sequences."""

    any_of: ClassVar[Collection[str]] = ()
    """The methods of an adapter, any of which is defined where a cache has it."""
    where: ClassVar[Mapping[str, Any]] = {}
    """The attributes of an adapter whose cache has it."""
    promised: Collection[int] = ()
    """The names that sequences are to have, though nothing of them is stored."""

    @classmethod
    def of(cls, adapter: Any) -> Self:  # noqa: ARG003
        """Return the part for an empty cache, as its adapter declares it."""
        return cls()

    @property
    def absent(self) -> Mapping[int, Absence]:
        """The sequences that exist, and that only the steps which bring them back may use."""
        return {}

    @property
    def hidden(self) -> Collection[int]:
        """The sequences that have pages and cannot be read yet."""
        return ()

    def unwritten(self, seq: int) -> int:  # noqa: ARG002
        """Count the last tokens of a sequence that are not written yet."""
        return 0

    def forked(self, parent: int, child: int, shared: int) -> None:
        """A sequence has begun as a fork; of its first pages so many are shared."""

    def cut(self, seq: int, pages: int) -> None:
        """A sequence has left all but its first pages."""

    def gave_up(self, seq: int) -> None:
        """A sequence has no pages any more."""

    def freed(self, seq: int) -> None:
        """A sequence does not exist any more."""

    def keeps(self, seq: int, at: int) -> bool:  # noqa: ARG002
        """Return True for a page that stays as it is: who writes there gets a copy."""
        return False


# The blocks of a cache, by groups of layers: which are held, given back, free, or needed.
#
# In a layer of window W a token attends to itself and the W - 1 before it, as vLLM and transformers
# count. So the last W - 1 of the stored tokens are live: the next token may attend to them, and
# nothing that comes later to any before them. Layers of one window form a group, and have the same
# blocks; a block is given back in a group when none of its tokens is live there or will be.


AT_ONCE, NEXT_TRY = "at once", "next try"
Window = int | None
"""The window of a layer, which names its group; None where a layer attends to all."""


def first_live(window: Window, length: int) -> int:
    """Return the first position that may be attended to once so many tokens are stored."""
    return max(0, length - window + 1) if window else 0


@dataclass(slots=True)
class Windows:
    """The window of every layer, and how much each sequence gave back in each group."""

    of_layer: Sequence[Window] = ()
    """None of them if no layer has a window: all layers are one group then."""
    shared_pool: bool = False
    """All groups take their blocks from one pool, in which a block belongs to one of them."""
    gives_back: str = AT_ONCE
    """As ``WindowTraits.gives_back``."""
    given_back: dict[Window, Counter[int]] = field(init=False)
    """By group and sequence: how many of its first pages."""
    tables: dict[Window, dict[int, Table]] = field(init=False)
    """By group and sequence: its blocks, as far as a cache that knows texts showed them."""
    left: int = field(init=False, default=0)
    """How many pages were given back since that was last taken."""

    def __post_init__(self) -> None:
        self.given_back = {window: Counter() for window in self.of_layer or (None,)}
        self.tables = {window: {} for window in self.given_back}

    def of(self, layer: int) -> Window:
        """Return the window of a layer."""
        return self.of_layer[layer] if self.of_layer else None

    @property
    def sizes(self) -> list[int]:
        """The different windows that layers have."""
        return [window for window in self.given_back if window]

    @property
    def groups(self) -> list[int]:
        """List layers, one of each group."""
        return [self.of_layer.index(window) for window in self.given_back] if self.of_layer else [0]

    def pool_of(self, layer: int) -> list[int]:
        """List this layer, and one of each other group that takes blocks from the same pool."""
        own = self.of(layer)
        others = [window for window in self.given_back if self.shared_pool and window != own]
        return [layer, *map(self.of_layer.index, others)]

    def slide(self, seq: int, length: int, block_size: int) -> None:
        """Give back the pages of a sequence of this length that are not live."""
        for window, given in self.given_back.items():
            gone = first_live(window, length) // block_size
            self.left += max(0, gone - given[seq])
            given[seq] = max(given[seq], gone)

    def adopt(self, window: Window, tables: Mapping[int, Table]) -> None:
        """Take from the tables of a group what is shared there, and what no text's end needed."""
        self.tables[window] = dict(tables)
        for seq, table in tables.items():
            gone = next((at for at, block in enumerate(table) if block is not None), len(table))
            self.given_back[window][seq] = gone

    def take_left(self) -> int:
        left, self.left = self.left, 0
        return left

    def fork(self, parent: int, child: int) -> None:
        for given in self.given_back.values():
            given[child] = given[parent]

    def cut(self, seq: int, pages: int) -> None:
        for given in self.given_back.values():
            given[seq] = min(given[seq], pages)

    def forget(self, seq: int) -> None:
        for given in self.given_back.values():
            del given[seq]
        for tables in self.tables.values():
            tables.pop(seq, None)


class Stored(Protocol):
    """What the oracle knows of a cache's sequences."""

    @property
    def block_size(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def truncate_copies(self) -> bool: ...
    @property
    def sequences(self) -> Mapping[int, Sequence[object]]:
        """The pages of each sequence, those included that were given back."""

    def length(self, seq: int, /) -> int: ...
    def keeps(self, seq: int, at: int, /) -> bool: ...
    def shares(self, parent: int, at: int, /) -> bool: ...
    def blocks_of(self, window: Window, seq: int, /) -> list[object]: ...


class Room:
    """The blocks that are free in each pool, and the holders of the others.

    Every step returns True if there were blocks enough for it.
    """

    def __init__(
        self, stored: Stored, given_back: Mapping[Window, Mapping[int, int]], *, shared_pool: bool
    ) -> None:
        """Take groups of layers, each with how many of its first pages a sequence gave back."""
        self.stored = stored
        self.given_back = given_back
        self.shared_pool = shared_pool
        self.holders: dict[Window, Counter[object]] = {}
        self.free = Counter(dict.fromkeys(map(self._pool, given_back), stored.capacity))
        """By group; by the name None where all groups share one pool."""
        for window, given in given_back.items():
            held = Counter[object]()
            for seq in stored.sequences:
                held.update(stored.blocks_of(window, seq)[given[seq] :])
            self.holders[window] = held
            self.free[self._pool(window)] -= len(held)

    def holders_of(self, seq: int) -> Iterator[list[int]]:
        """Yield for each group how many hold each of a sequence's blocks."""
        for window, given in self.given_back.items():
            own = self.stored.blocks_of(window, seq)[given[seq] :]
            yield [self.holders[window][block] for block in own]

    def _pool(self, window: Window) -> Window:
        return None if self.shared_pool else window

    def _take(self, window: Window, blocks: int) -> None:
        self.free[self._pool(window)] -= blocks

    def _drop(self, window: Window, blocks: Sequence[object]) -> None:
        for block in blocks:
            self.holders[window][block] -= 1
            self.free[self._pool(window)] += not self.holders[window][block]

    def _own(self, window: Window, block: object, *, found: bool = False) -> None:
        """Copy a block for a sequence that is not alone on it, or that found it."""
        if found or self.holders[window][block] > 1:
            self.holders[window][block] -= 1  # it is not free before the copy is made
            self._take(window, 1)

    def _is_enough(self) -> bool:
        return min(self.free.values()) >= 0

    def append(self, seq: int, count: int) -> bool:
        size, length = self.stored.block_size, self.stored.length(seq)
        held = {window: self.stored.blocks_of(window, seq) for window in self.given_back}
        for window, given in self.given_back.items():
            self._drop(window, held[window][given[seq] : first_live(window, length) // size])
        for window, blocks in held.items():
            if length % size:
                found = self.stored.keeps(seq, len(blocks) - 1)
                self._own(window, blocks[-1], found=found)
            self._take(window, -(-(length + count) // size) - len(blocks))
        return self._is_enough()

    def fork(self, parent: int) -> bool:
        for window, given in self.given_back.items():
            held = range(given[parent], len(self.stored.sequences[parent]))
            self._take(window, sum(not self.stored.shares(parent, at) for at in held))
        return self._is_enough()

    def cut(self, seq: int, length: int) -> bool:
        size = self.stored.block_size
        kept = -(-length // size)
        cut = length % size and length < self.stored.length(seq)
        for window, given in self.given_back.items():
            blocks = self.stored.blocks_of(window, seq)
            self._drop(window, blocks[max(kept, given[seq]) :])
            if cut and self.stored.truncate_copies and kept > given[seq]:
                self._own(window, blocks[kept - 1], found=self.stored.keeps(seq, kept - 1))
        return self._is_enough()
