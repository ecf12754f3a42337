"""Strategy for the keys of a history's texts, which differ in few parts or are joined alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hypothesis import strategies as st

from pytest_roseinfer.oracle.texts import KeySpan, KeyValue, TextKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.capabilities.text_keys import KeyPart

_MAX_CHANGES = 3
"""Most keys of a history that differ in one part each from its first key."""
_MAX_SPANS = 3
_SEPARATORS = ("", "", "", "", ":", "/", "|", "-", "_")
"""Strings that may separate the parts of a key that is one string; none is drawn most."""


class _Slot(NamedTuple):
    """A place in a key that has one value: a part of the whole text, or a span."""

    part: KeyPart
    begin: int = 0
    end: int = 0


@st.composite
def text_keys(draw: st.DrawFn, parts: Sequence[KeyPart], *, block_size: int) -> tuple[TextKey, ...]:
    """Draw different keys: the others differ from the first in one part each, or spell it too.

    All have their spans at the same places, as their token ids are equal.
    """
    slots = [*map(_Slot, [part for part in parts if not part.spans])]
    free = [at for at, slot in enumerate(slots) if not slot.part.values]
    slots += draw(_spans([part for part in parts if part.spans], block_size))
    names = [part.name for part in parts]
    values = [draw(st.sampled_from(_values(slot, names))) for slot in slots]
    if len(free) > 1 and draw(st.sampled_from((False, False, True))):
        alike = draw(_values_spelled_alike(slots, values, free))
    else:
        alike = draw(_values_with_changes(slots, values, names))
    keys: list[TextKey] = []
    for key in (_key(slots, each) for each in alike):
        if all(key.differences(other) for other in keys):
            keys.append(key)
    return tuple(keys)


@st.composite
def _spans(draw: st.DrawFn, parts: Sequence[KeyPart], block_size: int) -> list[_Slot]:
    """Draw spans one after the other, the first two of one part; most cross edges of blocks."""
    if not parts:
        return []
    spans, end = list[_Slot](), 0
    first, last = (draw(st.sampled_from(parts)) for _ in range(2))
    for part in (first, first, last)[: draw(st.integers(1, _MAX_SPANS))]:
        begin = end + draw(st.sampled_from((1, 0, max(1, block_size - 1))))
        end = begin + draw(st.sampled_from((1, 2, block_size, block_size + 1)))
        spans.append(_Slot(part, begin, end))
    return spans


@st.composite
def _values_with_changes(
    draw: st.DrawFn, slots: Sequence[_Slot], values: list[KeyValue], names: Sequence[str]
) -> list[list[KeyValue]]:
    """Draw changes of one value each; return the values without a change, and with each."""
    count = min(len(slots), _MAX_CHANGES)
    changed = draw(st.permutations(range(len(slots))))[:count]
    owners = {slots[at].part.of for at in changed}
    for at, slot in enumerate(slots):
        if slot.part.name in owners and values[at] is None:
            values[at] = slot.part.other_value(None)
    every = [values]
    for at in changed:
        others = [each for each in _values(slots[at], names) if each != values[at]]
        every.append([*values[:at], draw(st.sampled_from(others)), *values[at + 1 :]])
    return every


@st.composite
def _values_spelled_alike(
    draw: st.DrawFn, slots: Sequence[_Slot], values: list[KeyValue], free: Sequence[int]
) -> list[list[KeyValue]]:
    """Draw values of two parts that are one string where the two are joined, or listed unnamed."""
    first, second = draw(st.permutations(free))[:2]
    owners = {slots[at].part.of for at in (first, second)}
    for at in free:
        values[at] = "a" if slots[at].part.name in owners else None
    name = slots[second].part.name
    separator = draw(st.sampled_from((*_SEPARATORS, name, f",{name}=")))
    begin, middle, end = draw(st.sampled_from(("a", ""))), draw(st.sampled_from(("b", ""))), "c"
    joined = f"{begin}{separator}{middle}{separator}{end}"
    every = []
    for pair in (
        (begin, f"{middle}{separator}{end}"),
        (f"{begin}{separator}{middle}", end),
        (joined, None),
        (None, joined),
        ("", joined),
    ):
        now = [*values]
        now[first], now[second] = pair
        every.append(now)
    return every


def _values(slot: _Slot, names: Sequence[str]) -> Sequence[KeyValue]:
    return slot.part.all_values([name for name in names if name != slot.part.name])


def _key(slots: Sequence[_Slot], values: Sequence[KeyValue]) -> TextKey:
    """Make a key; a part that belongs to one that is None is None too."""
    wholes, spans = dict[str, KeyValue](), list[KeySpan]()
    for slot, value in zip(slots, values, strict=True):
        if not slot.part.spans:
            wholes[slot.part.name] = value
        elif value is not None:
            spans.append(KeySpan(slot.part.name, slot.begin, slot.end, value))
    for slot in slots:
        if slot.part.of and wholes[slot.part.of] is None:
            wholes[slot.part.name] = None
    return TextKey(wholes, tuple(spans))
