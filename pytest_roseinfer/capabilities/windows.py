"""Layers with sliding windows, whose blocks are given back as they leave the window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pytest_roseinfer.capabilities.books import wrong_length
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
    """Groups of layers with windows, and when blocks that leave a window are given back."""

    groups: int = 0
    """Most different windows among the layers of a cache, no window counting as one; 0 if layers
    have none. They are drawn for ``spec.windows``. In a layer of window W a token attends to itself
    and the W - 1 before it. So of the stored tokens the last W - 1 are live: ``peek`` and
    ``gather`` return these alone, ``attend`` attends to them, and ``table`` has None for a block
    that was given back, all of whose tokens come before them."""
    pools: Literal["own", "shared"] = "own"
    """Pools of blocks: each layer has its ``"own"``, of ``spec.num_blocks`` blocks, or all layers
    take blocks from a ``"shared"`` one. There a block is one group's at a time, layers of a group
    have the same table, and a ledger of any layer shows the whole pool."""
    gives_back: Literal["at once", "next write", "next try"] = "at once"
    """Time at which a block that left the window is given back: ``"at once"``, when the write that
    moved it out is stored, or by the sequence's ``"next write"``. That makes room for the write's
    own row and for later ones; a write that is refused gives nothing back. With ``"next try"`` the
    row that found no room has given back all the same, as in vLLM."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.groups) is not int or self.groups < 0:
            raise TypeError(
                f"WindowTraits: groups is {self.groups!r}; write how many groups of layers with "
                "different windows the cache can be built with, 0 if layers have none"
            )


class WindowMethods:
    """How a cache gives back what leaves a window."""

    windows: ClassVar[WindowTraits] = WindowTraits()
    """Groups of layers with windows, and when blocks that leave a window are given back."""


@invariant(rank=0, needs=("table", "windows"))
def windows(seen: Observation) -> Finding | None:
    """Blocks must be given back when their tokens have left the window, and not before."""
    for seq in _begun(seen):
        if found := _wrong_beginning(seen, seq):
            return found
    for layer, window in enumerate(seen.spec.windows):
        if found := _in_two_groups(seen, layer):
            return found
        for seq in seen.oracle.sequences:
            if found := wrong_length(seen, seq, layer) or _wrong_end(seen, seq, layer, window):
                return found
    return None


def _wrong_end(seen: Observation, seq: int, layer: int, window: int | None) -> Finding | None:
    """Say where a table has None for a block that is needed, or a block that is not."""
    gone, live = seen.oracle.given_back(seq, layer), seen.oracle.first_live(seq, layer)
    if seq in _begun(seen):
        gone = _held_from(seen, seq, layer)
    for at, block in enumerate(seen.after.tables_of(layer)[seq]):
        if (block is None) == (at < gone):
            continue
        where = f"layer {layer} of window {window}, sequence {seq}: block {at} of its table"
        what = f"{where} is {block}, and must be None: its tokens have all left the window"
        if block is None:
            what = f"{where} is None, though it is to be held: tokens from {live} on are live"
        return Finding(what, Location(layer, {seq: at}, block))
    return None


def _begun(seen: Observation) -> set[int]:
    """Return the sequences that began in this step with what may have been found of a text.

    What its window left out of that, such a sequence has never held.
    """
    oracle, written = seen.oracle, seen.outcome.written
    if (
        oracle.windows.gives_back == AT_ONCE
        or seen.declared.prefixes.shares != "equal prefixes"
        or not written
    ):
        return set()
    return {seq for seq, count in written.rows if count == oracle.length(seq)}


def _held_from(seen: Observation, seq: int, layer: int) -> int:
    """Return where in its table a sequence has its first block."""
    table = seen.after.tables_of(layer)[seq]
    return next((at for at, block in enumerate(table) if block is not None), len(table))


