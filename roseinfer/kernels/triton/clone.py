"""The copy-on-write kernel copies whole blocks of all layers of a group in one launch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton.language as tl
from torch import Tensor

from roseinfer.errors import BadArgument
from roseinfer.kernels.kernel import kernel, numel, strides
from roseinfer.kernels.runtime import check_cache_pair, check_index

if TYPE_CHECKING:
    from roseinfer.kernels.kernel import FixedLaunch, TrafficTable

_CHUNK = 4096
"""Largest number of elements of a block that a program copies."""


def _block_elements(source: Tensor, k_to: Tensor, H: int, T: int, D: int) -> int:
    return source.numel() * len(k_to) * H * T * D


_TRAFFIC: TrafficTable = {
    **dict.fromkeys(("k_from", "v_from", "k_to", "v_to"), _block_elements),
    **dict.fromkeys(("source", "target"), numel),
}


@kernel(_TRAFFIC)
def _clone_kernel(
    k_from, v_from, k_to, v_to, source, target,
    kf_l: tl.constexpr, kf_b: tl.constexpr, kf_h: tl.constexpr,
    kf_t: tl.constexpr, kf_d: tl.constexpr,
    vf_l: tl.constexpr, vf_b: tl.constexpr, vf_h: tl.constexpr,
    vf_t: tl.constexpr, vf_d: tl.constexpr,
    kt_l: tl.constexpr, kt_b: tl.constexpr, kt_h: tl.constexpr,
    kt_t: tl.constexpr, kt_d: tl.constexpr,
    vt_l: tl.constexpr, vt_b: tl.constexpr, vt_h: tl.constexpr,
    vt_t: tl.constexpr, vt_d: tl.constexpr,
    H: tl.constexpr, T: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    copy = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = element < H * T * D
    h = (element // (T * D)).to(tl.int64)
    t = (element // D % T).to(tl.int64)
    d = (element % D).to(tl.int64)
    old = tl.load(source + copy).to(tl.int64)
    new = tl.load(target + copy).to(tl.int64)
    k = tl.load(k_from + layer * kf_l + old * kf_b + h * kf_h + t * kf_t + d * kf_d, inside)
    v = tl.load(v_from + layer * vf_l + old * vf_b + h * vf_h + t * vf_t + d * vf_d, inside)
    tl.store(k_to + layer * kt_l + new * kt_b + h * kt_h + t * kt_t + d * kt_d, k, inside)
    tl.store(v_to + layer * vt_l + new * vt_b + h * vt_h + t * vt_t + d * vt_d, v, inside)


def launch_clone(
    k_from: Tensor, v_from: Tensor, k_to: Tensor, v_to: Tensor, source: Tensor, target: Tensor
) -> None:
    """Copy blocks ``source`` of the first pair of caches to ``target`` of the second."""
    layers, _, *block = k_to.shape
    fixed, chunks = _fixed_launch(
        k_from.stride(), v_from.stride(), k_to.stride(), v_to.stride(), *block
    )
    fixed((source.shape[0], layers, chunks), k_from, v_from, k_to, v_to, source, target)


@lru_cache(512)
def _fixed_launch(
    k_from: tuple[int, ...],
    v_from: tuple[int, ...],
    k_to: tuple[int, ...],
    v_to: tuple[int, ...],
    heads: int,
    block_size: int,
    head_dim: int,
) -> tuple[FixedLaunch, int]:
    """Return a launch for caches of these strides, and its number of chunks of a block."""
    elements = heads * block_size * head_dim
    chunk = min(_CHUNK, 1 << (elements - 1).bit_length())
    fixed = _clone_kernel.with_fixed(
        **strides("kf_lbhtd", k_from), **strides("vf_lbhtd", v_from),
        **strides("kt_lbhtd", k_to), **strides("vt_lbhtd", v_to),
        H=heads, T=block_size, D=head_dim, CHUNK=chunk,
    )  # fmt: skip
    return fixed, -(-elements // chunk)


def kv_clone_triton(*, k_cache: Tensor, v_cache: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy block ``source[i]`` to block ``target[i]``, all at once, in every layer.

    Caches are ``[layers, blocks, heads, block_size, head_dim]``, or one layer without the
    first dimension. A block may be the target of one copy and the source of another, which then
    copies its old content.
    """
    if k_cache.dim() == 4 and v_cache.dim() == 4:
        k_cache, v_cache = k_cache.unsqueeze(0), v_cache.unsqueeze(0)
    check_cache_pair(k_cache, v_cache, dims=5)
    num_blocks = k_cache.shape[1]
    check_index("source", source, k_cache, source.numel(), num_blocks)
    check_index("target", target, k_cache, source.numel(), num_blocks)
    if not source.numel():
        return
    source, target = source.long().contiguous(), target.long().contiguous()
    if len(set(target.tolist())) < target.numel():
        raise BadArgument("target has a block twice: its final content would be undefined")
    if not torch.isin(source, target).any():
        launch_clone(k_cache, v_cache, k_cache, v_cache, source, target)
        return
    before = torch.arange(source.numel(), device=source.device)
    launch_clone(
        k_cache.index_select(1, source), v_cache.index_select(1, source),
        k_cache, v_cache, before, target,
    )  # fmt: skip
