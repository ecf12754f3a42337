"""The append kernels write new keys and values to their slots.

The three kernels differ only in the source of a token's block, position and row. A program copies a
tile of tokens x heads x head_dim, K and V. On a GPU a tile is one token wide, which spreads small
batches; under the interpreter, where a program costs the same whatever its size, it holds many.
Offsets are 64-bit; cache and inputs may have any strides.

The ``kv_append_triton*`` functions check their arguments, which waits for the device. The block
manager calls the ``launch_*`` functions, which trust theirs.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from roseinfer.errors import BadArgument
from roseinfer.kernels.kernel import kernel, strides
from roseinfer.kernels.runtime import check_cache_pair, check_index, is_interpreted

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.kernels.kernel import FixedLaunch, TrafficTable, TritonKernel

    Strides = tuple[int, ...]

_Pair = tuple[Tensor, Tensor]
"""Keys and values."""
_TILE = 4096
"""Largest number of elements of a token's K or V in a tile; other programs copy the rest."""
_INTERPRETED_TOKENS = 64
"""Largest number of tokens in a tile under the interpreter."""


@triton.jit
def _token_tile(n, TILE_N: tl.constexpr):
    """Return the tokens of this program, and a mask of those that exist."""
    tokens = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    return tokens, tokens < n


@triton.jit
def _copy_tokens(
    k_cache, v_cache, key, value,
    rows, blocks, positions, exist,
    kc_b, kc_h, kc_t, kc_d,
    vc_b, vc_h, vc_t, vc_d,
    k_r, k_h, k_d,
    v_r, v_h, v_d,
    H: tl.constexpr, D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    heads = (tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)[None, :, None]).to(tl.int64)
    dims = tl.arange(0, TILE_D)[None, None, :].to(tl.int64)
    inside = (heads < H) & (dims < D) & exist[:, None, None]
    rows = rows.to(tl.int64)[:, None, None]
    blocks = blocks.to(tl.int64)[:, None, None]
    positions = positions.to(tl.int64)[:, None, None]
    k = tl.load(key + (rows * k_r + heads * k_h + dims * k_d), inside)
    v = tl.load(value + (rows * v_r + heads * v_h + dims * v_d), inside)
    tl.store(k_cache + (blocks * kc_b + positions * kc_t + heads * kc_h + dims * kc_d), k, inside)
    tl.store(v_cache + (blocks * vc_b + positions * vc_t + heads * vc_h + dims * vc_d), v, inside)


def _token_elements(n: int, H: int, D: int) -> int:
    return n * H * D


_FULL_BATCH_TRAFFIC: TrafficTable = {
    **dict.fromkeys(("k_cache", "v_cache", "key", "value"), _token_elements),
    "block_idx": lambda n: n,
}
_IDENTITY_POS_TRAFFIC: TrafficTable = {**_FULL_BATCH_TRAFFIC, "positions": lambda n: n}
_GATHER_TRAFFIC: TrafficTable = {**_IDENTITY_POS_TRAFFIC, "rows": lambda n: n}


