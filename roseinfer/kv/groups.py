"""Which layers share block lists, and which of them take their blocks from one pool."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.config import AppendPolicy
from roseinfer.errors import BadArgument, with_kind
from roseinfer.kv.pool import SCRATCH

if TYPE_CHECKING:
    from collections.abc import Sequence

# Checks what a cache is built from, before memory is taken for it.


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST = 1 << 62
"""Sums of a few of these fit into the 64 bits that torch has."""


def checked_size(name: str, value: Any) -> int:
    """Return a size as an int."""
    try:
        size = index(value)
    except (TypeError, ValueError, RuntimeError):  # the latter are numpy's and torch's
        raise BadArgument(f"{name} must be a whole number, not {value!r}") from None
    if size < 1:
        raise BadArgument(f"{name} must be at least 1, not {value!r}")
    if size > _MOST:
        raise BadArgument(f"{name} must be at most 2**62, not {value!r}")
    return size


def checked_device(device: Any) -> torch.device:
    """Return a device on which torch can make a tensor."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    # torch raises the last one for a GPU that it was not built for.
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        said = with_kind(error).splitlines()[0]
        raise BadArgument(f"device {device!r}: torch has no such device: {said}") from error
    return found


def check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise BadArgument(
            f"a cache of {dtype} is not supported; choose a dtype of {', '.join(map(str, DTYPES))}"
        )


def check_policy(policy: Any) -> None:
    if not isinstance(policy, AppendPolicy):
        raise BadArgument(f"policy must be an AppendPolicy, not {policy!r}")


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
