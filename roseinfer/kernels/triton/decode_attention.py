"""Decode attention: one query token per sequence, over paged blocks.

A program attends for one sequence and one KV head with the query heads that share it, over all
parts of the context or some of them. Where several programs split a context, a second kernel merges
the parts, in order. The number of splits depends on the number of programs and the width of the
tables, never on a length: a captured launch stays right while sequences grow. Slots of a block
after the sequence's last token are not used: their scores are masked, and their values are zeroed,
since zero times NaN is NaN.

The same launch may store the token's key and value first. The last program does so, and reads them
from the arguments: a launch reads nothing back that it writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.errors import BadArgument
from roseinfer.kernels.kernel import kernel, numel, strides
from roseinfer.kernels.runtime import is_interpreted
from roseinfer.kernels.triton.linear import dot
from roseinfer.kernels.triton.rope import angle_elements, load_rotated
from roseinfer.kernels.triton.softmax import (
    PER_HEAD_TRAFFIC,
    empty_softmax,
    init_softmax,
    merge_softmax,
    num_context_parts,
    part_begin,
    part_index,
    row_weight_sum,
    score_arguments,
    tile_of_tokens,
    update_softmax,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.kernels.kernel import TrafficTable
    from roseinfer.layer_traits import LayerTraits, RotaryEmbedding

# Partial results of a context's parts: stored part by part, then merged in order.
#
# A row of partial results belongs to one query head of one sequence: first its own token, then the
# parts that it attends to.


_UNROLL = tl.constexpr(8)
"""Parts that are loaded at once."""


def _key_ranges(lengths: Tensor, window: int, *, appends: bool) -> list[tuple[int, int]]:
    """Return the positions of the first and the last key of every sequence when a kernel runs."""
    own = [length if appends else length - 1 for length in lengths.tolist()]
    return [(max(0, last - window + 1) if window else 0, last) for last in own]


def _partial_rows(
    lengths: Tensor, Q_HEADS: int, WINDOW: int, APPENDS: bool, SPLITS: int = 2, of_row: int = 1
) -> int | Callable[[], int]:
    """Count the partial results of the new token, and of every part before it."""

    def count() -> int:
        rows = 0
        for first, own in _key_ranges(lengths, WINDOW, appends=APPENDS):
            rows += 1
            if own > first:
                rows += num_context_parts(own) - num_context_parts(first + 1) + 1
        return Q_HEADS * rows * of_row

    return count if SPLITS > 1 else 0


_PARTIAL_TRAFFIC: TrafficTable = {
    "weights_max": _partial_rows,
    "weights_sum": _partial_rows,
    "partial": lambda lengths, Q_HEADS, D, WINDOW, APPENDS, SPLITS=2: _partial_rows(
        lengths, Q_HEADS, WINDOW, APPENDS, SPLITS, D
    ),
}


@triton.jit
def visible_parts(first, own):
    """Return the first part that a token attends to, and the number of parts before the token."""
    first_part = part_index(first)
    return first_part, tl.where(own > first, part_index(own - 1) - first_part + 1, 0)


@triton.jit
def store_partial(
    partial, weights_max, weights_sum, row, top, total, sums, real, d_inside, D: tl.constexpr
):
    """Store the partial result of a part, for the kernel that merges parts."""
    dims = tl.arange(0, sums.shape[1])
    tl.store(weights_max + row, top, real)
    tl.store(weights_sum + row, total, real)
    tl.store(partial + row[:, None] * D + dims[None, :], sums, real[:, None] & d_inside[None, :])


@kernel({**_PARTIAL_TRAFFIC, "out": numel, "lengths": numel}, fp_fusion=False)
def _combine_kernel(
    partial, weights_max, weights_sum, lengths, out,
    o_s, o_h, o_d, length_pitch,
    Q_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    APPENDS: tl.constexpr, TILE_D: tl.constexpr, LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one sequence's parts for one query head, in order."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = (sequence * Q_HEADS + head) * ROWS
    dims = tl.arange(0, TILE_D)
    inside = dims < D
    one = tl.arange(0, 1)
    length = tl.load(lengths + sequence * length_pitch).to(tl.int32)
    own = length if APPENDS else length - 1
    first = tl.maximum(own - WINDOW + 1, 0) if WINDOW else 0
    _, parts = visible_parts(first, own)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    all_top = tl.load(weights_max + row + one)
    all_total = tl.load(weights_sum + row + one)
    all_sums = tl.load(partial + row * D + dims, inside, other=0.0)[None, :]
    for begin in range(1, ROWS if LIMIT else parts + 1, _UNROLL):
        for more in tl.static_range(_UNROLL):  # so many loads are in flight at once
            at = begin + more
            there = at + 0 * one <= parts
            top = tl.load(weights_max + row + at + one, there, other=float("-inf"))
            total = tl.load(weights_sum + row + at + one, there, other=0.0)
            sums = tl.load(
                partial + (row + at) * D + dims, inside & (at + 0 * dims <= parts), other=0.0
            )[None, :]
            all_top, all_total, all_sums = merge_softmax(
                all_top, all_total, all_sums, top, total, sums
            )
    result = tl.sum(all_sums / all_total[:, None], 0)
    tl.store(
        out + sequence * o_s + head * o_h + dims * o_d,
        result.to(out.dtype.element_ty), inside,
    )  # fmt: skip


def merge_parts(
    partial: Tensor,
    weights_max: Tensor,
    weights_sum: Tensor,
    lengths: Tensor,
    out: Tensor,
    rows: int,
    window: int,
    tile_d: int,
    limit: int,
    *,
    appends: bool,
) -> None:
    """Merge what ``store_partial`` stored, ``rows`` rows for every query head, into ``out``."""
    sequences, q_heads, head_dim = out.shape
    _combine_kernel.launch(
        (sequences, q_heads), num_warps=1, pdl=appends,
        partial=partial, weights_max=weights_max, weights_sum=weights_sum, lengths=lengths, out=out,
        **strides("o_shd", out.stride()), length_pitch=lengths.stride(0),
        Q_HEADS=q_heads, D=head_dim, ROWS=rows, WINDOW=window, APPENDS=appends, TILE_D=tile_d,
        LIMIT=limit,
    )  # fmt: skip


_MAX_SPLITS = 32
_MULTIPROCESSORS = 132
"""Multiprocessors of the largest GPUs, roughly."""
_TARGET_PROGRAMS = 3 * _MULTIPROCESSORS
_SMALL_HEAD = 64
_MAX_PDL_PROGRAMS = 8 * _MULTIPROCESSORS
"""Largest number of programs with which the next kernel may start before these have ended.

