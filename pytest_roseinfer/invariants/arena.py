"""Nothing that is stored may change but the slots written and the blocks copied to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from pytest_roseinfer.cases.history import AppendPadded
from pytest_roseinfer.cases.payload import as_bits
from pytest_roseinfer.findings.location import place_of_change
from pytest_roseinfer.running.snapshot import owners_of

if TYPE_CHECKING:
    from pytest_roseinfer.running.execute import Outcome
    from pytest_roseinfer.running.machine import Machine
    from pytest_roseinfer.running.snapshot import Snapshot

Slot = tuple[int, int]
"""Block and position within it."""


def slots_of(machine: Machine, outcome: Outcome) -> list[list[Slot]]:
    """Where every token just written must lie, in written order, for each layer."""
    if outcome.written is None or "table" not in machine.can:
        return []
    size = machine.spec.block_size
    slots: list[list[Slot]] = []
    for layer in range(machine.spec.num_layers):
        slots.append([])
        for seq, count in outcome.written.rows():
            table = machine.adapter.table(seq, layer)
            length = machine.oracle.length(seq)
            slots[-1] += [(table[at // size], at % size) for at in range(length - count, length)]
    return slots


def check_arena(
    machine: Machine, outcome: Outcome, slots: list[list[Slot]], before: Snapshot
) -> None:
    """Compare all that is stored with what it was; poison the blocks that were given back."""
    arena = machine.adapter.arena()
    for layer, owners in enumerate(owners_of(machine)):
        written = slots[layer] if slots else []
        expected = [cache[layer].clone() for cache in before.arena or ()]
        opened = {block for block, at in written if at == 0}
        free_to_change = set(owners) - set(before.owners[layer]) - opened
        if isinstance(machine.done[-1], AppendPadded):
            free_to_change |= machine.adapter.scratch_blocks
        for block in free_to_change:
            for image, cache in zip(expected, arena, strict=True):
                image[block] = cache[layer, block]  # a copy: read-back has checked it
        if written:
            blocks, positions = zip(*written, strict=True)
            new = machine.payload.layer(outcome.tokens, layer)
            for image, tokens in zip(expected, new, strict=True):
                image[list(blocks), :, list(positions)] = tokens
        for kind, image, cache in zip("KV", expected, arena, strict=True):
            if not torch.equal(as_bits(image), as_bits(cache[layer])):
                _fail(machine, layer, kind, image, cache[layer])
        for block in set(before.owners[layer]) - set(owners):
            for cache in arena:
                cache[layer, block].fill_(float("nan"))


def _fail(
    machine: Machine, layer: int, kind: str, expected: torch.Tensor, found: torch.Tensor
) -> NoReturn:
    place, contents = place_of_change(machine, layer, kind, expected, found)
    machine.fail(
        f"layer {layer}, {kind}, block {place.block}, position {place.slot}, "
        f"head {contents.head}: {contents.words()}",
        place=place,
    )
