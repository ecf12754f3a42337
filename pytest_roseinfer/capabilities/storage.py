"""The storage of a cache: nothing changes but where a step writes, and free blocks are poisoned."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities import answers
from pytest_roseinfer.capabilities.capability import (
    Across,
    Capability,
    Look,
    Observer,
    Run,
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
    """The methods that show the storage, and where in it the cache keeps a sequence."""

    scratch_blocks: frozenset[int] = frozenset()
    """Blocks of ``arena`` that no sequence owns and padding may write to; ``make`` may set it."""

    @optional
    def arena(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[layers, blocks, heads, block_size, head_dim]`` views of the live storage.

        Those of keys and of values may lie in one tensor. Copies are refused.
        """

    @optional
    def container(self, seq: int) -> int | list[Any]:
        """Return the number of the slot of a sequence, or the list in which its blocks are kept.

        It is the list itself and not a copy. No two sequences may have the same; when one is freed
        or absent, another may get it.
        """


@invariant(rank=40, needs=("arena", "table"))
def arena(seen: Observation) -> Finding | None:
    """Nothing in the storage may change but where the step writes."""
    change = find_change(seen, _expected(seen), seen.after.arena)
    if change is None:
        return None
    location, contents = change
    return Finding(
        f"layer {location.layer}, {contents.kind}, block {location.block}, position "
        f"{location.slot}, head {contents.head}: {contents.words()}",
        location,
    )


def handed_out(seen: Observation, layer: int) -> set[int]:
    """Find the blocks that came in this step to all who hold them now.

    A block that a sequence gave up may be handed out again at once, for a copy.
    """
    before, after = _places(seen.before, layer), _places(seen.after, layer)
    return {block for block, places in after.items() if places.isdisjoint(before[block])}


def _out_of_windows(seen: Observation, layer: int) -> set[int]:
    """Find the blocks that nobody holds, if what was written left the window in the same step.

    It lay in one of them, or was not written at all.
    """
    if seen.after.arena and any(block is None for block, _ in seen.slots(layer)):
        return {*range(seen.after.arena[0].shape[1])} - {*seen.after.owners(layer)}
    return set()


def _places(shown: Snapshot, layer: int) -> defaultdict[int, set[tuple[int, int]]]:
    """Find the sequences that hold each block, and where in their tables it is."""
    places: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for seq, table in shown.tables_of(layer).items():
        for at, block in enumerate(table):
            if block is not None:
                places[block].add((seq, at))
    return places


def _copied_back(seen: Observation, layer: int) -> set[int]:
    """Find the blocks of sequences that are coming back, which are written at any time."""
    coming = seen.oracle.hidden
    if seen.operation:
        coming += seen.operation.brings_back()
    tables = seen.after.tables_of(layer)
    return {block for seq in coming for block in tables[seq] if block is not None}


def _expected(seen: Observation) -> Pair | None:
    """Return the arena before the step, with what the step may have changed as it was found."""
    before, found, written = seen.before.arena, seen.after.arena, seen.outcome.written
    if before is None or found is None:
        return None
    if seen.declared.prefixes.shares == "equal prefixes":
        return _cached(seen, before, found)
    expected = before[0].clone(), before[1].clone()
    for layer in range(seen.spec.num_layers):
        slots = seen.slots(layer)
        opened = {block for block, at in slots if at == 0}
        free_to_change = (
            handed_out(seen, layer) - opened
            | _copied_back(seen, layer)
            | _out_of_windows(seen, layer)
        )
        if seen.payload.rounds_blocks:
            free_to_change |= {block for block, _ in slots if block is not None}
        if seen.operation and seen.operation.padding():
            free_to_change |= seen.scratch_blocks
        for block in free_to_change:
            for image, cache in zip(expected, found, strict=True):
                image[layer, block] = cache[layer, block]  # a copy: read-back has checked it
        if slots and written:
            rows = [row for row, (block, _) in enumerate(slots) if block is not None]
            blocks, positions = [slots[row][0] for row in rows], [slots[row][1] for row in rows]
            new: Sequence[torch.Tensor] = seen.payload.layer(written.tokens, layer)
            if seen.payload.tolerance:  # the codes are the cache's own: read-back has checked them
                new = [cache[layer][blocks, :, positions] for cache in found]
            for image, tokens in zip(expected, new, strict=True):
                image[layer][blocks, :, positions] = tokens[rows]
    return expected


def _cached(seen: Observation, before: Pair, found: Pair) -> Pair:
    """Return the arena as it was found, but for the cached blocks, which must be as before.

    A block that turns out to hold what another does is written and given up for it, to be taken
    again in the same step, so of others no more is known than what is read back.
    """
    expected = found[0].clone(), found[1].clone()
    for layer in range(seen.spec.num_layers):
        was, is_now = (each.ledger(layer).cached for each in (seen.before, seen.after))
        kept = sorted({*was}.intersection(is_now))
        for image, cache in zip(expected, before, strict=True):
            image[layer, kept] = cache[layer, kept]
    return expected


