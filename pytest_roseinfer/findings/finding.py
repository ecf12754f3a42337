"""A finding: its words, its location, and where a misplaced token lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.payload import as_bits, same_bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pytest_roseinfer.cases.payload import Contents
    from pytest_roseinfer.findings.observation import Observation, Pair


@dataclass(frozen=True, slots=True)
class Location:
    """A sequence, one of its blocks, or a slot of that, in one layer."""

    layer: int
    holders: Mapping[int, int | None]
    """The sequences that hold it, and which of their blocks it is; None where that is unknown."""
    block: int | None = None
    """The block's number, where a block was looked at and not a sequence."""
    slot: int | None = None
    """Position within the block."""
    contents: Contents | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, in words."""

    what: str
    location: Location | None = None
    cause: BaseException | None = None
    """What the cache raised."""
    without_room: bool = False
    """It was raised by a step that had to be refused."""


def in_words(error: BaseException) -> str:
    """Return what an error is called and what it says, if that is anything."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def location_of_block(
    seen: Observation,
    layer: int,
    block: int,
    slot: int | None = None,
    contents: Contents | None = None,
) -> Location:
    """Locate a block in every table that names it."""
    tables = seen.after.tables_of(layer)
    holders = {seq: table.index(block) for seq, table in tables.items() if block in table}
    return Location(layer, holders, block, slot, contents)


def find_change(
    seen: Observation, expected: Pair | None, found: Pair | None
) -> tuple[Location, Contents] | None:
    """Find the first slot in which two arenas differ, if both are shown and do."""
    if expected is None or found is None:
        return None
    for kind, was, now in zip("KV", expected, found, strict=True):
        if same_bits(was, now):
            continue
        wrong = (as_bits(was) != as_bits(now)).any(-1)
        layer, block, head, slot = wrong.nonzero()[0].tolist()
        rows = was[layer, block, head, slot], now[layer, block, head, slot]
        contents = seen.payload.contents(*rows, layer, head, kind, sorted(seen.seen))
        return location_of_block(seen, layer, block, slot, contents), contents
    return None


# Where a token lies that is not where it must be.


def elsewhere(arena: Pair, layer: int, kind: str, head: int, missing: torch.Tensor) -> str:
    """Say which slot of a layer holds what is missing; nothing if none does."""
    held = arena["KV".index(kind)][layer]
    places = (as_bits(held) == as_bits(missing.contiguous())).all(-1).nonzero().tolist()
    for block, other, slot in places:
        of_head = f", head {other}" if other != head else ""
        return f"; the right one lies in block {block}, position {slot}{of_head}"
    return ""
