"""Looking at a cache: who holds which block, what the books say, what is stored."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer.running.machine import Machine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What stands in a cache at one moment, as far as it shows that."""

    arena: tuple[torch.Tensor, torch.Tensor] | None
    """A copy of all that is stored; None where that or the tables are not offered."""
    owners: list[Counter[int]]
    books: object
    counts: Counter[str]


def take_snapshot(machine: Machine) -> Snapshot:
    arena = None
    owners: list[Counter[int]] = []
    if {"arena", "table"} <= machine.can:
        keys, values = machine.adapter.arena()
        arena = (keys.clone(), values.clone())
        owners = owners_of(machine)
    counts = counts_of(machine) if "path_counts" in machine.can else Counter[str]()
    return Snapshot(arena, owners, books_of(machine), counts)


def owners_of(machine: Machine) -> list[Counter[int]]:
    """How many sequences' tables name each block, layer by layer."""
    return [
        Counter(
            block for seq in machine.oracle.sequences for block in machine.adapter.table(seq, layer)
        )
        for layer in range(machine.spec.num_layers)
    ]


def books_of(machine: Machine) -> list[object]:
    """Everything the cache's books say: tables, holders, free blocks."""
    adapter, books = machine.adapter, list[object]()
    for layer in range(machine.spec.num_layers):
        if "table" in machine.can:
            books += [list(adapter.table(seq, layer)) for seq in machine.oracle.sequences]
        if "ledger" in machine.can:
            ledger = adapter.ledger(layer)
            books.append((dict(ledger.refcounts), sorted(ledger.free)))
    return books


def counts_of(machine: Machine) -> Counter[str]:
    """How often each path ran and each condition was met so far."""
    return Counter({str(name): n for name, n in machine.adapter.path_counts().items()})
