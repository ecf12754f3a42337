"""Attention of several new tokens per sequence: of whole prompts, and of chunks of longer ones.

A program attends for consecutive tokens of one sequence and one KV head with the query heads that
share it. It goes through the sequence's blocks up to its last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from roseinfer.errors import BadArgument
from roseinfer.kernels.kernel import kernel, numel, strides
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.kernels.triton.linear import dot
from roseinfer.kernels.triton.softmax import (
    PER_HEAD_TRAFFIC,
    empty_softmax,
    init_softmax,
    merge_softmax,
    part_begin,
    part_index,
    row_weight_sum,
    score_arguments,
    tile_of_tokens,
    update_softmax,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.kernels.kernel import TrafficTable
    from roseinfer.layer_traits import LayerTraits

_STAGES = 2
"""Tiles of tokens in flight at once."""


def _key_ranges(
    sequences: Tensor, counts: Tensor, positions: Tensor, window: int
) -> list[tuple[int, int]]:
    """Return the begin and the end of the keys that each sequence's tiles attend to."""
    ranges: dict[int, tuple[int, int]] = {}
    columns = (each.tolist() for each in (sequences, counts, positions))
    for sequence, count, position in zip(*columns, strict=True):
        first = max(0, position - window + 1) if window else 0
        begin, end = ranges.get(sequence, (first, 0))
        ranges[sequence] = min(begin, first), max(end, position + count)
    return [*ranges.values()]


def _key_elements(
    k_cache: Tensor, sequences: Tensor, counts: Tensor, positions: Tensor, WINDOW: int = 0
) -> Callable[[], int]:
    """Count every sequence's keys up to its last new token, once for all programs."""
    of_token = k_cache.shape[1] * k_cache.shape[3]
    return lambda: (
        of_token
        * sum(end - begin for begin, end in _key_ranges(sequences, counts, positions, WINDOW))
    )


def _table_elements(
    k_cache: Tensor, sequences: Tensor, counts: Tensor, positions: Tensor, WINDOW: int = 0
) -> Callable[[], int]:
    block = k_cache.shape[2]
    return lambda: sum(
        (end - 1) // block - begin // block + 1
        for begin, end in _key_ranges(sequences, counts, positions, WINDOW)
    )


CHUNK_TRAFFIC: TrafficTable = {
    **dict.fromkeys(("query", "out", "sequences", "rows", "counts", "positions"), numel),
    "tables": _table_elements,
    "k_cache": _key_elements,
    "v_cache": _key_elements,
}
"""Traffic of a kernel without traits that have a number per head."""