@kernel(_FULL_BATCH_TRAFFIC, do_not_specialize=["n", "pos"])
def _full_batch_kernel(
    k_cache, v_cache, key, value, block_idx, pos, n,
    kc_b: tl.constexpr, kc_h: tl.constexpr, kc_t: tl.constexpr, kc_d: tl.constexpr,
    vc_b: tl.constexpr, vc_h: tl.constexpr, vc_t: tl.constexpr, vc_d: tl.constexpr,
    k_r, k_h, k_d,
    v_r, v_h, v_d,
    TILE_N: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    tokens, exist = _token_tile(n, TILE_N)
    blocks = tl.load(block_idx + tokens, exist, other=0)
    _copy_tokens(
        k_cache, v_cache, key, value,
        tokens, blocks, tl.full((TILE_N,), pos, tl.int64), exist,
        kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
        k_r, k_h, k_d, v_r, v_h, v_d,
        H, D, TILE_H, TILE_D,
    )  # fmt: skip


@kernel(_IDENTITY_POS_TRAFFIC, do_not_specialize=["n"])
def _identity_pos_kernel(
    k_cache, v_cache, key, value, block_idx, positions, n,
    kc_b: tl.constexpr, kc_h: tl.constexpr, kc_t: tl.constexpr, kc_d: tl.constexpr,
    vc_b: tl.constexpr, vc_h: tl.constexpr, vc_t: tl.constexpr, vc_d: tl.constexpr,
    k_r, k_h, k_d,
    v_r, v_h, v_d,
    TILE_N: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    tokens, exist = _token_tile(n, TILE_N)
    blocks = tl.load(block_idx + tokens, exist, other=0)
    _copy_tokens(
        k_cache, v_cache, key, value,
        tokens, blocks, tl.load(positions + tokens, exist, other=0), exist,
        kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
        k_r, k_h, k_d, v_r, v_h, v_d,
        H, D, TILE_H, TILE_D,
    )  # fmt: skip


@kernel(_GATHER_TRAFFIC, do_not_specialize=["n"])
def _gather_kernel(
    k_cache, v_cache, key, value, block_idx, positions, rows, n,
    kc_b: tl.constexpr, kc_h: tl.constexpr, kc_t: tl.constexpr, kc_d: tl.constexpr,
    vc_b: tl.constexpr, vc_h: tl.constexpr, vc_t: tl.constexpr, vc_d: tl.constexpr,
    k_r, k_h, k_d,
    v_r, v_h, v_d,
    TILE_N: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    tokens, exist = _token_tile(n, TILE_N)
    blocks = tl.load(block_idx + tokens, exist, other=0)
    _copy_tokens(
        k_cache, v_cache, key, value,
        tl.load(rows + tokens, exist, other=0), blocks,
        tl.load(positions + tokens, exist, other=0), exist,
        kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
        k_r, k_h, k_d, v_r, v_h, v_d,
        H, D, TILE_H, TILE_D,
    )  # fmt: skip


def _launch(
    append: TritonKernel,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor,
    value: Tensor,
    block_idx: Tensor,
    *where: Tensor | int,
) -> None:
    """Write tokens to blocks; ``where`` are positions, then rows, as the kernel needs."""
    num_tokens = block_idx.shape[0]
    tile_n = 1
    if is_interpreted():
        tile_n = min(1 << (num_tokens - 1).bit_length(), _INTERPRETED_TOKENS)
    fixed, tiles_of_heads = _fixed_launch(
        append, k_cache.stride(), v_cache.stride(), key.stride(), value.stride(),
        *key.shape[1:], tile_n,
    )  # fmt: skip
    grid = -(-num_tokens // tile_n), tiles_of_heads, 1
    fixed(grid, k_cache, v_cache, key, value, block_idx, *where, num_tokens)


@lru_cache(512)
def _fixed_launch(
    append: TritonKernel,
    k_cache: Strides,
    v_cache: Strides,
    key: Strides,
    value: Strides,
    num_heads: int,
    head_dim: int,
    tile_n: int,
) -> tuple[FixedLaunch, int]:
    """Return a launch for tensors of these strides, and its number of tiles of heads."""
    tile_h, tile_d, num_warps = _tile(num_heads, head_dim)
    fixed = append.with_fixed(
        num_warps, **strides("kc_bhtd", k_cache), **strides("vc_bhtd", v_cache),
        **strides("k_rhd", key), **strides("v_rhd", value),
        TILE_N=tile_n, H=num_heads, D=head_dim, TILE_H=tile_h, TILE_D=tile_d,
    )  # fmt: skip
    return fixed, -(-num_heads // tile_h)


def _tile(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Choose the heads and the elements of each that a token's tile covers, and its warps."""
    tile_d = 1 << (head_dim - 1).bit_length()
    tile_h = min(1 << (num_heads - 1).bit_length(), max(1, _TILE // tile_d))
    return tile_h, tile_d, min(4, max(1, tile_h * tile_d // 1024))


launch_full_batch = partial(_launch, _full_batch_kernel)
launch_identity_pos = partial(_launch, _identity_pos_kernel)
launch_gather = partial(_launch, _gather_kernel)


def kv_append_triton(
    *,
    k_cache_layer: Tensor,
    v_cache_layer: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    batch_idx: Tensor,
    block_idx: Tensor,
    pos: Tensor,
) -> None:
    """Write row ``batch_idx[i]`` of the inputs to ``pos[i]`` of block ``block_idx[i]``.

    Caches are ``[blocks, heads, block_size, head_dim]``, inputs ``[rows, heads, head_dim]``,
    indices one-dimensional, int32 or int64.
    """
    caches, new = (k_cache_layer, v_cache_layer), (key_new, value_new)
    _append(launch_gather, caches, new, block_idx, pos, batch_idx)


def kv_append_triton_identity_pos(
    *,
    k_cache_layer: Tensor,
    v_cache_layer: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    block_idx: Tensor,
    pos: Tensor,
) -> None:
    """Write every row ``i`` of the inputs to ``pos[i]`` of block ``block_idx[i]``."""
    caches, new = (k_cache_layer, v_cache_layer), (key_new, value_new)
    _append(launch_identity_pos, caches, new, block_idx, pos)


def kv_append_triton_full_batch(
    *,
    k_cache_layer: Tensor,
    v_cache_layer: Tensor,
    key_new: Tensor,
    value_new: Tensor,
    block_idx: Tensor,
    pos: int,
) -> None:
    """Write every row ``i`` of the inputs to ``pos`` of block ``block_idx[i]``."""
    caches, new = (k_cache_layer, v_cache_layer), (key_new, value_new)
    _append(launch_full_batch, caches, new, block_idx, pos)


def _append(launch: Callable[..., None], caches: _Pair, new: _Pair, *where: Tensor | int) -> None:
    """Raise unless all arguments are right; then launch. ``where`` are blocks, positions, rows."""
    k_cache, v_cache = caches
    check_cache_pair(k_cache, v_cache, dims=4)
    num_blocks, heads, block_size, head_dim = k_cache.shape
    for name, tensor in zip(("key_new", "value_new"), new, strict=True):
        if tensor.dim() != 3 or tensor.shape[1:] != (heads, head_dim):
            shape = tuple(tensor.shape)
            raise BadArgument(f"{name} must be [rows, {heads}, {head_dim}], not {shape}")
        if tensor.device != k_cache.device:
            raise BadArgument(f"{name} is on {tensor.device} and the cache on {k_cache.device}")
        if not tensor.is_floating_point():
            raise BadArgument(f"{name} must be of floats, not {tensor.dtype}")
    rows, value_rows = (len(tensor) for tensor in new)
    if rows != value_rows:
        raise BadArgument(f"key_new has {rows} rows and value_new {value_rows}")
    indices = [index for index in where if isinstance(index, Tensor)]
    count = rows if len(where) < 3 else indices[-1].numel()
    bounds = {"block_idx": num_blocks, "pos": block_size, "batch_idx": rows}
    for (name, bound), index in zip(bounds.items(), where, strict=False):
        if isinstance(index, Tensor):
            check_index(name, index, k_cache, count, bound)
        elif not 0 <= index < bound:
            raise BadArgument(f"{name} must lie in 0..{bound - 1}, not {index}")
    if not count:
        return
    if len({index.dtype for index in indices}) > 1:  # the launcher checks only one of them
        indices = [index.long() for index in indices]
    indices = [index.contiguous() for index in indices]
    key, value = (tensor.to(k_cache.dtype) for tensor in new)
    launch(k_cache, v_cache, key, value, *indices, *where[len(indices) :])
