"""Finds where the prefixes of two equal blocks differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pytest_roseinfer.oracle.oracle import text_place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.oracle.texts import Texts


class _Said(NamedTuple):
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


def _said(texts: Texts, tokens: Sequence[int]) -> list[_Said]:
    places = [text_place(token) for token in tokens]
    return [_Said(*place, texts.token(*place[:2])) for place in places if place]


def _beginnings(texts: Texts, one: _Said, other: _Said) -> str:
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
