"""Layers with sliding windows, whose blocks are freed after they leave the window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pytest_roseinfer.capabilities.block_tables import wrong_length
from pytest_roseinfer.capabilities.capability import Capability, Observer, Traits
from pytest_roseinfer.capabilities.observation import (
    Finding,
    Location,
    Observation,
    invariant,
    location_of_block,
)
from pytest_roseinfer.oracle.pages import (
    AT_ONCE,
    NEXT_TRY,
    first_live,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec


@dataclass(frozen=True)
class WindowTraits(Traits):
    """Groups of layers with windows, and the time at which blocks outside a window are freed."""

    groups: int = 0
    """Most different windows among the layers of a cache, where no window counts as one; 0 if no
    layer has a window. They are drawn for ``spec.windows``. In a layer of window W a token attends
    to itself and the W - 1 before it. So the last W - 1 stored tokens are live: ``peek`` and
    ``gather`` return only these, ``attend`` attends to these, and ``table`` has None for a freed
    block, whose tokens all come before them."""
    pools: Literal["own", "shared"] = "own"
    """Pools of blocks: each layer has its ``"own"``, of ``spec.num_blocks`` blocks, or all layers
    allocate from a ``"shared"`` one. There a block belongs to one group at a time, layers of a
    group have equal tables, and the ledger of any layer shows the whole pool."""
    frees: Literal["at once", "next write", "next try"] = "at once"
    """Time at which a block that left the window is freed: ``"at once"``, when the write that moved
    it out is stored, or by the sequence's ``"next write"``. The latter makes room for the write's
    own row and for later ones, and a refused write frees nothing. With ``"next try"`` a refused row
    also frees its blocks outside the window, as in vLLM."""
    sizes: tuple[int | None, ...] = ()
    """Windows that a layer can have, with None for no window, as in ``(128, None)``; any window if
    empty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.sizes:
            if size is not None and (type(size) is not int or size < 1):
                raise TypeError(
                    f"WindowTraits: sizes has {size!r}; write the windows that a layer can have, "
                    "numbers of tokens of 1 or more, or None for no window"
                )
        if type(self.groups) is not int or self.groups < 0:
            raise TypeError(
                f"WindowTraits: groups is {self.groups!r}; write how many groups of layers with "
                "different windows the cache can be built with, 0 if layers have none"
            )
        if self.sizes and not 0 < self.groups <= len({*self.sizes}):
            raise TypeError(
                f"WindowTraits: groups is {self.groups}, and sizes has {len({*self.sizes})} "
                "windows; write as many groups as a cache can have, at most one for each window"
            )

    def choose(self, usual: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return one window for each group: the last of ``sizes``, or of the usual ones."""
        return tuple(self.sizes or usual)[-self.groups :] if self.groups else ()


class WindowMethods:
    """Adapter attribute for sliding windows."""

    windows: ClassVar[WindowTraits] = WindowTraits()
    """Groups of layers with windows, and the time at which blocks outside a window are freed."""


@invariant(rank=0, needs=("table", "windows"))
def windows(observation: Observation) -> Finding | None:
    """Blocks must be freed when their tokens have left the window, and not before."""
    for seq in _new_prefix_seqs(observation):
        if finding := _check_prefix_blocks(observation, seq):
            return finding
    for layer, window in enumerate(observation.spec.windows):
        if finding := _in_two_groups(observation, layer):
            return finding
        for seq in observation.oracle.sequences:
            finding = wrong_length(observation, seq, layer)
            if finding := finding or _check_table_end(observation, seq, layer, window):
                return finding
    return None


def _check_table_end(
    observation: Observation, seq: int, layer: int, window: int | None
) -> Finding | None:
    """Find a table with None in place of a live block, or with a block that must be freed."""
    num_freed, live = (
        observation.oracle.count_out_of_window(seq, layer),
        observation.oracle.first_live(seq, layer),
    )
    if seq in _new_prefix_seqs(observation):
        num_freed = _first_held_block(observation, seq, layer)
    for at, block in enumerate(observation.after.tables_of(layer)[seq]):
        if (block is None) == (at < num_freed):
            continue
        location = f"layer {layer} of window {window}, sequence {seq}: block {at} of its table"
        problem = f"{location} is {block}, and must be None: its tokens have all left the window"
        if block is None:
            problem = f"{location} is None, though it is to be held: tokens from {live} on are live"
        return Finding(problem, Location(layer, {seq: at}, block))
    return None


def _new_prefix_seqs(observation: Observation) -> set[int]:
    """Return the sequences that began in this step and may have reused a stored prefix.

    Such a sequence never held the blocks of the prefix that lie outside its window.
    """
    oracle, written = observation.oracle, observation.outcome.written
    if (
        oracle.windows.frees == AT_ONCE
        or observation.declared.prefixes.shares != "equal prefixes"
        or not written
    ):
        return set()
    return {seq for seq, count in written.rows if count == oracle.length(seq)}


def _first_held_block(observation: Observation, seq: int, layer: int) -> int:
    """Return the index of the first block in a sequence's table; its length if all are None."""
    table = observation.after.tables_of(layer)[seq]
    return next((at for at, block in enumerate(table) if block is not None), len(table))


def _check_prefix_blocks(observation: Observation, seq: int) -> Finding | None:
    """Check that one length of a reused prefix explains the first None entries in all layers."""
    size, max_prefix = (
        observation.spec.block_size,
        observation.oracle.length(seq) - observation.declared.prefixes.recomputed_tokens,
    )
    left_out = {
        layer: _first_held_block(observation, seq, layer)
        for layer in observation.oracle.windows.groups
    }

    def explains(prefix: int) -> bool:
        windows = {layer: observation.spec.windows[layer] for layer in left_out}
        return left_out == {at: first_live(each, prefix) // size for at, each in windows.items()}

    if any(explains(prefix) for prefix in range(0, max_prefix + 1, size)):
        return None
    each = ", ".join(f"{blocks} in layer {layer}" for layer, blocks in left_out.items())
    return Finding(
        f"sequence {seq} has {observation.oracle.length(seq)} tokens, and the first blocks of its "
        f"tables are None, {each}: no length of a reused prefix explains that",
        Location(0, {seq: None}),
    )


def _in_two_groups(observation: Observation, layer: int) -> Finding | None:
    """Find layers of a shared pool whose tables disagree about the owner of a block."""
    (_, *others), shown = observation.oracle.pool_of(layer), observation.after
    if both := shown.owners(layer).keys() & shown.owners(*others).keys():
        problem = f"blocks {sorted(both)} of layer {layer} are held in another group of layers too"
        return Finding(problem, location_of_block(observation, layer, min(both)))
    if observation.oracle.windows.shared_pool:
        first = observation.spec.windows.index(observation.spec.windows[layer])
        if shown.tables_of(layer) != shown.tables_of(first):
            return Finding(f"layers {first} and {layer} have one window and different tables")
    return None


# Declarations that cannot be judged together with windows


_WITH_TEXTS = ("fork", "truncate", "look_up", "use_queue")
_JUDGED = {
    "finds": "some",
    "granularity": "block",
    "evicts": "any",
    "evicts_when": "any time",
}


def refuse_windows(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for declarations about windows that contradict or cannot be judged."""
    name, windows = adapter.__name__, adapter.windows
    if not windows.groups:
        return
    has_texts = "use_tokens" in adapter.abilities
    incompatible = _WITH_TEXTS if has_texts else ("preempt",)
    for method in ("swap_out", *incompatible):
        if method in adapter.abilities:
            both = " and texts" if has_texts and method in incompatible else ""
            raise TypeError(
                f"{name} defines {method}, which cannot be judged with windows{both} yet"
            )
    if has_texts:
        _refuse_prefix_traits(adapter)
    if adapter.tolerance:
        raise TypeError(f"{name} has a tolerance, which cannot be judged with windows yet")
    if adapter.row_conditions:
        raise TypeError(f"{name} has row_conditions, whose counts differ from window to window")
    frees = windows.frees
    if frees == NEXT_TRY and (adapter.atomic_batches or "reserve" in adapter.abilities):
        raise TypeError(
            f"{name}.windows.frees is {frees!r}, which is for a cache that admits row by "
            "row: set atomic_batches = False, and leave out reserve"
        )
    needs_prefill = frees != AT_ONCE and "fork" in adapter.abilities
    if needs_prefill and "prefill" not in adapter.abilities:
        raise TypeError(
            f"{name} must define prefill: forks are compared with copies, which must be one write "
            "if a write frees the blocks that left the window before it"
        )


def _refuse_prefix_traits(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for prefix traits that cannot be judged per group of layers."""
    for trait, judged in _JUDGED.items():
        if (chosen := getattr(adapter.prefixes, trait)) != judged:
            raise TypeError(
                f"{adapter.__name__}.prefixes.{trait} is {chosen!r}; with windows and texts, "
                f"{judged!r} alone can be judged yet"
            )


def with_windows(spec: CacheSpec, adapter: type[Any], windows: Sequence[int | None]) -> CacheSpec:
    """Return the spec with one layer per window, and with blocks for all groups that share them."""
    sharing = len({*windows}) if adapter.windows.pools == "shared" else 1
    blocks = sharing * spec.num_blocks
    return replace(spec, num_layers=len(windows), num_blocks=blocks, windows=tuple(windows))


class OutOfWindowBlocks(Observer):
    """Counter of the blocks that left a window."""

    any_of = ("windows",)
    conditions: ClassVar = {
        "block_left_window": "A block has left its window and must be freed. Required of a cache "
        "whose layers have windows."
    }

    def after(self, observation: Observation) -> Mapping[str, int]:
        return {"block_left_window": observation.oracle.windows.pop_newly_out_of_window()}


WINDOWS = Capability(
    methods=WindowMethods,
    renamed={
        "window_groups": "windows = WindowTraits(groups=...)",
        "window_pools": "windows = WindowTraits(pools=...)",
        "window_gives_back": "windows = WindowTraits(frees=...)",
    },
    invariants=(windows,),
    refuse=(refuse_windows,),
    observers=(OutOfWindowBlocks,),
)
