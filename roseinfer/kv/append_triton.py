"""The append kernels: new keys and values to their slots, one program per token.

All three kernels differ only in where a token's block, position and source row come from.
A program moves a tile of heads times head_dim for K and for V. Offsets are 64-bit; cache
and inputs may have any strides.

The ``kv_append_triton*`` functions check their arguments, which waits for the device; the
``launch_*`` functions trust them and are what the block manager calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from roseinfer.errors import BadArgument
from roseinfer.kv.triton_launch import KernelLauncher, check_cache_pair, check_index

if TYPE_CHECKING:
    import torch

_TILE = 4096
"""Most elements of one K or V tile; more heads than fit are split over programs."""


@triton.jit
def _move_token(
    k_cache, v_cache, key, value,
    row, block, position,
    kc_b, kc_h, kc_t, kc_d,
    vc_b, vc_h, vc_t, vc_d,
    k_r, k_h, k_d,
    v_r, v_h, v_d,
    H: tl.constexpr, D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    heads = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)[:, None]
    dims = tl.arange(0, TILE_D)[None, :]
    inside = (heads < H) & (dims < D)
    heads = heads.to(tl.int64)
    dims = dims.to(tl.int64)
    row = row.to(tl.int64)
    block = block.to(tl.int64)
    position = position.to(tl.int64)
    k = tl.load(key + row * k_r + heads * k_h + dims * k_d, inside)
    v = tl.load(value + row * v_r + heads * v_h + dims * v_d, inside)
    k_slot = k_cache + block * kc_b + position * kc_t
    v_slot = v_cache + block * vc_b + position * vc_t
    tl.store(k_slot + heads * kc_h + dims * kc_d, k, inside)
    tl.store(v_slot + heads * vc_h + dims * vc_d, v, inside)


@triton.jit(do_not_specialize=["pos"])
def _full_batch_kernel(
    k_cache, v_cache, key, value, block_idx,
    pos,
    kc_b: tl.constexpr, kc_h: tl.constexpr, kc_t: tl.constexpr, kc_d: tl.constexpr,
    vc_b: tl.constexpr, vc_h: tl.constexpr, vc_t: tl.constexpr, vc_d: tl.constexpr,
    k_r, k_h, k_d,
    v_r, v_h, v_d,
    H: tl.constexpr, D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    _move_token(
        k_cache, v_cache, key, value,
        token, tl.load(block_idx + token), tl.full((), pos, tl.int64),
        kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
        k_r, k_h, k_d, v_r, v_h, v_d,
        H, D, TILE_H, TILE_D,
    )  # fmt: skip


@triton.jit
def _identity_pos_kernel(
    k_cache, v_cache, key, value, positions, block_idx,
    kc_b: tl.constexpr, kc_h: tl.constexpr, kc_t: tl.constexpr, kc_d: tl.constexpr,
    vc_b: tl.constexpr, vc_h: tl.constexpr, vc_t: tl.constexpr, vc_d: tl.constexpr,
    k_r, k_h, k_d,
    v_r, v_h, v_d,
    H: tl.constexpr, D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    _move_token(
        k_cache, v_cache, key, value,
        token, tl.load(block_idx + token), tl.load(positions + token),
        kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
        k_r, k_h, k_d, v_r, v_h, v_d,
        H, D, TILE_H, TILE_D,
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    k_cache, v_cache, key, value, rows, positions, block_idx,
    kc_b: tl.constexpr, kc_h: tl.constexpr, kc_t: tl.constexpr, kc_d: tl.constexpr,
    vc_b: tl.constexpr, vc_h: tl.constexpr, vc_t: tl.constexpr, vc_d: tl.constexpr,
    k_r, k_h, k_d,
    v_r, v_h, v_d,
    H: tl.constexpr, D: tl.constexpr, TILE_H: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    _move_token(
        k_cache, v_cache, key, value,
        tl.load(rows + token), tl.load(block_idx + token), tl.load(positions + token),
        kc_b, kc_h, kc_t, kc_d, vc_b, vc_h, vc_t, vc_d,
        k_r, k_h, k_d, v_r, v_h, v_d,
        H, D, TILE_H, TILE_D,
    )  # fmt: skip


_full_batch = KernelLauncher(_full_batch_kernel)
_identity_pos = KernelLauncher(_identity_pos_kernel)
_gather = KernelLauncher(_gather_kernel)


def is_interpreted() -> bool:
    """Whether these kernels run under Triton's interpreter instead of being compiled."""
    return not isinstance(_gather_kernel, triton.runtime.JITFunction)


