"""The pages of the oracle, what is written to them together, and the state of capabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

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
    """What is known of a sequence that exists and has no pages of its own to work on."""

    words: str
    """How it is absent, as in "swapped out"."""
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
