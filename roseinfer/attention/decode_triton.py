"""Decode attention: one query token for each sequence, over blocks wherever they lie.

A program takes one sequence, one KV head with all query heads that share it, and one part
of the context; where there are several parts a second kernel combines them. What lies in a
block behind the sequence's last token is never used: its scores are masked, and its values
are replaced by zero before they are weighted, since zero times NaN is NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from roseinfer.attention.combine_triton import LOG2_E, combine_kernel
from roseinfer.errors import BadArgument
from roseinfer.kv.triton_launch import on_device

_PART = 256
"""Tokens of context that one program takes."""
_TILE = 8192
"""Most products of query heads, tokens and dimensions that a program holds at a time."""


@triton.jit
def _partial_kernel(
    query, k_cache, v_cache, tables, lengths, out, partial, weights_max, weights_sum,
    scale,
    q_s, q_h, q_d, o_s, o_h, o_d,
    kc_b, kc_h, kc_t, kc_d,
    vc_b, vc_h, vc_t, vc_d,
    table_width, parts,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TILE_G: tl.constexpr, TILE_D: tl.constexpr, TILE_T: tl.constexpr, PART: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    length = tl.load(lengths + sequence)
    members = tl.arange(0, TILE_G)
    dims = tl.arange(0, TILE_D)
    q_heads = kv_head * GROUP + members
    q_inside = (members[:, None] < GROUP) & (dims[None, :] < D)
    q = tl.load(
        query + sequence * q_s + q_heads[:, None] * q_h + dims[None, :] * q_d, q_inside, other=0.0
    ).to(tl.float32)
    top = tl.full((TILE_G,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_G,), tl.float32)
    sums = tl.zeros((TILE_G, TILE_D), tl.float32)
    begin = part * PART
    # The bounds are no tensors, which not every version of Triton's interpreter can count to.
    for at in range(0, PART, TILE_T):
        tokens = begin + at + tl.arange(0, TILE_T)
        stored = tokens < tl.minimum(begin + PART, length)
        blocks = tl.load(tables + sequence * table_width + tokens // BLOCK, stored, other=0).to(
            tl.int64
        )
        slots = (tokens % BLOCK).to(tl.int64)
        inside = stored[:, None] & (dims[None, :] < D)
        k = tl.load(
            k_cache + blocks[:, None] * kc_b + kv_head * kc_h + slots[:, None] * kc_t
            + dims[None, :] * kc_d, inside, other=0.0,
        ).to(tl.float32)  # fmt: skip
        v = tl.load(
            v_cache + blocks[:, None] * vc_b + kv_head * vc_h + slots[:, None] * vc_t
            + dims[None, :] * vc_d, inside, other=0.0,
        ).to(tl.float32)  # fmt: skip
        scores = tl.sum(q[:, None, :] * k[None, :, :], 2) * scale
        scores = tl.where(stored[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # Nothing stored up to here: infinity less infinity is NaN.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - finite)
        weights = tl.exp2(scores - finite[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], 1)
        top = higher
    if WHOLE:
        tl.store(
            out + sequence * o_s + q_heads[:, None] * o_h + dims[None, :] * o_d,
            (sums / total[:, None]).to(out.dtype.element_ty), q_inside,
        )  # fmt: skip
    else:
        row = (sequence * Q_HEADS + q_heads) * parts + part
        tl.store(weights_max + row, top, members < GROUP)
        tl.store(weights_sum + row, total, members < GROUP)
        tl.store(partial + row[:, None] * D + dims[None, :], sums, q_inside)


_INTERPRETED = not isinstance(_partial_kernel, triton.runtime.JITFunction)


def paged_attention_decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    longest: int,
) -> torch.Tensor:
    """Attention of one token a sequence, ``[sequences, q_heads, head_dim]``.

    ``k_cache`` and ``v_cache`` are one layer, ``[blocks, kv_heads, block_size, head_dim]``;
    row ``i`` of ``tables`` lists sequence ``i``'s blocks and ``lengths[i]`` counts its
    tokens, the query's own included. ``longest`` bounds the lengths, so that the number of
    programs is known without asking the device.
    """
    sequences, q_heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    if q_heads % kv_heads or k_cache.shape[3] != head_dim:
        raise BadArgument(
            f"{q_heads} query heads of {head_dim} do not fit {kv_heads} KV heads of "
            f"{k_cache.shape[3]}"
        )
    parts = max(1, -(-longest // _PART))
    rows = sequences * q_heads * parts if parts > 1 else 0
    partial = query.new_empty((rows, head_dim), dtype=torch.float32)
    weights_max, weights_sum = query.new_empty((2, rows), dtype=torch.float32)
    out = torch.empty_like(query)
    group = q_heads // kv_heads
    tile_g, tile_d = 1 << (group - 1).bit_length(), max(16, 1 << (head_dim - 1).bit_length())
    tile_t = _PART if _INTERPRETED else min(_PART, max(16, _TILE // (tile_g * tile_d)))
    with on_device(query.device):
        _partial_kernel[(sequences, kv_heads, parts)](
            query, k_cache, v_cache, tables, lengths, out, partial, weights_max, weights_sum,
            scale * LOG2_E, *query.stride(), *out.stride(), *k_cache.stride(), *v_cache.stride(),
            tables.stride(0), parts,
            q_heads, group, head_dim, block_size, tile_g, tile_d, tile_t, _PART, parts == 1,
        )  # fmt: skip
        if parts > 1:
            combine_kernel[(sequences, q_heads)](
                partial, weights_max, weights_sum, out, parts, *out.stride(),
                q_heads, head_dim, 1 << (parts - 1).bit_length(), tile_d,
            )  # fmt: skip
    return out