def _launch(
    launcher: KernelLauncher,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    indices: tuple[torch.Tensor, ...],
    scalars: tuple[int, ...],
) -> None:
    _, num_heads, head_dim = key.shape
    tile_d = 1 << (head_dim - 1).bit_length()
    tile_h = min(1 << (num_heads - 1).bit_length(), max(1, _TILE // tile_d))
    launcher(
        (indices[-1].shape[0], -(-num_heads // tile_h), 1),
        (k_cache, v_cache, key, value, *indices),
        scalars,
        (
            *k_cache.stride(), *v_cache.stride(), *key.stride(), *value.stride(),
            num_heads, head_dim, tile_h, tile_d,
        ),
        num_warps=min(4, max(1, tile_h * tile_d // 1024)),
    )  # fmt: skip


def launch_full_batch(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_idx: torch.Tensor,
    pos: int,
) -> None:
    _launch(_full_batch, k_cache, v_cache, key, value, (block_idx,), (pos,))


def launch_identity_pos(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_idx: torch.Tensor,
    pos: torch.Tensor,
) -> None:
    _launch(_identity_pos, k_cache, v_cache, key, value, (pos, block_idx), ())


def launch_gather(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_idx: torch.Tensor,
    pos: torch.Tensor,
    batch_idx: torch.Tensor,
) -> None:
    _launch(_gather, k_cache, v_cache, key, value, (batch_idx, pos, block_idx), ())


def kv_append_triton(
    *,
    k_cache_layer: torch.Tensor,
    v_cache_layer: torch.Tensor,
    key_new: torch.Tensor,
    value_new: torch.Tensor,
    batch_idx: torch.Tensor,
    block_idx: torch.Tensor,
    pos: torch.Tensor,
) -> None:
    """Write row ``batch_idx[i]`` of the inputs to ``pos[i]`` of block ``block_idx[i]``.

    Caches are ``[blocks, heads, block_size, head_dim]``, inputs ``[rows, heads, head_dim]``,
    indices one-dimensional, int32 or int64.
    """
    key, value = _checked(k_cache_layer, v_cache_layer, key_new, value_new)
    count = batch_idx.numel()
    check_index("batch_idx", batch_idx, k_cache_layer, count, key.shape[0])
    check_index("block_idx", block_idx, k_cache_layer, count, k_cache_layer.shape[0])
    check_index("pos", pos, k_cache_layer, count, k_cache_layer.shape[2])
    if count:
        launch_gather(k_cache_layer, v_cache_layer, key, value, *_alike(block_idx, pos, batch_idx))


def kv_append_triton_identity_pos(
    *,
    k_cache_layer: torch.Tensor,
    v_cache_layer: torch.Tensor,
    key_new: torch.Tensor,
    value_new: torch.Tensor,
    block_idx: torch.Tensor,
    pos: torch.Tensor,
) -> None:
    """Write every row ``i`` of the inputs to ``pos[i]`` of block ``block_idx[i]``."""
    key, value = _checked(k_cache_layer, v_cache_layer, key_new, value_new)
    count = key.shape[0]
    check_index("block_idx", block_idx, k_cache_layer, count, k_cache_layer.shape[0])
    check_index("pos", pos, k_cache_layer, count, k_cache_layer.shape[2])
    if count:
        launch_identity_pos(k_cache_layer, v_cache_layer, key, value, *_alike(block_idx, pos))


def kv_append_triton_full_batch(
    *,
    k_cache_layer: torch.Tensor,
    v_cache_layer: torch.Tensor,
    key_new: torch.Tensor,
    value_new: torch.Tensor,
    block_idx: torch.Tensor,
    pos: int,
) -> None:
    """Write every row ``i`` of the inputs to ``pos`` of block ``block_idx[i]``."""
    key, value = _checked(k_cache_layer, v_cache_layer, key_new, value_new)
    block_size = k_cache_layer.shape[2]
    if not 0 <= pos < block_size:
        raise BadArgument(f"pos must lie in 0..{block_size - 1}, not {pos}")
    check_index("block_idx", block_idx, k_cache_layer, key.shape[0], k_cache_layer.shape[0])
    if key.shape[0]:
        launch_full_batch(k_cache_layer, v_cache_layer, key, value, block_idx.contiguous(), pos)


def _checked(
    k_cache: torch.Tensor, v_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs in the cache's dtype, once everything about them fits."""
    check_cache_pair(k_cache, v_cache, dims=4)
    _, heads, _, head_dim = k_cache.shape
    for name, new in (("key_new", key), ("value_new", value)):
        if new.dim() != 3 or new.shape[1:] != (heads, head_dim):
            raise BadArgument(f"{name} must be [rows, {heads}, {head_dim}], not {tuple(new.shape)}")
        if new.device != k_cache.device:
            raise BadArgument(f"{name} is on {new.device} and the cache on {k_cache.device}")
    if key.shape != value.shape:
        raise BadArgument(f"key_new has {key.shape[0]} rows and value_new {value.shape[0]}")
    return key.to(k_cache.dtype), value.to(k_cache.dtype)


def _alike(*indices: torch.Tensor) -> list[torch.Tensor]:
    """Contiguous indices of one dtype, as the launcher's memory of compiled forms assumes."""
    dtype = indices[0].dtype
    same = all(index.dtype == dtype for index in indices)
    return [index.contiguous() if same else index.long().contiguous() for index in indices]
