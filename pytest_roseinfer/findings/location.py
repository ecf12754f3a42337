"""Where in a cache something is wrong, and what is there instead of what should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.payload import as_bits, same_bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pytest_roseinfer.cases.payload import Contents
    from pytest_roseinfer.running.observation import Observation, Pair


@dataclass(frozen=True, slots=True)
class Location:
    """A sequence, one of its blocks, or a slot of that, in one layer."""

    layer: int
    holders: Mapping[int, int | None]
    """The sequences that hold it, and which of their blocks it is; None where that is unknown."""
    block: int | None = None
    """The block's number, where it was the block that was looked at and not a sequence."""
    slot: int | None = None
    """Position within the block."""
    contents: Contents | None = None


def location_of_block(
    seen: Observation,
    layer: int,
    block: int,
    slot: int | None = None,
    contents: Contents | None = None,
) -> Location:
    """A block, in every table that names it."""
    tables = seen.after.tables_of(layer)
    holders = {seq: table.index(block) for seq, table in tables.items() if block in table}
    return Location(layer, holders, block, slot, contents)


def find_change(
    seen: Observation, expected: Pair | None, found: Pair | None
) -> tuple[str, Location] | None:
    """The first slot in which two arenas differ, and K or V, if both are shown and do."""
    for kind, was, now in zip("KV", expected or (), found or (), strict=True):
        for layer in range(seen.spec.num_layers):
            if not same_bits(was[layer], now[layer]):
                return kind, location_of_change(seen, layer, kind, was[layer], now[layer])[0]
    return None


def location_of_change(
    seen: Observation, layer: int, kind: str, expected: torch.Tensor, found: torch.Tensor
) -> tuple[Location, Contents]:
    """The first slot in which ``[blocks, heads, block_size, head_dim]`` differ: they do."""
    wrong = (as_bits(expected) != as_bits(found)).any(-1)
    block, head, slot = wrong.nonzero()[0].tolist()
    rows = expected[block, head, slot], found[block, head, slot]
    contents = seen.payload.contents(*rows, layer, head, kind, sorted(seen.seen))
    return location_of_block(seen, layer, block, slot, contents), contents
