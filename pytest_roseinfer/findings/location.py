"""Where in a cache something is wrong, and what is there instead of what should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.payload import as_bits, same_bits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.running.machine import Machine


@dataclass(frozen=True, slots=True)
class Contents:
    """What one head of one slot should hold, and what it holds, in words."""

    head: int
    kind: str
    """K or V."""
    expected: str
    found: str
    token: int | None
    """The token found, if it is one."""

    def words(self) -> str:
        return f"expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Place:
    """A sequence, one of its blocks, or a slot of that, in one layer."""

    layer: int
    holders: Mapping[int, int | None]
    """The sequences that hold it, and which of their blocks it is; None where that is unknown."""
    block: int | None = None
    """The block's number, where it was the block that was looked at and not a sequence."""
    slot: int | None = None
    """Position within the block."""
    contents: Contents | None = None


def place_of_token(
    machine: Machine, layer: int, seq: int, position: int, contents: Contents
) -> Place:
    page, slot = divmod(position, machine.spec.block_size)
    return Place(layer, {seq: page}, slot=slot, contents=contents)


def place_of_block(
    machine: Machine,
    layer: int,
    block: int,
    slot: int | None = None,
    contents: Contents | None = None,
) -> Place:
    """A block, in every table that names it."""
    seqs = machine.oracle.sequences if "table" in machine.can else ()
    tables = {seq: list(machine.adapter.table(seq, layer)) for seq in seqs}
    holders = {seq: table.index(block) for seq, table in tables.items() if block in table}
    return Place(layer, holders, block, slot, contents)


def contents_of(
    machine: Machine,
    want: torch.Tensor,
    got: torch.Tensor,
    layer: int,
    head: int,
    kind: str,
    known: Sequence[int],
) -> Contents:
    """Of one head of one token, ``[head_dim]``, as far as ``known`` tokens explain it."""
    payload = machine.payload
    expected = payload.decode(want, layer, head, known)
    source = payload.source(got, layer, head, known)
    found = payload.words(got, source)
    return Contents(head, kind, expected, found, source.token if source else None)


def find_change(
    machine: Machine, kind: str, expected: torch.Tensor, found: torch.Tensor
) -> Place | None:
    """The first slot in which two arenas differ, if there is one."""
    for layer in range(machine.spec.num_layers):
        if not same_bits(expected[layer], found[layer]):
            return place_of_change(machine, layer, kind, expected[layer], found[layer])[0]
    return None


def place_of_change(
    machine: Machine, layer: int, kind: str, expected: torch.Tensor, found: torch.Tensor
) -> tuple[Place, Contents]:
    """The first slot in which ``[blocks, heads, block_size, head_dim]`` differ: they do."""
    wrong = (as_bits(expected) != as_bits(found)).any(-1)
    block, head, slot = wrong.nonzero()[0].tolist()
    rows = expected[block, head, slot], found[block, head, slot]
    contents = contents_of(machine, *rows, layer, head, kind, sorted(machine.seen))
    return place_of_block(machine, layer, block, slot, contents), contents