With more, it would take the place of those that have not begun.
"""


def _key_elements(
    lengths: Tensor, k_cache: Tensor, WINDOW: int = 0, APPENDS: bool = True
) -> Callable[[], int]:
    """Count the keys of the lengths that the sequences have when the kernel runs."""
    of_token = k_cache.shape[1] * k_cache.shape[3]
    return lambda: (
        of_token
        * sum(last - first + 1 for first, last in _key_ranges(lengths, WINDOW, appends=APPENDS))
    )


def _table_elements(
    lengths: Tensor, k_cache: Tensor, WINDOW: int = 0, APPENDS: bool = True
) -> Callable[[], int]:
    block = k_cache.shape[2]
    return lambda: sum(
        last // block - first // block + 1
        for first, last in _key_ranges(lengths, WINDOW, appends=APPENDS)
    )


APPEND_AND_ATTEND_TRAFFIC: TrafficTable = {
    "query": numel,
    "lengths": lambda query: len(query),
    "tables": _table_elements,
    "k_cache": _key_elements,
    "v_cache": _key_elements,
    **dict.fromkeys(("key", "value"), lambda own, APPENDS=True: own.numel() if APPENDS else 0),
    **dict.fromkeys(("cosines", "sines"), angle_elements),
    "out": lambda own, SPLITS=1: own.numel() if SPLITS == 1 else 0,
}
"""Traffic of a kernel without partial results, and without traits that have a number per head."""
_DECODE_TRAFFIC = {**APPEND_AND_ATTEND_TRAFFIC, **PER_HEAD_TRAFFIC, **_PARTIAL_TRAFFIC}


@kernel(_DECODE_TRAFFIC, fp_fusion=False)
def _decode_kernel(
    query, key, value, k_cache, v_cache, tables, lengths, out, partial, weights_max, weights_sum,
    scale, cap, sinks, slopes,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKING: tl.constexpr, SLOPED: tl.constexpr,
    cosines, sines, TURN: tl.constexpr,
    q_s, q_h, k_s, k_h, v_s, v_h, o_s, o_h,
    kc_b, kc_h, kc_t, table_pitch, length_pitch,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TILE_G: tl.constexpr, TILE_D: tl.constexpr, TILE_T: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, LIMIT: tl.constexpr, APPENDS: tl.constexpr, ROOM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + sequence * length_pitch).to(tl.int32)
    members = tl.arange(0, TILE_G)
    dims = tl.arange(0, TILE_D)
    heads = kv_head * GROUP + members
    real = members < GROUP
    d_inside = dims < D
    q_inside = real[:, None] & d_inside[None, :]
    table = tables + sequence * table_pitch
    own = length if APPENDS else length - 1
    first = tl.maximum(own - WINDOW + 1, 0) if WINDOW else 0
    first_part, parts = visible_parts(first, own)
    share = tl.cdiv(parts, SPLITS)
    part = first_part + split * share
    last_part = tl.minimum(part + share, first_part + parts)
    begin = tl.maximum(part_begin(part), first)
    end = tl.minimum(part_begin(last_part), own)
    if EARLY:
        if ROOM:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    queries = query + sequence * q_s + heads * q_h
    if TURN:
        q = load_rotated(
            queries, members, dims, own, cosines, sines, query, 0.0, GROUP, D, TURN, False, False
        ).to(query.dtype.element_ty)
    else:
        q = tl.load(queries[:, None] + dims[None, :], q_inside, other=0.0)
    row = (sequence * Q_HEADS + heads) * ROWS
    if APPENDS:
        k_from, v_from = (
            key + sequence * k_s + kv_head * k_h,
            value + sequence * v_s + kv_head * v_h,
        )
    else:
        k_from, v_from = k_cache, v_cache
    slot = tl.load(table + own // BLOCK).to(tl.int64) * kc_b + kv_head * kc_h + own % BLOCK * kc_t
    if SPLITS == 1:
        all_top, all_total, all_sums = _append_own_token(
            q, k_from, v_from, k_cache + slot, v_cache + slot, dims, d_inside, own, cosines, sines,
            scale, cap, sinks, slopes, heads, real, CAPPED, SLOPED, SINKING, APPENDS, D, TURN,
        )  # fmt: skip
    elif split == SPLITS - 1:  # it has the fewest parts
        own_top, own_total, own_sums = _append_own_token(
            q, k_from, v_from, k_cache + slot, v_cache + slot, dims, d_inside, own, cosines, sines,
            scale, cap, sinks, slopes, heads, real, CAPPED, SLOPED, SINKING, APPENDS, D, TURN,
        )  # fmt: skip
        store_partial(
            partial, weights_max, weights_sum, row, own_top, own_total, own_sums, real, d_inside, D
        )  # fmt: skip
    top, total, sums = empty_softmax(TILE_G, TILE_D)
    ends = part_begin(part + 1)
    # Not every version of Triton's interpreter accepts a tensor as the end of a range.
    stop = LIMIT if LIMIT else end
    start = 0 if LIMIT else begin // TILE_T * TILE_T
    for at in tl.range(start, stop, TILE_T, num_stages=3):
        if at == ends:
            if SPLITS == 1:
                all_top, all_total, all_sums = merge_softmax(
                    all_top, all_total, all_sums, top, row_weight_sum(total), sums
                )
            else:
                store_partial(
                    partial, weights_max, weights_sum, row + 1 + part - first_part, top,
                    row_weight_sum(total), sums, real & (part + 0 * members < last_part),
                    d_inside, D,
                )  # fmt: skip
            top, total, sums = empty_softmax(TILE_G, TILE_D)
            part += 1
            ends = part_begin(part + 1)
        tokens = at + tl.arange(0, TILE_T)
        stored = (tokens >= begin) & (tokens < end)
        if BLOCK % TILE_T == 0:
            base = tl.load(table + at // BLOCK).to(tl.int64) * kc_b
            places = base + kv_head * kc_h + (tokens % BLOCK) * kc_t
        else:
            blocks = tl.load(table + tokens // BLOCK, stored, other=0).to(tl.int64)
            places = blocks * kc_b + kv_head * kc_h + (tokens % BLOCK) * kc_t
        inside = stored[:, None] & d_inside[None, :]
        k = tl.load(k_cache + places[:, None] + dims[None, :], inside, other=0.0)
        v = tl.load(v_cache + places[:, None] + dims[None, :], inside, other=0.0)
        distance = (own - tokens).to(tl.float32)[None, :]
        top, total, sums = update_softmax(
            q, k, v, stored[None, :], distance, top, total, sums, scale, cap, slopes, heads, real,
            True, CAPPED, SLOPED,
        )  # fmt: skip
    if SPLITS == 1:
        all_top, all_total, all_sums = merge_softmax(
            all_top, all_total, all_sums, top, row_weight_sum(total), sums
        )
        tl.store(
            out + sequence * o_s + heads[:, None] * o_h + dims[None, :],
            (all_sums / all_total[:, None]).to(out.dtype.element_ty), q_inside,
        )  # fmt: skip
    else:
        store_partial(
            partial, weights_max, weights_sum, row + 1 + part - first_part, top,
            row_weight_sum(total), sums, real & (part + 0 * members < last_part), d_inside, D,
        )  # fmt: skip


@triton.jit
def _append_own_token(
    q, k_from, v_from, k_slot, v_slot, dims, d_inside, own, cosines, sines,
    scale, cap, sinks, slopes, heads, real,
    CAPPED: tl.constexpr, SLOPED: tl.constexpr, SINKING: tl.constexpr, APPENDS: tl.constexpr,
    D: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Attend to the sequence's own token, after storing it in its slot if it is new."""
    if APPENDS:
        if TURN:
            one = tl.arange(0, 1)
            k = load_rotated(
                k_from + one, one, dims, own, cosines, sines, k_from, 0.0, 1, D, TURN, False, False
            )  # fmt: skip
            k = tl.sum(k, 0).to(k_slot.dtype.element_ty)
        else:
            k = tl.load(k_from + dims, d_inside, other=0.0).to(k_slot.dtype.element_ty)
        v = tl.load(v_from + dims, d_inside, other=0.0).to(v_slot.dtype.element_ty)
        tl.store(k_slot + dims, k, d_inside)
        tl.store(v_slot + dims, v, d_inside)
    else:
        k = tl.load(k_slot + dims, d_inside, other=0.0)
        v = tl.load(v_slot + dims, d_inside, other=0.0)
    # A GEMM of tiles, as in the prefill kernel; all but the first column stay empty.
    column = tl.arange(0, 16)
    k_tile = tl.where((column == 0)[:, None], k.to(tl.float32)[None, :], 0.0).to(q.dtype)
    products = tl.where((column == 0)[None, :], dot(q, tl.trans(k_tile)), 0.0)
    values = v.to(tl.float32)[None, :] + tl.zeros(q.shape, tl.float32)
    return init_softmax(
        tl.sum(products, 1), values, scale, cap, sinks, slopes, heads, real,
        CAPPED, SLOPED, SINKING,
    )  # fmt: skip


