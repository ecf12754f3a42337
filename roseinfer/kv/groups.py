"""Groups of layers that share block lists, and checks of a cache's sizes, dtype and device."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.config import AppendPolicy
from roseinfer.errors import BadArgument, error_with_type

if TYPE_CHECKING:
    from collections.abc import Sequence

# Checks of constructor arguments, before any memory is allocated.


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_SIZE = 1 << 62
"""Largest size; sums of a few of these still fit into torch's 64-bit integers."""


def validate_size(name: str, value: Any) -> int:
    """Return ``value`` as an int; raise unless it is from 1 to 2**62."""
    try:
        size = index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: numpy, torch
        raise BadArgument(f"{name} must be a whole number, not {value!r}") from None
    if size < 1:
        raise BadArgument(f"{name} must be at least 1, not {value!r}")
    if size > _MAX_SIZE:
        raise BadArgument(f"{name} must be at most 2**62, not {value!r}")
    return size


def validate_device(device: Any) -> torch.device:
    """Return ``device`` as a torch device; raise unless torch can make a tensor on it."""
    try:
        torch_device = torch.device(device)
        torch.empty(0, device=torch_device)
    # torch raises AssertionError for a GPU that it was not built for.
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        reason = error_with_type(error).splitlines()[0]
        raise BadArgument(f"device {device!r}: torch has no such device: {reason}") from error
    return torch_device


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
    """Layers that share blocks, so that a sequence has one block list for all of them."""

    layers: tuple[int, ...]
    window: int | None
    """Tokens that a token attends to, itself included; None for full attention."""

    def first_visible_position(self, stored: int) -> int:
        """Return the first position that the token after ``stored`` others attends to."""
        return 0 if self.window is None else max(0, stored - self.window + 1)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Mapping of a cache's layers to groups and to layers of the storage."""

    groups: list[LayerGroup]
    layers_per_group: int
    one_pool: bool
    """True if all groups share one pool, so that a storage layer serves a layer of each group."""
    num_storage_layers: int
    """Layers that the storage has room for."""
    storage_layer_of: list[int]
    """Storage layer of each layer: the first index of its keys and values."""
    group_of: list[int]
    """Group of each layer."""


def make_layer_layout(
    num_layers: int, layers_per_group: int | None, windows: Sequence[int | None] | None
) -> LayerLayout:
    """Group layers by window, or consecutive layers where ``windows`` is None."""
    if layers_per_group is not None:
        layers_per_group = validate_size("layers_per_group", layers_per_group)
    if windows is None:
        size, groups = (
            layers_per_group or 1,
            group_consecutive_layers(num_layers, layers_per_group or 1),
        )
    elif len(windows) != num_layers:
        raise BadArgument(f"{len(windows)} windows for {num_layers} layers")
    else:
        groups = group_layers_by_window(windows, layers_per_group)
        size = layers_per_group or len(groups[0].layers)
    of_layer = {
        layer: (at, plane)
        for at, group in enumerate(groups)
        for plane, layer in enumerate(group.layers)
    }
    one_pool = windows is not None
    return LayerLayout(
        groups=groups,
        layers_per_group=size,
        one_pool=one_pool,
        num_storage_layers=size if one_pool else num_layers,
        storage_layer_of=[of_layer[at][1] if one_pool else at for at in range(num_layers)],
        group_of=[of_layer[at][0] for at in range(num_layers)],
    )


def group_consecutive_layers(num_layers: int, layers_per_group: int) -> list[LayerGroup]:
    """Group consecutive layers, ``layers_per_group`` at a time."""
    if num_layers % layers_per_group:
        raise BadArgument(
            f"{num_layers} layers do not divide into groups of {layers_per_group} "
            "(layers_per_group)"
        )
    begins = range(0, num_layers, layers_per_group)
    return [LayerGroup(tuple(range(at, at + layers_per_group)), None) for at in begins]


def group_layers_by_window(
    windows: Sequence[int | None], layers_per_group: int | None = None
) -> list[LayerGroup]:
    """Group layers of the same window, by default as many as have the rarest window.

    A block has room for the layers of any one group, so that groups can share a pool; space that
    the last group of a window does not fill is wasted.
    """
    windows = [each if each is None else validate_size("a window", each) for each in windows]
    kinds = {window: [at for at, own in enumerate(windows) if own == window] for window in windows}
    size = layers_per_group or min(map(len, kinds.values()))
    return [
        LayerGroup(tuple(layers[at : at + size]), window)
        for window, layers in kinds.items()
        for at in range(0, len(layers), size)
    ]
