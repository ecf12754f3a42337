"""Ranks of a sharded cache, which must have equal tables and ledgers."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.block_tables import read_block_tables
from pytest_roseinfer.capabilities.capability import Capability, Run, SnapshotScope, View, optional
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Location,
    Observation,
    Snapshot,
    invariant,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import Ledger


class ShardMethods:
    """Adapter method that shows ranks."""

    @optional
    def shards(self) -> Sequence[Any]:
        """Return the adapters of all ranks; each rank stores some of the heads.

        Tables and ledgers of the whole are those of the first rank, and those of the others must be
        equal. The harness poisons the arenas of the ranks, so that ``arena`` may return copies. A
        ``ShardedAdapter`` does all this.
        """


@invariant(rank=1, needs=("shards",))
def shards(observation: Observation) -> Finding | None:
    """All ranks must have the same tables and ledgers."""
    first, *others = observation.after.shards
    for rank, other in enumerate(others, 1):
        if finding := next(_differences(rank, first, other), None):
            return finding
    return None


def _differences(rank: int, first: Snapshot, other: Snapshot) -> Iterator[Finding]:
    for seq, layer in first.tables or {}:
        table, another = first.tables_of(layer)[seq], other.tables_of(layer)[seq]
        if len(table) != len(another):
            yield Finding(
                f"rank {rank}, layer {layer}: sequence {seq} has {len(another)} blocks, and "
                f"{len(table)} on rank 0",
                Location(layer, {seq: None}),
            )
        for at, (block, own_block) in enumerate(zip(table, another, strict=False)):
            if block != own_block:
                yield Finding(
                    f"rank {rank}, layer {layer}: block {at} of sequence {seq} is block "
                    f"{own_block}, and block {block} on rank 0",
                    Location(layer, {seq: at}, block),
                )
    for layer in range(len(first.ledgers)):
        yield from _of_ledgers(rank, layer, first.ledger(layer), other.ledger(layer))


def _of_ledgers(rank: int, layer: int, first: Ledger, other: Ledger) -> Iterator[Finding]:
    location = f"rank {rank}, layer {layer}"
    if other.total != first.total:
        yield Finding(f"{location}: there are {other.total} blocks, and {first.total} on rank 0")
    if other.num_free != first.num_free:
        counted = f"{other.num_free} free blocks are counted"
        yield Finding(f"{location}: {counted}, and {first.num_free} on rank 0")
    for block in sorted(first.refcounts.keys() | other.refcounts.keys()):
        holders, own_holders = (each.refcounts.get(block, 0) for each in (first, other))
        if holders != own_holders:
            yield Finding(
                f"{location}: block {block} has {own_holders} holders, and {holders} on rank 0"
            )
    for attribute in ("free", "cached"):
        blocks, others = {*getattr(first, attribute)}, {*getattr(other, attribute)}
        for block in sorted(blocks ^ others):
            own, at_0 = ("", "not ") if block in others else ("not ", "")
            yield Finding(
                f"{location}: block {block} is {own}{attribute}, and {at_0}{attribute} on rank 0"
            )


def _show_ranks(run: Run, look: SnapshotScope) -> Mapping[str, Any]:  # noqa: ARG001
    layers, ranks = run.spec.num_layers, run.adapter.shards()
    with run.cache_under_test.device.torch_context():
        return {
            "shards": [Snapshot(**read_block_tables(each, run.oracle, layers)) for each in ranks]
        }


SHARDS = Capability(
    methods=ShardMethods,
    invariants=(shards,),
    views=(View(("shards",), _show_ranks),),
)
