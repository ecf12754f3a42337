"""What sequences say, where a cache is told: which texts begin alike, and for how long.

A text never ends; a sequence holds the beginning of one. Texts branch off each other like a tree,
so whether two beginnings are equal is known without comparing them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pytest_roseinfer.oracle.pages import text_place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Branch = tuple[int, int] | tuple[int, int, int]
"""A text begins as another one, for so many tokens. The first is a branch of itself.

The third number is its namespace, 0 where it is left out. What is equal in two namespaces is said
alike, and is not the same.
"""
WHOLE = 1 << 16
"""More tokens than any sequence has: a text that begins as another for so long is equal to it."""
_COMMON = 1


class Said(NamedTuple):
    """What a row of a write says, or a text that is looked up."""

    tokens: list[int]
    namespace: int


def in_two_namespaces(branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    """Put a copy of each text, in another namespace, behind it."""
    both: list[Branch] = []
    for text, (parent, length, *_) in enumerate(branches):
        both += [(2 * parent, length), (2 * text, WHOLE, 1)]
    return tuple(both)


@dataclass(slots=True)
class Texts:
    """The texts of one history, and the branches that forks add to them."""

    drawn: tuple[Branch, ...]
    _branches: list[tuple[int, int]] = field(init=False)
    _namespaces: list[int] = field(init=False)
    _forked: dict[int, int] = field(default_factory=dict, init=False)
    """The texts of sequences that began as forks."""

    def __post_init__(self) -> None:
        self._branches = [(parent, length) for parent, length, *_ in self.drawn]
        self._namespaces = [namespace for _, _, namespace, *_ in ((*b, 0) for b in self.drawn)]

    def of(self, seq: int, life: int) -> int:
        """Return the text of a sequence; ``life`` others had its name before it."""
        return self._forked.get(seq, (seq + life) % len(self.drawn))

    def fork(self, parent: int, child: int, length: int) -> None:
        """Give ``child``, a sequence, the first tokens of ``parent``, a text, and others after."""
        self._forked[child] = len(self._branches)
        self._branches.append((parent, length))
        self._namespaces.append(self.namespace(parent))

    def forget(self, seq: int) -> None:
        self._forked.pop(seq, None)

    def owner(self, text: int, position: int) -> int:
        """Return the text that this one still begins as at a position.

        Two texts say the same up to a position if their owners there are equal.
        """
        parent, length = self._branches[text]
        while parent != text and position < length:
            text = parent
            parent, length = self._branches[text]
        return text

    def namespace(self, text: int) -> int:
        return self._namespaces[text]

    def said(self, text: int, begin: int, end: int) -> Said:
        """Return what a text says.

        A text that branches off says there what no other does, and then what all texts say. So
        equal tokens stand at a position behind different beginnings, and elsewhere.
        """
        tokens = [self.token(self.owner(text, at), at) for at in range(begin, end)]
        return Said(tokens, self.namespace(text))

    def token(self, owner: int, position: int) -> int:
        """Return what a text says at a position that is its own, and no other's."""
        _, branches_off = self._branches[owner]
        return owner + 1 if position == branches_off else _COMMON


# Where the prefixes of two equal blocks differ.


class _Place(NamedTuple):
    """A token of a text, and what it says."""

    text: int
    position: int
    namespace: int
    says: int


def same_behind_another(texts: Texts, want: int, got: int, wrote: Mapping[int, int]) -> str:
    """Say of a token in the place of another one that both say the same; nothing if they do not."""
    due, found = _said(texts, [want]), _said(texts, [got])
    if want == got or not (due and found) or due[0].says != found[0].says:
        return ""
    differ = _beginnings(texts, due[0], found[0])
    return f"; both say {due[0].says}, {differ}{_first_written(wrote, got)}"


def same_block_behind_another(
    texts: Texts, want: Sequence[int], blocks: Mapping[int, Sequence[int]], wrote: Mapping[int, int]
) -> str:
    """Name a block that says what the wanted tokens say, behind another beginning.

    Nothing is said if there is none.
    """
    due = _said(texts, want)
    says = [each.says for each in due]
    others = {block: tokens for block, tokens in blocks.items() if list(tokens) != list(want)}
    held = {block: _said(texts, tokens) for block, tokens in others.items()}
    same = {block: found for block, found in held.items() if [each.says for each in found] == says}
    if not same:
        return ""
    # Tokens of the same place are what is most easily taken for these.
    block = min(same, key=lambda block: abs(same[block][0].position - due[0].position))
    first, last = same[block][0], same[block][-1]
    where = f"block {block} says {says} too, from token {first.position} of text {first.text} on"
    differ = _beginnings(texts, due[-1], last)
    return f"; {where}, {differ}{_first_written(wrote, blocks[block][0])}"


def _said(texts: Texts, tokens: Sequence[int]) -> list[_Place]:
    places = [text_place(token) for token in tokens]
    return [_Place(*place, texts.token(*place[:2])) for place in places if place]


def _beginnings(texts: Texts, one: _Place, other: _Place) -> str:
    if one.position != other.position:
        return f"as tokens {one.position} and {other.position} of their texts"
    for at in range(one.position):
        owners = [texts.owner(each.text, at) for each in (one, other)]
        if owners[0] != owners[1]:
            says = [texts.token(owner, at) for owner in owners]
            return (
                f"behind beginnings that first differ at token {at}, which is {says[0]} in text "
                f"{one.text} and {says[1]} in text {other.text}"
            )
    return f"in namespaces {one.namespace} and {other.namespace}"


def _first_written(wrote: Mapping[int, int], token: int) -> str:
    return f"; sequence {wrote[token]} was the first to write it" if token in wrote else ""
