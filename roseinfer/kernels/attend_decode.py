"""Decode attention: one query token for each sequence, over blocks wherever they lie.

A program takes one sequence, one KV head with the query heads that share it, and one part of
the context. Where there are several parts a second kernel combines them. Their number depends
on the number of programs and the width of the tables, never on a length: a captured launch
stays right while sequences grow. What lies in a block behind the sequence's last token is not
used: its scores are masked, and its values are zeroed, since zero times NaN is NaN.

The same launch may store the token's key and value first. The program of the first part does
so, and begins with the new token as the only one it has seen: nothing that a launch writes is
read back in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.errors import BadArgument
from roseinfer.kernels.moves import moves, taken
from roseinfer.kernels.products.dot import dot
from roseinfer.kernels.runtime import is_interpreted, launch
from roseinfer.kernels.scores import add_sinks, numbers_by_head, score_arguments, shape_scores

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.kernels.moves import Given
    from roseinfer.layer_traits import LayerTraits

_MOST_PARTS = 32
_PROCESSORS = 132
"""The largest GPUs have about so many."""
_PROGRAMS_WANTED = 3 * _PROCESSORS
_MOST_LARGE_PROGRAMS = 6 * _PROCESSORS
"""With more, programs with a small tile and a single warp are faster."""
_LARGE_TILE = 64
"""Tokens that a program looks at together."""
_TILE_BYTES = 1 << 14
"""A tile's keys take at most so many. A program needs two to three times that of shared memory,
of which some GPUs have 64 KiB."""
_AT_ONCE = 8 * _PROCESSORS
"""With up to so many programs, the next kernel may start before these have ended. With more, it
would take the place of those that have not begun."""


def _decode_moved(given: Given) -> dict[str, int | Callable[[], int]]:
    """Count the keys and values of the lengths that the sequences have when the kernel runs."""
    query, lengths, k_cache, tables = (
        given[name] for name in ("query", "lengths", "k_cache", "tables")
    )
    sequences, appends, block = len(query), given["APPENDS"], given["BLOCK"]
    token = taken(k_cache, given["Q_HEADS"] // given["GROUP"] * given["D"])

    def seen() -> list[tuple[int, int]]:
        """Return the positions of the first and the last key of every sequence."""
        last = [n if appends else n - 1 for n in lengths.tolist()]
        return [(max(0, n - given["WINDOW"] + 1) if given["WINDOW"] else 0, n) for n in last]

    def cached() -> int:
        return token * sum(last - first + 1 for first, last in seen())

    def listed() -> int:
        return taken(tables, sum(last // block - first // block + 1 for first, last in seen()))

    moved: dict[str, int | Callable[[], int]] = {
        "query": taken(query, query.numel()),
        "lengths": taken(lengths, sequences),
        "tables": listed,
        "k_cache": cached,
        "v_cache": cached,
    }
    if appends:
        moved |= {name: taken(given[name], given[name].numel()) for name in ("key", "value")}
    moved |= numbers_by_head(given)
    if given["PARTS"] == 1:
        return moved | {"out": taken(given["out"], query.numel())}
    return moved | _parts_moved(given, given["PARTS"])


def _parts_moved(given: Given, parts: int) -> dict[str, int]:
    """Count what was found in every part of every context."""
    rows = given["out"].shape[0] * given["Q_HEADS"] * parts
    sums = {name: taken(given[name], rows) for name in ("weights_max", "weights_sum")}
    return sums | {"partial": taken(given["partial"], rows * given["D"])}


def _combine_moved(given: Given) -> dict[str, int]:
    out = given["out"]
    return _parts_moved(given, given["parts"]) | {"out": taken(out, out.numel())}


@moves(_decode_moved)
@triton.jit
def _decode_kernel(
    query, key, value, k_cache, v_cache, tables, lengths, out, partial, weights_max, weights_sum,
    scale, cap, sinks, slopes,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKING: tl.constexpr, SLOPED: tl.constexpr,
    q_s, q_h, k_s, k_h, v_s, v_h, o_s, o_h,
    kc_b, kc_h, kc_t, table_pitch, length_pitch,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TILE_G: tl.constexpr, TILE_D: tl.constexpr, TILE_T: tl.constexpr, PARTS: tl.constexpr,
    LIMIT: tl.constexpr, APPENDS: tl.constexpr, ROOM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    length = tl.load(lengths + sequence * length_pitch).to(tl.int32)
    members = tl.arange(0, TILE_G)
    dims = tl.arange(0, TILE_D)
    heads = kv_head * GROUP + members
    d_inside = dims < D
    q_inside = (members[:, None] < GROUP) & d_inside[None, :]
    table = tables + sequence * table_pitch
    at_query = length if APPENDS else length - 1
    first = tl.maximum(at_query - WINDOW + 1, 0) if WINDOW else 0
    seen_from = first // TILE_T * TILE_T
    share = tl.cdiv(tl.cdiv(length - seen_from, PARTS), TILE_T) * TILE_T
    begin = seen_from + part * share
    end = tl.minimum(begin + share, length)
    if EARLY:
        if ROOM:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q = tl.load(query + sequence * q_s + heads[:, None] * q_h + dims[None, :], q_inside, other=0.0)
    top = tl.full((TILE_G,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_G,), tl.float32)
    sums = tl.zeros((TILE_G, TILE_D), tl.float32)
    if APPENDS:
        own = d_inside & (part + 0 * dims == 0)
        k_new = tl.load(key + sequence * k_s + kv_head * k_h + dims, own, other=0.0)
        v_new = tl.load(value + sequence * v_s + kv_head * v_h + dims, own, other=0.0)
        k_new = k_new.to(k_cache.dtype.element_ty)
        v_new = v_new.to(v_cache.dtype.element_ty)
        block = tl.load(table + length // BLOCK).to(tl.int64)
        slot = block * kc_b + kv_head * kc_h + (length % BLOCK) * kc_t + dims
        tl.store(k_cache + slot, k_new, own)
        tl.store(v_cache + slot, v_new, own)
        own_product = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
        own_score = shape_scores(
            own_product[:, None], cap, slopes, heads, members < GROUP, 0.0, CAPPED, SLOPED
        )
        top = tl.where(part == 0, tl.sum(own_score, 1), top)
        total = tl.where(part == 0, 1.0, total)
        sums += v_new.to(tl.float32)[None, :]

    # Not every version of Triton's interpreter can count to a tensor.
    stop = LIMIT if LIMIT else end
    start = 0 if LIMIT else begin
    for at in tl.range(start, stop, TILE_T, num_stages=3):
        tokens = at + tl.arange(0, TILE_T)
        stored = (tokens >= tl.maximum(begin, first)) & (tokens < end)
        if BLOCK % TILE_T == 0:
            base = tl.load(table + at // BLOCK).to(tl.int64) * kc_b
            places = base + kv_head * kc_h + (tokens % BLOCK) * kc_t
        else:
            blocks = tl.load(table + tokens // BLOCK, stored, other=0).to(tl.int64)
            places = blocks * kc_b + kv_head * kc_h + (tokens % BLOCK) * kc_t
        inside = stored[:, None] & d_inside[None, :]
        k = tl.load(k_cache + places[:, None] + dims[None, :], inside, other=0.0)
        v = tl.load(v_cache + places[:, None] + dims[None, :], inside, other=0.0)
        distance = (at_query - tokens).to(tl.float32)[None, :]
        scores = shape_scores(
            dot(q, tl.trans(k)) * scale, cap, slopes, heads, members < GROUP, distance, CAPPED,
            SLOPED,
        )  # fmt: skip
        scores = tl.where(stored[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # Nothing seen up to here: infinity less infinity is NaN.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - finite)
        weights = tl.exp2(scores - finite[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + dot(weights.to(v.dtype), v)
        top = higher
    if SINKING and part == 0:
        top, total, sums = add_sinks(top, total, sums, sinks, heads, members < GROUP)
    if PARTS == 1:
        tl.store(
            out + sequence * o_s + heads[:, None] * o_h + dims[None, :],
            (sums / total[:, None]).to(out.dtype.element_ty), q_inside,
        )  # fmt: skip
    else:
        row = (sequence * Q_HEADS + heads) * PARTS + part
        tl.store(weights_max + row, top, members < GROUP)
        tl.store(weights_sum + row, total, members < GROUP)
        tl.store(partial + row[:, None] * D + dims[None, :], sums, q_inside)


@moves(_combine_moved)
@triton.jit
def _combine_kernel(
    partial, weights_max, weights_sum, out,
    parts, o_s, o_h, o_d,
    Q_HEADS: tl.constexpr, D: tl.constexpr, TILE_P: tl.constexpr, TILE_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A program combines what the parts of one sequence found for one query head."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = (sequence * Q_HEADS + head) * parts
    part = tl.arange(0, TILE_P)
    dims = tl.arange(0, TILE_D)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    top = tl.load(weights_max + row + part, part < parts, other=float("-inf"))
    total = tl.load(weights_sum + row + part, part < parts, other=0.0)
    # A part behind the end of the context has no maximum and no weight.
    shrink = tl.where(total > 0, tl.exp2(top - tl.max(top, 0)), 0.0)
    inside = (part[:, None] < parts) & (dims[None, :] < D) & (total[:, None] > 0)
    values = tl.load(partial + (row + part[:, None]) * D + dims[None, :], inside, other=0.0)
    weight = tl.sum(total * shrink, 0)
    result = tl.sum(values * shrink[:, None], 0) / tl.where(weight > 0, weight, 1.0)
    tl.store(
        out + sequence * o_s + head * o_h + dims * o_d,
        result.to(out.dtype.element_ty), dims < D,
    )  # fmt: skip


def paged_attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    traits: LayerTraits,
) -> Tensor:
    """Compute the attention of one stored token a sequence, ``[sequences, q_heads, head_dim]``.

    The caches are one layer, ``[blocks, kv_heads, block_size, head_dim]``; row ``i`` of
    ``tables`` lists sequence ``i``'s blocks and ``lengths[i]`` counts its tokens, the query's
    own included. The caches lie in memory alike, the elements of a head side by side.
    """
    return append_and_attend(query, None, None, k_cache, v_cache, tables, lengths, traits)


def append_and_attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    traits: LayerTraits,
) -> Tensor:
    """Store one token for each sequence, ``[sequences, kv_heads, head_dim]``, and attend from it.

    This is ``paged_attention_decode``, but ``lengths[i]`` counts what is stored before, and row
    ``i`` of ``tables`` has a block for the new token too. On a GPU ``lengths`` may be read before
    the kernel in front has ended: it must not be what writes them.
    """
    _check(query, k_cache, v_cache)
    query = _side_by_side(query)
    appends = key is not None
    key = query if key is None else _side_by_side(key)
    value = query if value is None else _side_by_side(value)
    sequences, q_heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = q_heads // kv_heads
    most_tokens = tables.shape[1] * block_size
    parts = _num_parts(sequences * kv_heads, min(most_tokens, traits.window or most_tokens))
    out = query.new_empty(query.shape)
    partial = weights_max = weights_sum = out
    if parts > 1:
        rows = sequences * q_heads * parts
        partial = query.new_empty((rows, head_dim), dtype=torch.float32)
        weights_max, weights_sum = query.new_empty((2, rows), dtype=torch.float32)
    tile_g = max(16, 1 << (group - 1).bit_length())
    tile_d = max(16, 1 << (head_dim - 1).bit_length())
    programs = sequences * kv_heads * parts
    tile_t, warps = _tile(programs, tile_d * k_cache.element_size())
    limit = 0
    if is_interpreted():  # counting to a limit; tables of slots are wider than any sequence needs
        limit = max(1, int(lengths.max())) if appends else most_tokens
    launch(
        _decode_kernel, (sequences, kv_heads, parts),
        query, key, value, k_cache, v_cache, tables, lengths, out, partial, weights_max,
        weights_sum, *score_arguments(traits, query),
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2],
        *k_cache.stride()[:3], tables.stride(0), lengths.stride(0),
        q_heads, group, head_dim, block_size, tile_g, tile_d, tile_t, parts, limit,
        appends, programs <= _AT_ONCE, num_warps=warps, early=appends,
    )  # fmt: skip
    if parts > 1:
        launch(
            _combine_kernel, (sequences, q_heads),
            partial, weights_max, weights_sum, out, parts, *out.stride(),
            q_heads, head_dim, 1 << (parts - 1).bit_length(), tile_d, early=appends,
        )  # fmt: skip
    return out


def _check(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    _, q_heads, head_dim = query.shape
    if q_heads % k_cache.shape[1] or k_cache.shape[3] != head_dim or k_cache.shape != v_cache.shape:
        raise BadArgument(
            f"{q_heads} query heads of {head_dim} do not fit caches of {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}"
        )
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise BadArgument(
            "caches must have the same strides, the last of them 1; they have "
            f"{k_cache.stride()} and {v_cache.stride()}"
        )
    if not query.dtype == k_cache.dtype == v_cache.dtype:
        raise BadArgument(
            f"queries of {query.dtype} do not fit caches of {k_cache.dtype} and {v_cache.dtype}"
        )


def _side_by_side(heads: Tensor) -> Tensor:
    """Put the elements of a head next to each other in memory."""
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _tile(programs: int, head_bytes: int) -> tuple[int, int]:
    """Choose how many tokens a program looks at together, and its warps: the fastest on an H200."""
    if programs <= _MOST_LARGE_PROGRAMS and _LARGE_TILE * head_bytes <= _TILE_BYTES:
        return _LARGE_TILE, 4
    return min(32, max(16, _TILE_BYTES // head_bytes)), 1


def _num_parts(rows: int, most_tokens: int) -> int:
    """Choose how many parts a context has.

    It is a power of two, so that kernels are few, and no more than it takes for the longest
    context that a table has room for.
    """
    if is_interpreted():  # there a program costs the same whatever it does
        return 1
    wanted = max(1, _PROGRAMS_WANTED // rows)
    tiles = -(-most_tokens // _LARGE_TILE)
    return min(_MOST_PARTS, 1 << (wanted.bit_length() - 1), 1 << (tiles - 1).bit_length())
