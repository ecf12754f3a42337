"""Tables, refcounts and free blocks must agree with each other and with the oracle's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.findings.location import Place, place_of_block
from pytest_roseinfer.running.snapshot import owners_of

if TYPE_CHECKING:
    from pytest_roseinfer.running.machine import Machine


def check_ownership(machine: Machine) -> None:
    for layer, owners in enumerate(owners_of(machine)):
        ledger = machine.adapter.ledger(layer)
        held = {block: count for block, count in ledger.refcounts.items() if count}
        if held != dict(owners):
            first = min(block for block, _ in held.items() ^ owners.items())
            machine.fail(
                f"layer {layer}: refcounts {held} but the tables hold {dict(owners)}",
                place=place_of_block(machine, layer, first),
            )
        if len(set(ledger.free)) < len(ledger.free):
            twice = max(ledger.free, key=list(ledger.free).count)
            machine.fail(
                f"layer {layer}: the free list names a block twice: {ledger.free}",
                place=place_of_block(machine, layer, twice),
            )
        if both := set(ledger.free) & set(owners):
            machine.fail(
                f"layer {layer}: blocks {sorted(both)} are free and held",
                place=place_of_block(machine, layer, min(both)),
            )
        if len(ledger.free) + len(owners) != ledger.total:
            machine.fail(
                f"layer {layer}: {len(ledger.free)} free + {len(owners)} held blocks are not "
                f"the {ledger.total} there are"
            )
        _check_sharing(machine, layer)


def _check_sharing(machine: Machine, layer: int) -> None:
    """Sequences share a block exactly where they share a page of the oracle."""
    block_of: dict[int, int] = {}
    page_of: dict[int, int] = {}
    for seq, pages in machine.oracle.sequences.items():
        table = machine.adapter.table(seq, layer)
        if len(table) != len(pages):
            machine.fail(
                f"layer {layer}: sequence {seq} has {len(table)} blocks for "
                f"{machine.oracle.length(seq)} tokens; {len(pages)} are right",
                place=Place(layer, {seq: None}),
            )
        for at, (block, page) in enumerate(zip(table, pages, strict=True)):
            if block_of.setdefault(id(page), block) != block:
                machine.fail(
                    f"layer {layer}: sequence {seq} has block {block} of its own where it "
                    f"shares block {block_of[id(page)]}: a block was copied needlessly",
                    place=Place(layer, {seq: at}, block),
                )
            if page_of.setdefault(block, id(page)) != id(page):
                machine.fail(
                    f"layer {layer}: block {block} of sequence {seq} is shared with a "
                    "sequence that must have one of its own by now",
                    place=place_of_block(machine, layer, block),
                )