STORED = {"arena": (5,), "scales": (4, 3)}
"""The methods that show a part of it, and how many dimensions that may have."""


class Storage(Observer):
    """The storage that a cache shows: poisoned where nobody reads, and copied for snapshots."""

    any_of = STORED.keys()

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.adapter = run.adapter
        self._require_shapes(run.spec)
        self._require_views()
        for part in self._live():
            poison(part, Poison.NEVER_WRITTEN)

    def after(self, seen: Observation) -> Mapping[str, int]:
        if "table" in self.run.can and self.run.driven.device.idle:
            self._poison_what_was_freed(seen.before, seen.after)
        return {}

    def _require_shapes(self, spec: CacheSpec) -> None:
        """Raise where what is shown is not laid out as the harness will take it to be."""
        due = {
            "layers": spec.num_layers,
            "blocks": None,  # too few are the cache's mistake, and its ledger's
            "heads": spec.num_heads,
            "block_size": spec.block_size,
            # Codes may be packed.
            "head_dim": None if spec.dtype in self.adapter.tolerance else spec.head_dim,
        }
        for name, pair in zip(STORED, self.shown(copied=False), strict=True):
            for view in pair or ():
                answers.laid_out(f"{name}()", view, due)

    def _require_views(self) -> None:
        """Raise where what is shown is not what is stored: poison would go nowhere."""
        for rank in self._ranks:
            for name in STORED:
                one, other = _shown(rank, name), _shown(rank, name)
                for view, again in zip(one or (), other or (), strict=True):
                    answers.lies_where_it_did(f"{name}()", view, again)

    @property
    def _ranks(self) -> Sequence[Any]:
        sharded = "shards" in self.adapter.abilities
        return self.adapter.shards() if sharded else [self.adapter]

    def _live(self) -> list[torch.Tensor]:
        shown = [_shown(rank, name) for rank in self._ranks for name in STORED]
        return [part for pair in shown for part in pair or ()]

    def shown(self, *, copied: bool) -> list[Pair | None]:
        """Return what each of the methods shows, or a copy of that."""
        pairs = [_shown(self.adapter, name) for name in STORED]
        return [(pair[0].clone(), pair[1].clone()) if pair and copied else pair for pair in pairs]

    def _poison_what_was_freed(self, before: Snapshot, after: Snapshot) -> None:
        """Overwrite what nobody will read of the blocks given back, in the cache and its copy."""
        if before.arena is None and before.scales is None:  # the device was at work
            return
        for layer in {layer for _, layer in before.tables or ()}:
            kept = {*after.ledger(layer).cached} if after.ledgers else set[int]()
            for block in before.owners(layer).keys() - after.owners(layer).keys() - kept:
                for part in (*self._live(), *(after.arena or ()), *(after.scales or ())):
                    poison(part[layer, block], Poison.FREED)


def _shown(adapter: Any, name: str) -> Pair | None:
    if name not in adapter.abilities:
        return None
    return answers.storage(f"{name}()", getattr(adapter, name)(), STORED[name])


@invariant(rank=21, needs=("container",))
def separate_containers(seen: Observation) -> Finding | None:
    """No two sequences may be kept in one slot, or in one list."""
    holders: dict[tuple[type, int], int] = {}
    for seq, kept in seen.after.kept.items():
        if isinstance(kept, Exception):
            what = f"container({seq}) raised {type(kept).__name__}: {kept}"
            return Finding(what, Location(0, {seq: None}), kept)
        identity, shared = id(kept), "the same list"
        if isinstance(kept, int):
            identity, shared = kept, f"slot {kept}"
        other = holders.setdefault((type(kept), identity), seq)
        if other != seq:
            what = f"sequences {other} and {seq} are kept in {shared}"
            return Finding(what, Location(0, {other: None, seq: None}))
    return None


def _show_storage(run: Run, look: Look) -> Mapping[str, Any]:
    """Show nothing while the device has something to do."""
    storage = run.observer(Storage)
    if storage is None or not run.driven.device.idle:
        return {}
    return dict(zip(STORED, storage.shown(copied=look.copies), strict=True))


STORAGE = Capability(
    methods=StorageMethods,
    renamed={"kept_in": "container(seq)"},
    sharded={"container": Across.FIRST, "arena": Across.STORED},
    needs={"arena": ("table",)},
    invariants=(arena, separate_containers),
    observers=(Storage,),
    views=(View(STORED.keys(), _show_storage),),
)
