"""Storage of a cache: it changes only where a step writes, and free blocks are poisoned."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities import return_values
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    RankPolicy,
    Run,
    SnapshotScope,
    View,
    optional,
)
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Location,
    Observation,
    find_change,
    invariant,
)
from pytest_roseinfer.capabilities.payload import Poison, poison

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.capabilities.observation import Pair, Snapshot


class StorageMethods:
    """Adapter methods that show the storage, and the slot or list of each sequence."""

    scratch_blocks: frozenset[int] = frozenset()
    """Blocks of ``arena`` that no sequence owns and padding may write to; ``make`` may set it."""

    @optional
    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[layers, blocks, heads, block_size, head_dim]`` views of the live storage.

        The first is of keys and the second of values; both may be parts of one tensor. Copies are
        refused.
        """

    @optional
    def container(self, seq: int) -> int | list[Any]:
        """Return the slot number of a sequence, or the list object that holds its blocks.

        Return the list itself, not a copy. No two sequences may share a slot or list; once a
        sequence is freed or absent, another one may get its slot or list.
        """


@invariant(rank=40, needs=("arena", "table"))
def arena(observation: Observation) -> Finding | None:
    """The storage may change only where the step writes."""
    change = find_change(observation, _expected_arena(observation), observation.after.arena)
    if change is None:
        return None
    location, contents = change
    return Finding(
        f"layer {location.layer}, {contents.kind}, block {location.block}, position "
        f"{location.slot}, head {contents.head}: {contents.describe()}",
        location,
        kind=contents.finding_kind,
    )


def newly_allocated_blocks(observation: Observation, layer: int) -> set[int]:
    """Return the blocks that all of their holders got in this step.

    A block that a sequence released in the step may be allocated again at once, for a copy.
    """
    before, after = _places(observation.before, layer), _places(observation.after, layer)
    return {block for block, places in after.items() if places.isdisjoint(before[block])}


def _out_of_windows(observation: Observation, layer: int) -> set[int]:
    """Return all free blocks if a token that was written left the window in the same step.

    It was written to one of them, or not at all.
    """
    if observation.after.arena and any(block is None for block, _ in observation.slots(layer)):
        return {*range(observation.after.arena[0].shape[1])} - {*observation.after.owners(layer)}
    return set()


def _places(shown: Snapshot, layer: int) -> defaultdict[int, set[tuple[int, int]]]:
    """Return the holders of each block, with its index in their tables."""
    places: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for seq, table in shown.tables_of(layer).items():
        for at, block in enumerate(table):
            if block is not None:
                places[block].add((seq, at))
    return places


def swapping_in_blocks(observation: Observation, layer: int) -> set[int]:
    """Return the blocks of sequences that are being swapped in, which may change at any time."""
    swapping_in = observation.oracle.hidden
    if observation.operation:
        swapping_in += observation.operation.restored_seqs()
    tables = observation.after.tables_of(layer)
    return {block for seq in swapping_in for block in tables[seq] if block is not None}


def _expected_arena(observation: Observation) -> Pair | None:
    """Return the arena before the step, with its allowed changes copied from the arena after it."""
    before, after, written = (
        observation.before.arena,
        observation.after.arena,
        observation.outcome.written,
    )
    if before is None or after is None:
        return None
    if observation.declared.prefixes.shares == "equal prefixes":
        return _expected_cached(observation, before, after)
    expected = before[0].clone(), before[1].clone()
    for layer in range(observation.spec.num_layers):
        slots = observation.slots(layer)
        opened = {block for block, at in slots if at == 0}
        free_to_change = (
            newly_allocated_blocks(observation, layer) - opened
            | swapping_in_blocks(observation, layer)
            | observation.before.blocks_in_flight.keys()
            | _out_of_windows(observation, layer)
        )
        if observation.payload.rounds_blocks:
            free_to_change |= {block for block, _ in slots if block is not None}
        if observation.operation and observation.operation.padding():
            free_to_change |= observation.scratch_blocks
        for block in free_to_change:
            for image, cache in zip(expected, after, strict=True):
                image[layer, block] = cache[layer, block]  # read-back has checked it
        if slots and written:
            rows = [row for row, (block, _) in enumerate(slots) if block is not None]
            blocks, positions = [slots[row][0] for row in rows], [slots[row][1] for row in rows]
            new: Sequence[torch.Tensor] = observation.payload.layer(written.tokens, layer)
            if observation.payload.tolerance:  # quantised codes: read-back has checked them
                new = [cache[layer][blocks, :, positions] for cache in after]
            for image, tokens in zip(expected, new, strict=True):
                image[layer][blocks, :, positions] = tokens[rows]
    return expected


def _expected_cached(observation: Observation, before: Pair, after: Pair) -> Pair:
    """Return the arena after the step, with the blocks that stay cached as they were before it.

    Other blocks are checked by read-back alone: a cache may write a block, release it when it turns
    out to be a duplicate, and allocate it again in the same step.
    """
    expected = after[0].clone(), after[1].clone()
    for layer in range(observation.spec.num_layers):
        was, is_now = (
            each.ledger(layer).cached for each in (observation.before, observation.after)
        )
        still_cached = sorted({*was}.intersection(is_now))
        for image, cache in zip(expected, before, strict=True):
            image[layer, still_cached] = cache[layer, still_cached]
    return expected


