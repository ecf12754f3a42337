"""Attention of several new tokens a sequence: of whole prompts, and of chunks of longer ones.

A program takes some consecutive tokens of one sequence and one KV head with the query heads
that share it, and goes through the sequence's blocks, wherever they lie, up to its last token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from roseinfer.errors import BadArgument
from roseinfer.kernels.moves import moves, taken
from roseinfer.kernels.products.dot import dot
from roseinfer.kernels.runtime import is_interpreted, launch
from roseinfer.kernels.scores import add_sinks, numbers_by_head, score_arguments, shape_scores

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.kernels.moves import Given
    from roseinfer.layer_traits import LayerTraits

_TILE_T = 64
"""A program looks at so many tokens of context together."""


def _chunks_moved(given: Given) -> dict[str, int | Callable[[], int]]:
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


@moves(_chunks_moved)
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
    LIMIT: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.load(sequences + tile).to(tl.int64)
    row = tl.load(rows + tile).to(tl.int64)
    count = tl.load(counts + tile)
    position = tl.load(positions + tile)
    m = tl.arange(0, TILE_Q * TILE_G)
    token, member = m // TILE_G, m % TILE_G
    dims = tl.arange(0, TILE_D)
    q_inside = ((token < count) & (member < GROUP))[:, None] & (dims < D)[None, :]
    head = kv_head * GROUP + member
    q = tl.load(
        query + (row + token)[:, None] * q_s + head[:, None] * q_h + dims[None, :] * q_d,
        q_inside, other=0.0,
    )  # fmt: skip
    top = tl.full((TILE_Q * TILE_G,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_Q * TILE_G,), tl.float32)
    sums = tl.zeros((TILE_Q * TILE_G, TILE_D), tl.float32)
    end = position + count
    # Not every version of Triton's interpreter can count to a tensor.
    # The tile's first token sees what is furthest back.
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
    for at in tl.range(0 if LIMIT else first // TILE_T * TILE_T, LIMIT if LIMIT else end, TILE_T):
        tokens = at + tl.arange(0, TILE_T)
        stored = (tokens >= first) & (tokens < end)
        blocks = tl.load(tables + sequence * table_width + tokens // BLOCK, stored, other=0).to(
            tl.int64
        )
        slots = (tokens % BLOCK).to(tl.int64)
        inside = stored[:, None] & (dims < D)[None, :]
        k = tl.load(
            k_cache + blocks[:, None] * kc_b + kv_head * kc_h + slots[:, None] * kc_t
            + dims[None, :] * kc_d, inside, other=0.0,
        )  # fmt: skip
        v = tl.load(
            v_cache + blocks[:, None] * vc_b + kv_head * vc_h + slots[:, None] * vc_t
            + dims[None, :] * vc_d, inside, other=0.0,
        )  # fmt: skip
        distance = (position + token)[:, None] - tokens[None, :]
        scores = shape_scores(
            dot(q, tl.trans(k)) * scale, cap, slopes, head, member < GROUP,
            distance.to(tl.float32), CAPPED, SLOPED,
        )  # fmt: skip
        seen = distance >= 0
        if WINDOW:
            seen = seen & (distance < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # Nothing seen up to here: infinity less infinity is NaN.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - finite)
        weights = tl.exp2(scores - finite[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + dot(weights.to(v.dtype), v)
        top = higher
    if SINKING:
        _, total, sums = add_sinks(top, total, sums, sinks, head, member < GROUP)
    total = tl.where(total > 0, total, 1.0)  # a row behind the last token may see nothing
    tl.store(
        out + (row + token)[:, None] * o_s + head[:, None] * o_h + dims[None, :] * o_d,
        (sums / total[:, None]).to(out.dtype.element_ty), q_inside,
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
        tables.stride(0), group, head_dim, block_size, tile_q, tile_g, tile_d, _TILE_T,
        longest if is_interpreted() else 0,
    )  # fmt: skip
    return out
