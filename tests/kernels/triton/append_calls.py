"""Direct calls of the append kernels: caches of any layout, and their expected contents.

A layout carves keys and values out of one flat buffer. Buffers are compared whole, so a write into
the gaps between the two, or into the other one, is detected too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from roseinfer.kernels.triton.append import (
    kv_append_triton,
    kv_append_triton_full_batch,
    kv_append_triton_identity_pos,
)
from tests.kv.twins import assert_same_bits, poison, random_words

if TYPE_CHECKING:
    from collections.abc import Callable

Shape = tuple[int, ...]
Pair = tuple[torch.Tensor, torch.Tensor]


def apart(flat: torch.Tensor, shape: Shape) -> Pair:
    """Place one contiguous cache after the other."""
    keys, values = flat[: 2 * numel(shape)].view(2, *shape)
    return keys, values


def interleaved(flat: torch.Tensor, shape: Shape) -> Pair:
    """Return ``kv[:, 0]`` and ``kv[:, 1]`` of ``[blocks, 2, heads, tokens, head_dim]``."""
    *outer, blocks, heads, tokens, dims = shape
    both = flat[: 2 * numel(shape)].view(*outer, blocks, 2, heads, tokens, dims)
    return both.select(-4, 0), both.select(-4, 1)


def token_major(flat: torch.Tensor, shape: Shape) -> Pair:
    """Place tokens before heads in memory."""
    *outer, heads, tokens, dims = shape
    keys, values = flat[: 2 * numel(shape)].view(2, *outer, tokens, heads, dims).transpose(-2, -3)
    return keys, values


def unlike(flat: torch.Tensor, shape: Shape) -> Pair:
    """Make keys contiguous and the last dimension of values slowest: no stride in common."""
    *outer, heads, tokens, dims = shape
    keys = flat[: numel(shape)].view(shape)
    values = flat[numel(shape) : 2 * numel(shape)].view(*outer, dims, tokens, heads)
    return keys, values.transpose(-1, -3)


def padded(flat: torch.Tensor, shape: Shape) -> Pair:
    """Start off 16-byte boundaries, with gaps after tokens and between elements of values."""
    *outer, dims = shape
    rows = numel(shape) // dims
    keys = flat[1 : 1 + rows * (dims + 3)].view(*outer, dims + 3)[..., :dims]
    values = flat[-rows * 2 * dims :].view(*outer, 2 * dims)[..., ::2]
    return keys, values


def off_by_one(flat: torch.Tensor, shape: Shape) -> Pair:
    """Use the strides of ``apart``, but start off 16-byte boundaries."""
    return apart(flat[1:], shape)


LAYOUTS: dict[str, Callable[[torch.Tensor, Shape], Pair]] = {
    layout.__name__: layout for layout in (apart, interleaved, token_major, unlike, padded)
}


def numel(shape: Shape) -> int:
    return int(torch.Size(shape).numel())


@dataclass
class Caches:
    """Keys and values in one poisoned buffer."""

    flat: torch.Tensor
    shape: Shape
    layout: Callable[[torch.Tensor, Shape], Pair]

    @classmethod
    def build(
        cls,
        device: str,
        shape: Shape,
        layout: Callable[[torch.Tensor, Shape], Pair] = apart,
        dtype: torch.dtype = torch.float32,
    ) -> Caches:
        room = numel(shape[:-1]) * (3 * shape[-1] + 3) + 8
        flat = torch.empty(room, dtype=dtype, device=device)
        poison(flat, seed=3)
        return cls(flat, shape, layout)

    def copy(self) -> Caches:
        return replace(self, flat=self.flat.clone())

    @property
    def pair(self) -> Pair:
        return self.layout(self.flat, self.shape)

    def assert_same(self, other: Caches) -> None:
        assert_same_bits(self.flat, other.flat, "the buffer of both caches")


@dataclass(frozen=True)
class Slots:
    """Destinations of tokens: input row, block and position of each."""

    rows: tuple[int, ...]
    blocks: tuple[int, ...]
    positions: tuple[int, ...]


KERNELS = {
    "gather": Slots((4, 0, 3, 2), (3, 5, 0, 3), (1, 3, 0, 2)),
    "identity_pos": Slots((0, 1, 2, 3, 4), (5, 2, 3, 2, 0), (3, 1, 0, 2, 3)),
    "full_batch": Slots((0, 1, 2, 3, 4), (5, 2, 3, 4, 0), (2, 2, 2, 2, 2)),
}
NUM_ROWS = 5
CACHE_SHAPE = (6, 3, 4, 5)


def index(numbers: tuple[int, ...], device: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).to(device)


def arguments(kernel: str, caches: Pair, inputs: Pair, **given: Any) -> dict[str, Any]:
    """Return the arguments of a kernel's wrapper, with ``given`` replacing the defaults."""
    slots, device = KERNELS[kernel], caches[0].device
    usual: dict[str, Any] = {
        "k_cache_layer": caches[0],
        "v_cache_layer": caches[1],
        "key_new": inputs[0],
        "value_new": inputs[1],
        "block_idx": index(slots.blocks, device),
        "pos": index(slots.positions, device) if kernel != "full_batch" else slots.positions[0],
    }
    if kernel == "gather":
        usual["batch_idx"] = index(slots.rows, device)
    return usual | given


def run(kernel: str, caches: Pair, inputs: Pair, **given: Any) -> None:
    wrappers: dict[str, Callable[..., None]] = {
        "gather": kv_append_triton,
        "identity_pos": kv_append_triton_identity_pos,
        "full_batch": kv_append_triton_full_batch,
    }
    wrappers[kernel](**arguments(kernel, caches, inputs, **given))


def new_tokens(caches: Caches, dtype: torch.dtype | None = None, rows: int = NUM_ROWS) -> Pair:
    """Return random bits for keys, and different ones for values."""
    _, heads, _, dims = caches.shape
    dtype = dtype or caches.flat.dtype
    shape = (rows, heads, dims)
    key, value = (random_words(shape, dtype, seed).to(caches.flat.device) for seed in (11, 12))
    return key, value


def after_slow_append(caches: Caches, inputs: Pair, slots: Slots) -> Caches:
    """Return a copy of the caches to which the tokens were written one by one."""
    expected = caches.copy()
    for cache, new in zip(expected.pair, inputs, strict=True):
        for row, block, position in zip(slots.rows, slots.blocks, slots.positions, strict=True):
            cache[block, :, position] = new[row].to(cache.dtype)
    return expected


def assert_appends(kernel: str, caches: Caches, inputs: Pair, **given: Any) -> None:
    """Assert that the kernel leaves the whole buffer as the slow append does."""
    expected = after_slow_append(caches, inputs, KERNELS[kernel])
    run(kernel, caches.pair, inputs, **given)
    caches.assert_same(expected)