def _wrong_beginning(seen: Observation, seq: int) -> Finding | None:
    """Say where no beginning of a text explains what a sequence left out that found it."""
    size, most = (
        seen.spec.block_size,
        seen.oracle.length(seq) - seen.declared.prefixes.recomputed_tokens,
    )
    left_out = {layer: _held_from(seen, seq, layer) for layer in seen.oracle.windows.groups}

    def explains(found: int) -> bool:
        windows = {layer: seen.spec.windows[layer] for layer in left_out}
        return left_out == {at: first_live(each, found) // size for at, each in windows.items()}

    if any(explains(found) for found in range(0, most + 1, size)):
        return None
    each = ", ".join(f"{blocks} in layer {layer}" for layer, blocks in left_out.items())
    return Finding(
        f"sequence {seq} has {seen.oracle.length(seq)} tokens, and the first blocks of its tables "
        f"are None, {each}: no number of tokens that it can have found explains that",
        Location(0, {seq: None}),
    )


def _in_two_groups(seen: Observation, layer: int) -> Finding | None:
    """Say where layers that share a pool disagree about whose a block is."""
    (_, *others), shown = seen.oracle.pool_of(layer), seen.after
    if both := shown.owners(layer).keys() & shown.owners(*others).keys():
        what = f"blocks {sorted(both)} of layer {layer} are held in another group of layers too"
        return Finding(what, location_of_block(seen, layer, min(both)))
    if seen.oracle.windows.shared_pool:
        first = seen.spec.windows.index(seen.spec.windows[layer])
        if shown.tables_of(layer) != shown.tables_of(first):
            return Finding(f"layers {first} and {layer} have one window and different tables")
    return None


# What an adapter says of windows, and what the harness cannot judge together with them.


_WITH_TEXTS = ("fork", "truncate", "look_up", "use_queue")
_JUDGED = {"finds": "some", "granularity": "block", "evicts": "any"}


def refuse_windows(adapter: type[Any]) -> None:
    """Raise ``TypeError`` where what is said of windows makes no sense or cannot be judged."""
    name, windows = adapter.__name__, adapter.windows
    if not windows.groups:
        return
    told = "use_tokens" in adapter.abilities
    others = _WITH_TEXTS if told else ("preempt",)
    for method in ("swap_out", *others):
        if method in adapter.abilities:
            both = " and texts" if told and method in others else ""
            raise TypeError(
                f"{name} defines {method}, which cannot be judged with windows{both} yet"
            )
    if told:
        _refuse_promises(adapter)
    if adapter.tolerance:
        raise TypeError(f"{name} has a tolerance, which cannot be judged with windows yet")
    if adapter.row_conditions:
        raise TypeError(f"{name} has row_conditions, whose counts differ from window to window")
    gives_back = windows.gives_back
    if gives_back == NEXT_TRY and (adapter.atomic_batches or "reserve" in adapter.abilities):
        raise TypeError(
            f"{name}.windows.gives_back is {gives_back!r}, which is said of a cache that admits "
            "row by row: set atomic_batches = False, and leave out reserve"
        )
    needs_prefill = gives_back != AT_ONCE and "fork" in adapter.abilities
    if needs_prefill and "prefill" not in adapter.abilities:
        raise TypeError(
            f"{name} must define prefill: forks are compared with copies, which must be one write "
            "where a write gives back what left the window before it"
        )


def _refuse_promises(adapter: type[Any]) -> None:
    """Refuse what a cache says of texts that is not known where each group keeps blocks."""
    for trait, judged in _JUDGED.items():
        if (chosen := getattr(adapter.prefixes, trait)) != judged:
            raise TypeError(
                f"{adapter.__name__}.prefixes.{trait} is {chosen!r}; with windows and texts, "
                f"{judged!r} alone can be judged yet"
            )


def with_windows(spec: CacheSpec, adapter: type[Any], windows: Sequence[int | None]) -> CacheSpec:
    """Return the cache with a layer for each window, and with blocks for all who share them."""
    sharing = len({*windows}) if adapter.windows.pools == "shared" else 1
    blocks = sharing * spec.num_blocks
    return replace(spec, num_layers=len(windows), num_blocks=blocks, windows=tuple(windows))


class LeftWindows(Observer):
    """Counts the blocks that left a window."""

    any_of = ("windows",)
    conditions: ClassVar = {
        "block_left_window": "A block has left its window and must be given back. Required of a "
        "cache whose layers have windows."
    }

    def after(self, seen: Observation) -> Mapping[str, int]:
        return {"block_left_window": seen.oracle.windows.take_left()}


WINDOWS = Capability(
    methods=WindowMethods,
    renamed={
        "window_groups": "windows = WindowTraits(groups=...)",
        "window_pools": "windows = WindowTraits(pools=...)",
        "window_gives_back": "windows = WindowTraits(gives_back=...)",
    },
    invariants=(windows,),
    refuse=(refuse_windows,),
    observers=(LeftWindows,),
)