def paged_attention_decode(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    lengths: Tensor,
    traits: LayerTraits,
) -> Tensor:
    """Compute the attention of one stored token per sequence, ``[sequences, q_heads, head_dim]``.

    The caches are one layer, ``[blocks, kv_heads, block_size, head_dim]``; row ``i`` of ``tables``
    lists sequence ``i``'s blocks and ``lengths[i]`` counts its tokens, the query's own included.
    The caches have the same strides, and the elements of a head are contiguous.
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
    rotation: RotaryEmbedding | None = None,
) -> Tensor:
    """Store one token per sequence, ``[sequences, kv_heads, head_dim]``, and attend from it.

    This is ``paged_attention_decode``, but ``lengths[i]`` counts the tokens stored before, and row
    ``i`` of ``tables`` has a block for the new token too. On a GPU ``lengths`` may be read before
    the previous kernel has ended: that kernel must not write them.

    With a rotation, which has no norms, queries and keys are still to be rotated, each by its
    position.
    """
    _check(query, k_cache, v_cache)
    query = _contiguous_heads(query)
    appends = key is not None
    key = query if key is None else _contiguous_heads(key)
    value = query if value is None else _contiguous_heads(value)
    sequences, q_heads, head_dim = query.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = q_heads // kv_heads
    most_tokens = tables.shape[1] * block_size
    rows = num_context_parts(most_tokens, traits.window)
    splits = _num_splits(sequences * kv_heads, rows)
    rows += 1  # for the new token
    out = query.new_empty(query.shape)
    partial = weights_max = weights_sum = out
    if splits > 1:
        partial = query.new_empty((sequences * q_heads * rows, head_dim), dtype=torch.float32)
        weights_max, weights_sum = partial.new_empty((2, len(partial)))
    tile_g = max(16, 1 << (group - 1).bit_length())
    tile_d = max(16, 1 << (head_dim - 1).bit_length())
    programs = sequences * kv_heads * splits
    limit = 0
    if is_interpreted():  # up to a limit; tables of slots are wider than any sequence needs
        limit = max(1, int(lengths.max())) if appends else most_tokens
    scores = score_arguments(traits, query)
    cosines = sines = query
    turn = 0
    if rotation is not None:
        cosines, sines, turn = rotation.cosines, rotation.sines, rotation.cosines.shape[1]
    q_s, q_h, _ = query.stride()
    k_s, k_h, _ = key.stride()
    v_s, v_h, _ = value.stride()
    o_s, o_h, _ = out.stride()
    kc_b, kc_h, kc_t, _ = k_cache.stride()
    _decode_kernel.launch(
        (sequences, kv_heads, splits), num_warps=_warps(programs, tile_d), pdl=appends, **scores,
        query=query, key=key, value=value, k_cache=k_cache, v_cache=v_cache, tables=tables,
        lengths=lengths, out=out, partial=partial, weights_max=weights_max, weights_sum=weights_sum,
        cosines=cosines, sines=sines, TURN=turn,
        q_s=q_s, q_h=q_h, k_s=k_s, k_h=k_h, v_s=v_s, v_h=v_h, o_s=o_s, o_h=o_h,
        kc_b=kc_b, kc_h=kc_h, kc_t=kc_t,
        table_pitch=tables.stride(0), length_pitch=lengths.stride(0),
        Q_HEADS=q_heads, GROUP=group, D=head_dim, BLOCK=block_size,
        TILE_G=tile_g, TILE_D=tile_d, TILE_T=tile_of_tokens(tile_d * k_cache.element_size()),
        SPLITS=splits, ROWS=rows, LIMIT=limit, APPENDS=appends, ROOM=programs <= _MAX_PDL_PROGRAMS,
    )  # fmt: skip
    if splits > 1:
        merge_parts(
            partial, weights_max, weights_sum, lengths, out, rows, traits.window or 0, tile_d,
            limit, appends=appends,
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


def _contiguous_heads(heads: Tensor) -> Tensor:
    """Make the elements of each head contiguous."""
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _warps(programs: int, tile_d: int) -> int:
    """Choose the warps of a program: the fastest on an H200. Results do not depend on them."""
    if tile_d <= _SMALL_HEAD:
        return 4 if programs <= 2 * _TARGET_PROGRAMS else 1
    return 4 if programs <= _TARGET_PROGRAMS else 2


def _num_splits(rows: int, parts: int) -> int:
    """Choose how many programs share a context: a power of two, so that kernels are few."""
    if is_interpreted():  # there a program costs the same whatever it does
        return 1
    wanted = max(1, _TARGET_PROGRAMS // rows)
    return min(_MAX_SPLITS, 1 << (wanted.bit_length() - 1), 1 << (parts - 1).bit_length())
