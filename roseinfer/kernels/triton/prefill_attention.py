"""Attention of several new tokens a sequence: of whole prompts, and of chunks of longer ones.

A program takes some consecutive tokens of one sequence and one KV head with the query heads
that share it, and goes through the sequence's blocks, wherever they lie, up to its last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from roseinfer.errors import BadArgument
from roseinfer.kernels.runtime import is_interpreted, launch
from roseinfer.kernels.traffic import moves, taken
from roseinfer.kernels.triton.linear import dot
from roseinfer.kernels.triton.softmax import (
    fold,
    nothing_seen,
    numbers_by_head,
    of_row,
    own_token,
    part_begin,
    part_of,
    score_arguments,
    see_tile,
    tile_of_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.kernels.traffic import Given
    from roseinfer.layer_traits import LayerTraits

_STAGES = 2
"""Tiles of tokens on their way at once."""


def chunks_moved(given: Given) -> dict[str, int | Callable[[], int]]:
    """Count every sequence's keys and values up to its last new token, however many read them."""
    query, tables, k_cache = (given[name] for name in ("query", "tables", "k_cache"))
    columns = [given[name] for name in ("sequences", "rows", "counts", "positions")]
    token, block = taken(k_cache, k_cache.shape[1] * given["D"]), given["BLOCK"]

    def seen() -> list[tuple[int, int]]:
        """Return where the keys that a sequence's tiles see begin and end, for every sequence."""
        found: dict[int, tuple[int, int]] = {}
        window = given["WINDOW"]
        for sequence, _, count, position in zip(*(each.tolist() for each in columns), strict=True):
            first = max(0, position - window + 1) if window else 0
            begun, ended = found.get(sequence, (first, 0))
            found[sequence] = min(begun, first), max(ended, position + count)
        return [*found.values()]

    def cached() -> int:
        return token * sum(end - first for first, end in seen())

    def listed() -> int:
        return taken(tables, sum((end - 1) // block - first // block + 1 for first, end in seen()))

    return {
        **{name: taken(given[name], query.numel()) for name in ("query", "out")},
        **{
            name: taken(each, each.numel())
            for name, each in zip(
                ("sequences", "rows", "counts", "positions"), columns, strict=True
            )
        },
        "tables": listed,
        "k_cache": cached,
        "v_cache": cached,
        **numbers_by_head(given),
    }


@moves(chunks_moved)
@triton.jit
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
    k_own = _stored(k_head, table, position + own, own < count, dims, kc_b, kc_t, kc_d, BLOCK, D)
    products = tl.where(own[None, :] == token[:, None], dot(q, tl.trans(k_own)), 0.0)
    v_own = _stored(v_head, table, position + token, there, dims, vc_b, vc_t, vc_d, BLOCK, D)
    all_top, all_total, all_sums = own_token(
        tl.sum(products, 1), v_own.to(tl.float32), scale, cap, sinks, slopes, head, real,
        CAPPED, SLOPED, SINKING,
    )  # fmt: skip

    # The tile's first token sees what is furthest back; its last one sees those in front of it.
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
    end = position + count - 1
    part = part_of(first)
    ends = part_begin(part + 1)
    top, total, sums = nothing_seen(M, TILE_D)
    begin = first // TILE_T * TILE_T
    if not WINDOW and not LIMIT:
        # What all of the tile's tokens see needs no mask.
        for at in tl.range(begin, position // TILE_T * TILE_T, TILE_T, num_stages=STAGES):
            if at == ends:
                all_top, all_total, all_sums = fold(
                    all_top, all_total, all_sums, top, of_row(total), sums
                )
                top, total, sums = nothing_seen(M, TILE_D)
                part += 1
                ends = part_begin(part + 1)
            tokens = at + tl.arange(0, TILE_T)
            every = tokens >= 0
            k = _tile(k_head, table, at, end, every, dims, kc_b, kc_t, kc_d, BLOCK, D, TILE_T)
            v = _tile(v_head, table, at, end, every, dims, vc_b, vc_t, vc_d, BLOCK, D, TILE_T)
            distance = (position + token)[:, None] - tokens[None, :]
            top, total, sums = see_tile(
                q, k, v, distance, distance.to(tl.float32), top, total, sums, scale, cap, slopes,
                head, real, False, CAPPED, SLOPED,
            )  # fmt: skip
        begin = position // TILE_T * TILE_T
    # Not every version of Triton's interpreter can count to a tensor.
    for at in tl.range(0 if LIMIT else begin, LIMIT if LIMIT else end, TILE_T, num_stages=STAGES):
        if at == ends:
            all_top, all_total, all_sums = fold(
                all_top, all_total, all_sums, top, of_row(total), sums
            )
            top, total, sums = nothing_seen(M, TILE_D)
            part += 1
            ends = part_begin(part + 1)
        tokens = at + tl.arange(0, TILE_T)
        stored = (tokens >= first) & (tokens < end)
        k = _tile(k_head, table, at, end, stored, dims, kc_b, kc_t, kc_d, BLOCK, D, TILE_T)
        v = _tile(v_head, table, at, end, stored, dims, vc_b, vc_t, vc_d, BLOCK, D, TILE_T)
        distance = (position + token)[:, None] - tokens[None, :]
        seen = distance > 0
        if WINDOW:
            seen = seen & (distance < WINDOW)
        top, total, sums = see_tile(
            q, k, v, seen, distance.to(tl.float32), top, total, sums, scale, cap, slopes,
            head, real, True, CAPPED, SLOPED,
        )  # fmt: skip
    all_top, all_total, all_sums = fold(all_top, all_total, all_sums, top, of_row(total), sums)
    tl.store(
        out + (row + token)[:, None] * o_s + head[:, None] * o_h + dims[None, :] * o_d,
        (all_sums / all_total[:, None]).to(out.dtype.element_ty), there[:, None] & d_inside,
    )  # fmt: skip


@triton.jit
def _stored(
    cache, table, tokens, inside, dims, c_b, c_t, c_d, BLOCK: tl.constexpr, D: tl.constexpr
):
    """Load what is stored of some tokens for one head, ``[tokens, dims]``."""
    blocks = tl.load(table + tokens // BLOCK, inside, other=0).to(tl.int64)
    slots = (tokens % BLOCK).to(tl.int64)
    return tl.load(
        cache + blocks[:, None] * c_b + slots[:, None] * c_t + dims[None, :] * c_d,
        inside[:, None] & (dims < D)[None, :], other=0.0,
    )  # fmt: skip


@triton.jit
def _tile(
    cache, table, begin, end, inside, dims, c_b, c_t, c_d,
    BLOCK: tl.constexpr, D: tl.constexpr, TILE_T: tl.constexpr,
):  # fmt: skip
    """Load a tile of tokens in front of ``end``. Where tiles divide blocks, it is in one block."""
    at = tl.arange(0, TILE_T)
    if BLOCK % TILE_T:
        return _stored(cache, table, begin + at, inside, dims, c_b, c_t, c_d, BLOCK, D)
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

    The caches are one layer, and row ``i`` of ``tables`` lists sequence ``i``'s blocks.
    ``tiles`` are columns: for each program its sequence, the first of its tokens in ``query``,
    how many they are (``tile_q`` or fewer), and that token's position. No position is
    ``longest`` or more.
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
    launch(
        _chunk_kernel, (len(tiles[0]), kv_heads),
        query, k_cache, v_cache, tables, *tiles, out, *score_arguments(traits, query),
        *query.stride(), *out.stride(), *k_cache.stride(), *v_cache.stride(),
        tables.stride(0), group, head_dim, block_size, tile_q, tile_g, tile_d,
        tile_of_tokens(tile_d * k_cache.element_size()), longest if is_interpreted() else 0,
        _STAGES, as_written=True,
    )  # fmt: skip
    return out
