"""Which layers share block lists, and which of them take their blocks from one pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument
from roseinfer.kv.cache_arguments import checked_size
from roseinfer.kv.pool import SCRATCH

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose tokens lie in the same blocks, so that a sequence has one list for all."""

    layers: tuple[int, ...]
    window: int | None
    """How many tokens a token sees in them, itself included; None where it sees all before it."""

    def first_seen(self, stored: int) -> int:
        """Return the position of the first token that one behind ``stored`` others sees."""
        return 0 if self.window is None else max(0, stored - self.window + 1)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the layers of a cache have their tokens."""

    groups: list[LayerGroup]
    layers_per_group: int
    one_pool: bool
    """All groups take their blocks from one pool, so a plane is used by a layer of each."""
    num_planes: int
    """How many layers the storage has room for."""
    planes: list[int]
    """The first index of a layer's keys and values in the storage."""
    group_of: list[int]


def arrange(
    num_layers: int, layers_per_group: int | None, windows: Sequence[int | None] | None
) -> Arrangement:
    """Group layers by their windows, or else in the order they have."""
    if layers_per_group is not None:
        layers_per_group = checked_size("layers_per_group", layers_per_group)
    if windows is None:
        size, groups = layers_per_group or 1, consecutive(num_layers, layers_per_group or 1)
    elif len(windows) != num_layers:
        raise BadArgument(f"{len(windows)} windows for {num_layers} layers")
    else:
        groups = by_window(windows, layers_per_group)
        size = layers_per_group or len(groups[0].layers)
    of_layer = {
        layer: (at, plane)
        for at, group in enumerate(groups)
        for plane, layer in enumerate(group.layers)
    }
    one_pool = windows is not None
    return Arrangement(
        groups=groups,
        layers_per_group=size,
        one_pool=one_pool,
        num_planes=size if one_pool else num_layers,
        planes=[of_layer[at][1] if one_pool else at for at in range(num_layers)],
        group_of=[of_layer[at][0] for at in range(num_layers)],
    )


def given_back(block_ids: Sequence[int]) -> int:
    """Return how many blocks at the front of a list were given back, and are ``SCRATCH`` now."""
    return next(
        (at for at, block_id in enumerate(block_ids) if block_id != SCRATCH), len(block_ids)
    )


def consecutive(num_layers: int, layers_per_group: int) -> list[LayerGroup]:
    """Group layers that follow one another."""
    if num_layers % layers_per_group:
        raise BadArgument(
            f"{num_layers} layers do not divide into groups of {layers_per_group} "
            "(layers_per_group)"
        )
    begins = range(0, num_layers, layers_per_group)
    return [LayerGroup(tuple(range(at, at + layers_per_group)), None) for at in begins]


def by_window(
    windows: Sequence[int | None], layers_per_group: int | None = None
) -> list[LayerGroup]:
    """Group layers of the same window, by default as many as there are of the rarest window.

    A block has room for the layers of any one group, so that groups can share a pool; what the
    last group of a window does not fill is lost.
    """
    windows = [each if each is None else checked_size("a window", each) for each in windows]
    kinds = {window: [at for at, own in enumerate(windows) if own == window] for window in windows}
    size = layers_per_group or min(map(len, kinds.values()))
    return [
        LayerGroup(tuple(layers[at : at + size]), window)
        for window, layers in kinds.items()
        for at in range(0, len(layers), size)
    ]
