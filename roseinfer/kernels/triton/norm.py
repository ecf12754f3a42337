"""Adding to the residual stream between two linear layers, and norming it for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.runtime import cdiv, launch, next_power_of_2
from roseinfer.kernels.traffic import declare_traffic, num_bytes

if TYPE_CHECKING:
    from roseinfer.kernels.exchange import AllReduceBuffers
    from roseinfer.kernels.traffic import LaunchArguments

# All-reduce of a row inside a kernel, through memory that all ranks' GPUs write to.
#
# Each rank has an inbox. A program writes its row's values to the inboxes of the others, one or two
# per word together with a stamp, and waits until the words of the others have arrived in its own. A
# word is written at once, so a reader that sees the stamp sees the values: there are no flags and
# no fences.


def all_reduce_arguments(
    exchange: AllReduceBuffers | None,
) -> tuple[tuple[Tensor | None, ...], tuple[int, int, int, int]]:
    """Return a kernel's arguments for all-reduce buffers, pointers and constants, or for none."""
    if exchange is None:
        return (None, None, None, None), (0, 0, 1, 1)
    return exchange.pointers, exchange.constants


def exchange_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count what other ranks send. What is sent to them is written to their GPUs' memory."""
    others = arguments["RANKS"] - 1
    if not others:
        return {}
    rows, width = arguments["residual"].shape
    return {
        "inbox": num_bytes(arguments["inbox"], others * rows * (width // arguments["TOGETHER"])),
        "inboxes": num_bytes(arguments["inboxes"], arguments["RANKS"]),
        "rounds": 2 * num_bytes(arguments["rounds"], rows),
    }


@triton.jit
def _are_missing(words, stamp, inside):
    """Return True if some words have another stamp."""
    return tl.max((inside & ((words >> 32).to(tl.int32) != stamp)).to(tl.int32), 0) > 0


@triton.jit
def _pack_words(numbers, TOGETHER: tl.constexpr):
    """Pack the values of a word into its lower half."""
    if TOGETHER == 1:
        packed = numbers.to(tl.float32).to(tl.uint32, bitcast=True).to(tl.int64)
    else:  # the compiler checks what follows a return
        PAIRS: tl.constexpr = numbers.shape[0] // 2
        bits = numbers.to(tl.uint16, bitcast=True).to(tl.int64)
        low, high = tl.split(tl.reshape(bits, (PAIRS, 2)))
        packed = low | (high << 16)
    return packed


@triton.jit
def _unpack_words(words, dtype: tl.constexpr, TOGETHER: tl.constexpr):
    """Return the values of words in float32."""
    if TOGETHER == 1:
        numbers = words.to(tl.int32).to(tl.float32, bitcast=True)
    else:
        bits = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
        pairs = bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        numbers = tl.reshape(pairs, (2 * words.shape[0],))
    return numbers


@triton.jit
def load_inbox_addresses(inboxes, RANKS: tl.constexpr):
    """Load the addresses of all ranks' inboxes, which no launch changes."""
    places = ()
    for rank in tl.static_range(RANKS):
        places = places + (tl.load(inboxes + rank),)  # type: ignore[assignment]  # noqa: RUF005
    return places


@triton.jit
def all_reduce_row(
    own, row, inbox, places, rounds, gone, dtype: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add up a row over all ranks, in their order: all get the same bits.

    Each rank's row is rounded, and so is the sum, as where the model's own modules are sharded.

    Rounds of a row alternate between two places. A writer to a place has received the previous
    round from all ranks. They sent it in a later launch than the one that last read the place, and
    a launch writes nothing before the previous ones have ended. So what is overwritten was read,
    and a place holds the words of this round, or those of two rounds ago with another stamp. That
    stays true where the count wraps from the largest number to the smallest.
    """
    stamp = tl.load(rounds + row) + 1
    WORDS: tl.constexpr = N // TOGETHER
    TILE: tl.constexpr = own.shape[0] // TOGETHER
    SIZE: tl.constexpr = ROWS * WORDS
    w = tl.arange(0, TILE)
    inside = w < WORDS
    begin = (stamp & 1).to(tl.int64) * (RANKS * SIZE) + row * WORDS
    own = own.to(dtype)
    words = (stamp.to(tl.int64) << 32) | _pack_words(own, TOGETHER)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = tl.multiple_of(places[rank].to(tl.pointer_type(tl.int64)), 16)
            tl.store(place + begin + RANK * SIZE + w, words, inside)
    total = tl.zeros_like(own).to(tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            place = inbox + begin + rank * SIZE + w
            come = tl.load(place, inside, other=0, volatile=True)
            waits = _are_missing(come, stamp, inside)
            while waits:
                come = tl.load(place, inside, other=0, volatile=True)
                ended = tl.load(gone, volatile=True)
                waits = _are_missing(come, stamp, inside) & (ended == 0)
            total += _unpack_words(come, dtype, TOGETHER)
    tl.debug_barrier()  # every warp has read the round count
    tl.store(rounds + row, stamp)
    return total.to(dtype).to(tl.float32)


def _normed_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count the rows that are read, added to and normed, and the norm's vectors."""
    rows, width = arguments["residual"].shape
    residual, normed = (num_bytes(arguments[name], rows * width) for name in ("residual", "normed"))
    traffic = {
        "residual": 2 * residual,
        "added": num_bytes(arguments["added"], arguments["PARTS"] * rows * width),
        "normed": normed,
        **exchange_traffic(arguments),
    }
    vectors = ("gain", "shift", "bias") if arguments["BIAS"] else ("gain", "shift")
    return traffic | {name: num_bytes(arguments[name], width) for name in vectors}


def _embedded_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count the rows that are read of the two tables, and the rows that are written."""
    rows, width = arguments["residual"].shape
    matrices = ("word", "place", "residual", "normed")
    return {
        **{name: num_bytes(arguments[name], rows) for name in ("tokens", "positions")},
        **{name: num_bytes(arguments[name], rows * width) for name in matrices},
        **{name: num_bytes(arguments[name], width) for name in ("gain", "shift")},
    }


@declare_traffic(_normed_traffic)
@triton.jit
def _add_norm_kernel(
    residual, added, bias, gain, shift, normed, inbox, inboxes, rounds, gone,
    a_p, a_r, r_r, n_r, epsilon,
    N: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, TILE_N)
    inside = n < N
    g = tl.load(gain + n, inside, other=0.0).to(tl.float32)
    b = tl.load(shift + n, inside, other=0.0).to(tl.float32)
    if BIAS:
        also = tl.load(bias + n, inside, other=0.0).to(tl.float32)
    if RANKS > 1:
        places = load_inbox_addresses(inboxes, RANKS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual + row * r_r + n, inside, other=0.0).to(tl.float32)
    if RANKS > 1:
        total = tl.zeros((TILE_N,), tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(added + part * a_p + row * a_r + n, inside, other=0.0).to(tl.float32)
        x += all_reduce_row(
            total, row, inbox, places, rounds, gone, residual.dtype.element_ty,
            N, ROWS, RANK, RANKS, TOGETHER,
        )  # fmt: skip
    else:
        for part in tl.static_range(PARTS):
            x += tl.load(added + part * a_p + row * a_r + n, inside, other=0.0).to(tl.float32)
    if BIAS:
        x += also
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    x = x.to(residual.dtype.element_ty)
    tl.store(residual + row * r_r + n, x, inside)
    x = x.to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, 0) / N, 0.0)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / N + epsilon) * g + b
    tl.store(normed + row * n_r + n, scaled.to(normed.dtype.element_ty), inside)


@declare_traffic(_embedded_traffic)
@triton.jit
def _embed_norm_kernel(
    tokens, positions, word, place, gain, shift, residual, normed,
    p_s, w_r, p_r, r_r, n_r, epsilon,
    N: tl.constexpr, TILE_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, TILE_N)
    inside = n < N
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(tokens + row).to(tl.int64)
    position = tl.load(positions + row * p_s).to(tl.int64)
    x = tl.load(word + token * w_r + n, inside, other=0.0).to(tl.float32)
    x += tl.load(place + position * p_r + n, inside, other=0.0).to(tl.float32)
    x = x.to(residual.dtype.element_ty)
    tl.store(residual + row * r_r + n, x, inside)
    x = x.to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, 0) / N, 0.0)
    scaled = x * tl.rsqrt(tl.sum(x * x, 0) / N + epsilon)
    scaled *= tl.load(gain + n, inside, other=0.0).to(tl.float32)
    scaled += tl.load(shift + n, inside, other=0.0).to(tl.float32)
    tl.store(normed + row * n_r + n, scaled.to(normed.dtype.element_ty), inside)


def add_norm(
    residual: Tensor,
    added: Tensor,
    bias: Tensor | None,
    norm: Any,
    exchange: AllReduceBuffers | None = None,
) -> Tensor:
    """Add ``[parts, rows, width]`` and a bias to the residual in place; return it normed.

    With all-reduce buffers, the parts of all ranks are added, which call this alike.
    """
    rows, width = residual.shape
    normed = torch.empty_like(residual)
    pointers, constants = all_reduce_arguments(exchange)
    launch(
        _add_norm_kernel, (rows,), residual, added, bias, norm.weight, norm.bias, normed, *pointers,
        *added.stride()[:2], residual.stride(0), normed.stride(0), norm.eps,
        width, next_power_of_2(width), len(added), bias is not None, *constants,
        num_warps=16, pdl=True,
    )  # fmt: skip
    return normed


def embed_norm(
    tokens: Tensor, positions: Tensor, words: Tensor, places: Tensor, norm: Any
) -> tuple[Tensor, Tensor]:
    """Return the residual stream of tokens at positions, and the normed residual."""
    width = words.shape[1]
    residual = words.new_empty((len(tokens), width))
    normed = torch.empty_like(residual)
    launch(
        _embed_norm_kernel, (len(tokens),),
        tokens, positions, words, places, norm.weight, norm.bias, residual, normed,
        positions.stride(0), words.stride(0), places.stride(0), residual.stride(0),
        normed.stride(0), norm.eps, width, next_power_of_2(width),
        num_warps=16, pdl=True,
    )  # fmt: skip
    return residual, normed


# RMS norms before or after adding to the residual stream, between two linear layers.


_ROWS_PER_PROGRAM = 4
"""Rows per program, of many rows.

8,192 rows of 2,048 take 21 us on an H200, and 26 us with one row per program.
"""


def _added_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count the rows that are read, added to and normed, and the norm's vector."""
    rows, width = arguments["residual"].shape
    residual, normed = (num_bytes(arguments[name], rows * width) for name in ("residual", "normed"))
    return {
        "residual": 2 * residual,
        "added": num_bytes(arguments["added"], arguments["PARTS"] * rows * width),
        "normed": normed,
        "gain": num_bytes(arguments["gain"], width),
        **exchange_traffic(arguments),
    }


def _rms_embedded_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count the rows that are read of the table, and the rows that are written."""
    rows, width = arguments["residual"].shape
    matrices = ("words", "residual", "normed")
    return {
        "tokens": num_bytes(arguments["tokens"], rows),
        **{name: num_bytes(arguments[name], rows * width) for name in matrices},
        "gain": num_bytes(arguments["gain"], width),
    }


def _rms_normed_traffic(arguments: LaunchArguments) -> dict[str, int]:
    rows, width = arguments["x"].shape
    matrices = {name: num_bytes(arguments[name], rows * width) for name in ("x", "normed")}
    return {**matrices, "gain": num_bytes(arguments["gain"], width)}


@triton.jit
def _rms_normalize(x, gain, dtype: tl.constexpr, N: tl.constexpr, epsilon):
    """Norm a row, rounded where the model's own modules round.

    Compilers divide by a constant in more than one way, so the mean is computed by multiplication.
    """
    x = x * tl.rsqrt(tl.fma(tl.sum(x * x, 0), 1.0 / N, epsilon))
    return (x.to(dtype).to(tl.float32) * gain).to(dtype)


@declare_traffic(_added_traffic)
@triton.jit
def _add_kernel(
    residual, added, gain, normed, inbox, inboxes, rounds, gone,
    a_p, a_r, r_r, n_r, epsilon, times,
    N: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, TILE_N)
    inside = n < N
    g = tl.load(gain + n, inside, other=0.0).to(tl.float32)
    if RANKS > 1:
        places = load_inbox_addresses(inboxes, RANKS)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual + row * r_r + n, inside, other=0.0).to(tl.float32)
    total = tl.zeros((TILE_N,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(added + part * a_p + row * a_r + n, inside, other=0.0).to(tl.float32)
    if RANKS > 1:
        total = all_reduce_row(
            total, row, inbox, places, rounds, gone, residual.dtype.element_ty,
            N, ROWS, RANK, RANKS, TOGETHER,
        )  # fmt: skip
    x = (x + total * times).to(residual.dtype.element_ty)
    tl.store(residual + row * r_r + n, x, inside)
    dtype: tl.constexpr = normed.dtype.element_ty
    tl.store(normed + row * n_r + n, _rms_normalize(x.to(tl.float32), g, dtype, N, epsilon), inside)


def _behind_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count the rows that are read, normed and added to, and the norm's vector."""
    rows, width = arguments["residual"].shape
    return {
        "residual": 2 * num_bytes(arguments["residual"], rows * width),
        "added": num_bytes(arguments["added"], arguments["PARTS"] * rows * width),
        "gain": num_bytes(arguments["gain"], width),
    }


@declare_traffic(_behind_traffic)
@triton.jit
def _behind_kernel(
    residual, added, gain,
    a_p, a_r, r_r, epsilon,
    N: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, TILE_N)
    inside = n < N
    g = tl.load(gain + n, inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = residual.dtype.element_ty
    total = tl.zeros((TILE_N,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(added + part * a_p + row * a_r + n, inside, other=0.0).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    total = total * tl.rsqrt(tl.sum(total * total, 0) / N + epsilon) * g
    x = tl.load(residual + row * r_r + n, inside, other=0.0).to(tl.float32)
    x = x + total.to(dtype).to(tl.float32)
    tl.store(residual + row * r_r + n, x.to(dtype), inside)


@declare_traffic(_rms_embedded_traffic)
@triton.jit
def _embed_kernel(
    tokens, words, gain, residual, normed,
    w_r, r_r, n_r, epsilon, times,
    N: tl.constexpr, TILE_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, TILE_N)
    inside = n < N
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(tokens + row).to(tl.int64)
    x = tl.load(words + token * w_r + n, inside, other=0.0).to(tl.float32) * times
    x = x.to(residual.dtype.element_ty)
    tl.store(residual + row * r_r + n, x, inside)
    g = tl.load(gain + n, inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = normed.dtype.element_ty
    tl.store(normed + row * n_r + n, _rms_normalize(x.to(tl.float32), g, dtype, N, epsilon), inside)


@declare_traffic(_rms_normed_traffic)
@triton.jit
def _norm_kernel(
    x, gain, normed,
    x_r, n_r, epsilon, rows,
    N: tl.constexpr, TILE_N: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Norm rows of one program, which loads all of them before it norms the first."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    n = tl.arange(0, TILE_N)
    inside = n < N
    g = tl.load(gain + n, inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = normed.dtype.element_ty
    found = ()
    for i in tl.static_range(ROWS):
        row = first + i
        own = tl.load(x + row * x_r + n, inside & (row < rows), other=0.0)
        found = found + (own,)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(ROWS):
        row = first + i
        out = _rms_normalize(found[i].to(tl.float32), g, dtype, N, epsilon)
        tl.store(normed + row * n_r + n, out, inside & (row < rows))


def add_rms_norm(
    residual: Tensor,
    added: Tensor,
    gain: Tensor,
    epsilon: float,
    times: float = 1.0,
    exchange: AllReduceBuffers | None = None,
) -> Tensor:
    """Add ``times`` the sum of ``[parts, rows, width]`` to the residual; return it normed.

    With all-reduce buffers, the sum is over the parts of all ranks, which call this alike.
    """
    rows, width = residual.shape
    normed = torch.empty_like(residual)
    pointers, constants = all_reduce_arguments(exchange)
    launch(
        _add_kernel, (rows,), residual, added, gain, normed, *pointers,
        *added.stride()[:2], residual.stride(0), normed.stride(0), epsilon, times,
        width, next_power_of_2(width), len(added), *constants,
        num_warps=num_row_warps(width), pdl=True,
    )  # fmt: skip
    return normed


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Norm many rows, without adding to them."""
    rows, width = x.shape
    normed = torch.empty_like(x)
    launch(
        _norm_kernel, (cdiv(rows, _ROWS_PER_PROGRAM),), x, gain, normed,
        x.stride(0), normed.stride(0), epsilon, rows,
        width, next_power_of_2(width), _ROWS_PER_PROGRAM, num_warps=num_row_warps(width), pdl=True,
    )  # fmt: skip
    return normed


def rms_norm_then_add(residual: Tensor, added: Tensor, gain: Tensor, epsilon: float) -> None:
    """Norm the sum of ``[parts, rows, width]``, and add it to the residual."""
    rows, width = residual.shape
    launch(
        _behind_kernel, (rows,), residual, added, gain,
        *added.stride()[:2], residual.stride(0), epsilon,
        width, next_power_of_2(width), len(added), num_warps=num_row_warps(width), pdl=True,
    )  # fmt: skip


def embed_rms_norm(
    tokens: Tensor, words: Tensor, gain: Tensor, epsilon: float, times: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the residual stream of tokens, ``times`` their embeddings, and the normed residual."""
    width = words.shape[1]
    residual = words.new_empty((len(tokens), width))
    normed = torch.empty_like(residual)
    launch(
        _embed_kernel, (len(tokens),), tokens, words, gain, residual, normed,
        words.stride(0), residual.stride(0), normed.stride(0), epsilon, times,
        width, next_power_of_2(width), num_warps=num_row_warps(width), pdl=True,
    )  # fmt: skip
    return residual, normed


def num_row_warps(width: int) -> int:
    """Return the warps of a program, which fix the order in which a row's squares are added up."""
    return 16 if width > 1024 else 4