@kernel({**CHUNK_TRAFFIC, **PER_HEAD_TRAFFIC}, fp_fusion=False)
def _chunk_kernel(
    query, k_cache, v_cache, tables, sequences, rows, counts, positions, out,
    scale, cap, sinks, slopes,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKING: tl.constexpr, SLOPED: tl.constexpr,
    q_s, q_h, q_d, o_s, o_h, o_d,
    kc_b, kc_h, kc_t, kc_d,
    vc_b, vc_h, vc_t, vc_d,
    table_width,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_G: tl.constexpr, TILE_D: tl.constexpr, TILE_T: tl.constexpr,
    LIMIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    table = tables + tl.load(sequences + tile).to(tl.int64) * table_width
    row = tl.load(rows + tile).to(tl.int64)
    count = tl.load(counts + tile).to(tl.int32)
    position = tl.load(positions + tile).to(tl.int32)
    M: tl.constexpr = TILE_Q * TILE_G
    m = tl.arange(0, M)
    token, member = m // TILE_G, m % TILE_G
    dims = tl.arange(0, TILE_D)
    d_inside = (dims < D)[None, :]
    real = member < GROUP
    there = (token < count) & real
    head = kv_head * GROUP + member
    q = tl.load(
        query + (row + token)[:, None] * q_s + head[:, None] * q_h + dims[None, :] * q_d,
        there[:, None] & d_inside, other=0.0,
    )  # fmt: skip
    k_head, v_head = k_cache + kv_head * kc_h, v_cache + kv_head * vc_h

    TILE_O: tl.constexpr = max(TILE_Q, 16)
    own = tl.arange(0, TILE_O)
    k_own = _load_tokens(
        k_head, table, position + own, own < count, dims, kc_b, kc_t, kc_d, BLOCK, D
    )
    products = tl.where(own[None, :] == token[:, None], dot(q, tl.trans(k_own)), 0.0)
    v_own = _load_tokens(v_head, table, position + token, there, dims, vc_b, vc_t, vc_d, BLOCK, D)
    all_top, all_total, all_sums = init_softmax(
        tl.sum(products, 1), v_own.to(tl.float32), scale, cap, sinks, slopes, head, real,
        CAPPED, SLOPED, SINKING,
    )  # fmt: skip

    # The tile's first token attends furthest back; its last one attends to those before it.
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
    end = position + count - 1
    part = part_index(first)
    ends = part_begin(part + 1)
    top, total, sums = empty_softmax(M, TILE_D)
    begin = first // TILE_T * TILE_T
    if not WINDOW and not LIMIT:
        # Keys that all of the tile's tokens attend to need no mask.
        for at in tl.range(begin, position // TILE_T * TILE_T, TILE_T, num_stages=STAGES):
            if at == ends:
                all_top, all_total, all_sums = merge_softmax(
                    all_top, all_total, all_sums, top, row_weight_sum(total), sums
                )
                top, total, sums = empty_softmax(M, TILE_D)
                part += 1
                ends = part_begin(part + 1)
            tokens = at + tl.arange(0, TILE_T)
            every = tokens >= 0
            k = _load_tile(k_head, table, at, end, every, dims, kc_b, kc_t, kc_d, BLOCK, D, TILE_T)
            v = _load_tile(v_head, table, at, end, every, dims, vc_b, vc_t, vc_d, BLOCK, D, TILE_T)
            distance = (position + token)[:, None] - tokens[None, :]
            top, total, sums = update_softmax(
                q, k, v, distance, distance.to(tl.float32), top, total, sums, scale, cap, slopes,
                head, real, False, CAPPED, SLOPED,
            )  # fmt: skip
        begin = position // TILE_T * TILE_T
    # Not every version of Triton's interpreter accepts a tensor as the end of a range.
    for at in tl.range(0 if LIMIT else begin, LIMIT if LIMIT else end, TILE_T, num_stages=STAGES):
        if at == ends:
            all_top, all_total, all_sums = merge_softmax(
                all_top, all_total, all_sums, top, row_weight_sum(total), sums
            )
            top, total, sums = empty_softmax(M, TILE_D)
            part += 1
            ends = part_begin(part + 1)
        tokens = at + tl.arange(0, TILE_T)
        stored = (tokens >= first) & (tokens < end)
        k = _load_tile(k_head, table, at, end, stored, dims, kc_b, kc_t, kc_d, BLOCK, D, TILE_T)
        v = _load_tile(v_head, table, at, end, stored, dims, vc_b, vc_t, vc_d, BLOCK, D, TILE_T)
        distance = (position + token)[:, None] - tokens[None, :]
        seen = distance > 0
        if WINDOW:
            seen = seen & (distance < WINDOW)
        top, total, sums = update_softmax(
            q, k, v, seen, distance.to(tl.float32), top, total, sums, scale, cap, slopes,
            head, real, True, CAPPED, SLOPED,
        )  # fmt: skip
    all_top, all_total, all_sums = merge_softmax(
        all_top, all_total, all_sums, top, row_weight_sum(total), sums
    )
    tl.store(
        out + (row + token)[:, None] * o_s + head[:, None] * o_h + dims[None, :] * o_d,
        (all_sums / all_total[:, None]).to(out.dtype.element_ty), there[:, None] & d_inside,
    )  # fmt: skip


@triton.jit
def _load_tokens(
    cache, table, tokens, inside, dims, c_b, c_t, c_d, BLOCK: tl.constexpr, D: tl.constexpr
):
    """Load the stored keys or values of some tokens for one head, ``[tokens, dims]``."""
    blocks = tl.load(table + tokens // BLOCK, inside, other=0).to(tl.int64)
    slots = (tokens % BLOCK).to(tl.int64)
    return tl.load(
        cache + blocks[:, None] * c_b + slots[:, None] * c_t + dims[None, :] * c_d,
        inside[:, None] & (dims < D)[None, :], other=0.0,
    )  # fmt: skip


@triton.jit
def _load_tile(
    cache, table, begin, end, inside, dims, c_b, c_t, c_d,
    BLOCK: tl.constexpr, D: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """Load a tile of tokens before ``end``. Where tiles divide blocks, it is in one block."""
    at = tl.arange(0, TILE_T)
    if BLOCK % TILE_T:
        return _load_tokens(cache, table, begin + at, inside, dims, c_b, c_t, c_d, BLOCK, D)
    block = tl.load(table + begin // BLOCK, begin < end, other=0).to(tl.int64)
    first = cache + block * c_b + (begin % BLOCK) * c_t
    return tl.load(
        first + at[:, None] * c_t + dims[None, :] * c_d,
        inside[:, None] & (dims < D)[None, :], other=0.0,
    )  # fmt: skip


def paged_attention_chunks(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    tiles: tuple[Tensor, ...],
    traits: LayerTraits,
    *,
    tile_q: int,
    longest: int,
) -> Tensor:
    """Compute the attention of ``[tokens, q_heads, head_dim]``, which are stored already.

    The caches are one layer, and row ``i`` of ``tables`` lists sequence ``i``'s blocks. ``tiles``
    are columns: for each program its sequence, the first of its tokens in ``query``, their number
    (``tile_q`` or fewer), and that token's position. All positions are below ``longest``.
    """
    _, q_heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    if q_heads % kv_heads or k_cache.shape[3] != head_dim:
        raise BadArgument(
            f"{q_heads} query heads of {head_dim} do not fit {kv_heads} KV heads of "
            f"{k_cache.shape[3]}"
        )
    out = query.new_empty(query.shape)
    group = q_heads // kv_heads
    tile_g, tile_d = 1 << (group - 1).bit_length(), max(16, 1 << (head_dim - 1).bit_length())
    sequences, rows, counts, positions = tiles
    _chunk_kernel.launch(
        (sequences.shape[0], kv_heads), **score_arguments(traits, query),
        query=query, k_cache=k_cache, v_cache=v_cache, tables=tables, out=out,
        sequences=sequences, rows=rows, counts=counts, positions=positions,
        **strides("q_shd", query.stride()), **strides("o_shd", out.stride()),
        **strides("kc_bhtd", k_cache.stride()), **strides("vc_bhtd", v_cache.stride()),
        table_width=tables.stride(0), GROUP=group, D=head_dim, BLOCK=block_size,
        TILE_Q=tile_q, TILE_G=tile_g, TILE_D=tile_d,
        TILE_T=tile_of_tokens(tile_d * k_cache.element_size()),
        LIMIT=longest if is_interpreted() else 0, STAGES=_STAGES,
    )  # fmt: skip
    return out