STORAGE_METHODS = {"arena": (5,), "scales": (4, 3)}
"""Methods that show a part of the storage, with its possible numbers of dimensions."""


class Storage(Observer):
    """The visible storage of a cache: poisoned where it is free, and copied for snapshots."""

    any_of = STORAGE_METHODS.keys()

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.adapter = run.adapter
        self._require_shapes(run.spec)
        self._require_views()
        for part in self._live():
            poison(part, Poison.NEVER_WRITTEN)

    def after(self, observation: Observation) -> Mapping[str, int]:
        if "table" in self.run.features and self.run.cache_under_test.device.idle:
            self._poison_freed_blocks(observation.before, observation.after)
        return {}

    def _require_shapes(self, spec: CacheSpec) -> None:
        """Raise ``InvalidReturnValue`` for views of wrong shapes."""
        sizes = {
            "layers": spec.num_layers,
            "blocks": None,  # other invariants detect a cache with too few blocks
            "heads": spec.num_heads,
            "block_size": spec.block_size,
            # Codes may be packed.
            "head_dim": None if spec.dtype in self.adapter.tolerance else spec.head_dim,
        }
        for name, pair in zip(STORAGE_METHODS, self.read_views(copied=False), strict=True):
            for view in pair or ():
                return_values.require_dimensions(f"{name}()", view, sizes)

    def _require_views(self) -> None:
        """Raise ``InvalidReturnValue`` for copies of the storage, which poison would not reach."""
        for rank in self._ranks:
            for name in STORAGE_METHODS:
                one, other = _read_storage(rank, name), _read_storage(rank, name)
                for view, second_views in zip(one or (), other or (), strict=True):
                    return_values.require_same_storage(f"{name}()", view, second_views)

    @property
    def _ranks(self) -> Sequence[Any]:
        sharded = "shards" in self.adapter.abilities
        return self.adapter.shards() if sharded else [self.adapter]

    def _live(self) -> list[torch.Tensor]:
        shown = [_read_storage(rank, name) for rank in self._ranks for name in STORAGE_METHODS]
        return [part for pair in shown for part in pair or ()]

    def read_views(self, *, copied: bool) -> list[Pair | None]:
        """Return the views of each method in ``STORAGE_METHODS``, or copies; None without it."""
        pairs = [_read_storage(self.adapter, name) for name in STORAGE_METHODS]
        return [(pair[0].clone(), pair[1].clone()) if pair and copied else pair for pair in pairs]

    def _poison_freed_blocks(self, before: Snapshot, after: Snapshot) -> None:
        """Overwrite blocks that were freed and are not cached, in the storage and the snapshot."""
        if before.arena is None and before.scales is None:  # calls were in flight
            return
        for layer in {layer for _, layer in before.tables or ()}:
            cached = {*after.ledger(layer).cached} if after.ledgers else set[int]()
            kept = cached | after.blocks_in_flight.keys()
            for block in before.owners(layer).keys() - after.owners(layer).keys() - kept:
                for part in (*self._live(), *(after.arena or ()), *(after.scales or ())):
                    poison(part[layer, block], Poison.FREED)


def _read_storage(adapter: Any, name: str) -> Pair | None:
    if name not in adapter.abilities:
        return None
    return return_values.storage(f"{name}()", getattr(adapter, name)(), STORAGE_METHODS[name])


@invariant(rank=21, needs=("container",))
def separate_containers(observation: Observation) -> Finding | None:
    """No two sequences may share a slot or a list."""
    holders: dict[tuple[type, int], int] = {}
    for seq, container in observation.after.containers.items():
        if isinstance(container, Exception):
            problem = f"container({seq}) raised {type(container).__name__}: {container}"
            return Finding(problem, Location(0, {seq: None}), container)
        identity, shared = id(container), "the same list"
        if isinstance(container, int):
            identity, shared = container, f"slot {container}"
        other = holders.setdefault((type(container), identity), seq)
        if other != seq:
            problem = f"sequences {other} and {seq} are kept in {shared}"
            return Finding(problem, Location(0, {other: None, seq: None}))
    return None


def _show_storage(run: Run, look: SnapshotScope) -> Mapping[str, Any]:
    """Return the storage as fields of a snapshot; empty while calls are in flight."""
    storage = run.observer(Storage)
    if storage is None or not run.cache_under_test.device.idle:
        return {}
    return dict(zip(STORAGE_METHODS, storage.read_views(copied=look.copies), strict=True))


STORAGE = Capability(
    methods=StorageMethods,
    renamed={"kept_in": "container(seq)"},
    sharded={"container": RankPolicy.FIRST, "arena": RankPolicy.STORED},
    needs={"arena": ("table",)},
    invariants=(arena, separate_containers),
    observers=(Storage,),
    views=(View(STORAGE_METHODS.keys(), _show_storage),),
)
