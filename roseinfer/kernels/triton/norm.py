"""Adding to the residual stream between two linear layers, and norming it for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.runtime import launch, num_tiles, power_of_two
from roseinfer.kernels.traffic import moves, taken

if TYPE_CHECKING:
    from roseinfer.kernels.exchange import Exchange
    from roseinfer.kernels.traffic import Given

# Adds up a row over ranks inside of a kernel, through memory that all of their GPUs write to.
#
# Each rank has an inbox. A program writes its row's numbers to the inboxes of the others, one or
# two in a word together with a stamp, and waits until the words of the others have come to its own.
# A word is written at once, so who sees the stamp sees the numbers: there are no flags and no
# fences.


def arguments(
    exchange: Exchange | None,
) -> tuple[tuple[Tensor | None, ...], tuple[int, int, int, int]]:
    """Return a kernel's arguments for an exchange, pointers and constants, or for none."""
    if exchange is None:
        return (None, None, None, None), (0, 0, 1, 1)
    return exchange.pointers, exchange.constants


def exchange_moved(given: Given) -> dict[str, int]:
    """Count what comes from other ranks. What goes to them is written to their GPUs' memory."""
    others = given["RANKS"] - 1
    if not others:
        return {}
    rows, width = given["residual"].shape
    return {
        "inbox": taken(given["inbox"], others * rows * (width // given["TOGETHER"])),
        "inboxes": taken(given["inboxes"], given["RANKS"]),
        "rounds": 2 * taken(given["rounds"], rows),
    }


@triton.jit
def _are_missing(words, stamp, inside):
    """Tell if some words have another stamp."""
    return tl.max((inside & ((words >> 32).to(tl.int32) != stamp)).to(tl.int32), 0) > 0


@triton.jit
def _packed(numbers, TOGETHER: tl.constexpr):
    """Put the numbers that a word carries into the lower half of one."""
    if TOGETHER == 1:
        packed = numbers.to(tl.float32).to(tl.uint32, bitcast=True).to(tl.int64)
    else:  # the compiler looks at what follows a return
        PAIRS: tl.constexpr = numbers.shape[0] // 2
        bits = numbers.to(tl.uint16, bitcast=True).to(tl.int64)
        low, high = tl.split(tl.reshape(bits, (PAIRS, 2)))
        packed = low | (high << 16)
    return packed


@triton.jit
def _unpacked(words, dtype: tl.constexpr, TOGETHER: tl.constexpr):
    """Return in float32 the numbers that words carry."""
    if TOGETHER == 1:
        numbers = words.to(tl.int32).to(tl.float32, bitcast=True)
    else:
        bits = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
        pairs = bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
        numbers = tl.reshape(pairs, (2 * words.shape[0],))
    return numbers


@triton.jit
def places_of(inboxes, RANKS: tl.constexpr):
    """Load where the inboxes of all ranks are, which no launch changes."""
    places = ()
    for rank in tl.static_range(RANKS):
        places = places + (tl.load(inboxes + rank),)  # type: ignore[assignment]  # noqa: RUF005
    return places


@triton.jit
def add_up_ranks(
    own, row, inbox, places, rounds, gone, dtype: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add up what all ranks have of a row, in their order: all get the same bits.

    What a rank has is rounded, and so is the sum, as where the model's own modules are shared.

    Rounds of a row take turns with two places. Who writes to a place has taken the round before
    from everybody. They sent it in a later launch than the one that read the place last, and a
    launch writes nothing before those in front of it have ended. So what is written over was read,
    and a place holds the words of this round, or those of two rounds ago with another stamp.
    That stays so where the count goes on from the largest number to the smallest.
    """
    stamp = tl.load(rounds + row) + 1
    WORDS: tl.constexpr = N // TOGETHER
    TILE: tl.constexpr = own.shape[0] // TOGETHER
    SIZE: tl.constexpr = ROWS * WORDS
    w = tl.arange(0, TILE)
    inside = w < WORDS
    begin = (stamp & 1).to(tl.int64) * (RANKS * SIZE) + row * WORDS
    own = own.to(dtype)
    words = (stamp.to(tl.int64) << 32) | _packed(own, TOGETHER)
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
            total += _unpacked(come, dtype, TOGETHER)
    tl.debug_barrier()  # every warp has read how many rounds there were
    tl.store(rounds + row, stamp)
    return total.to(dtype).to(tl.float32)


def _normed_moved(given: Given) -> dict[str, int]:
    """Count the rows that are read, added to and normed, and what norms them."""
    rows, width = given["residual"].shape
    residual, normed = (taken(given[name], rows * width) for name in ("residual", "normed"))
    moved = {
        "residual": 2 * residual,
        "added": taken(given["added"], given["PARTS"] * rows * width),
        "normed": normed,
        **exchange_moved(given),
    }
    vectors = ("gain", "shift", "bias") if given["BIAS"] else ("gain", "shift")
    return moved | {name: taken(given[name], width) for name in vectors}


def _embedded_moved(given: Given) -> dict[str, int]:
    """Count the rows of the two tables that are read, and what is made of them."""
    rows, width = given["residual"].shape
    matrices = ("word", "place", "residual", "normed")
    return {
        **{name: taken(given[name], rows) for name in ("tokens", "positions")},
        **{name: taken(given[name], rows * width) for name in matrices},
        **{name: taken(given[name], width) for name in ("gain", "shift")},
    }


@moves(_normed_moved)
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
        places = places_of(inboxes, RANKS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual + row * r_r + n, inside, other=0.0).to(tl.float32)
    if RANKS > 1:
        total = tl.zeros((TILE_N,), tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(added + part * a_p + row * a_r + n, inside, other=0.0).to(tl.float32)
        x += add_up_ranks(
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


@moves(_embedded_moved)
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
    exchange: Exchange | None = None,
) -> Tensor:
    """Add ``[parts, rows, width]`` and a bias to the residual in place; return it normed.

    With an exchange the parts are those of all ranks, which call this alike.
    """
    rows, width = residual.shape
    normed = torch.empty_like(residual)
    pointers, constants = arguments(exchange)
    launch(
        _add_norm_kernel, (rows,), residual, added, bias, norm.weight, norm.bias, normed, *pointers,
        *added.stride()[:2], residual.stride(0), normed.stride(0), norm.eps,
        width, power_of_two(width), len(added), bias is not None, *constants,
        num_warps=16, early=True,
    )  # fmt: skip
    return normed


def embed_norm(
    tokens: Tensor, positions: Tensor, words: Tensor, places: Tensor, norm: Any
) -> tuple[Tensor, Tensor]:
    """Return the residual stream of tokens at positions, and that normed."""
    width = words.shape[1]
    residual = words.new_empty((len(tokens), width))
    normed = torch.empty_like(residual)
    launch(
        _embed_norm_kernel, (len(tokens),),
        tokens, positions, words, places, norm.weight, norm.bias, residual, normed,
        positions.stride(0), words.stride(0), places.stride(0), residual.stride(0),
        normed.stride(0), norm.eps, width, power_of_two(width),
        num_warps=16, early=True,
    )  # fmt: skip
    return residual, normed


# Adding to the residual stream between two linear layers, and RMS norms in front or behind.


_ROWS_AT_ONCE = 4
"""Of many rows a program takes so many: 21 us for 8,192 of 2,048 on an H200, and 26 one by one."""


def _added_moved(given: Given) -> dict[str, int]:
    """Count the rows that are read, added to and normed, and what norms them."""
    rows, width = given["residual"].shape
    residual, normed = (taken(given[name], rows * width) for name in ("residual", "normed"))
    return {
        "residual": 2 * residual,
        "added": taken(given["added"], given["PARTS"] * rows * width),
        "normed": normed,
        "gain": taken(given["gain"], width),
        **exchange_moved(given),
    }


def _rms_embedded_moved(given: Given) -> dict[str, int]:
    """Count the rows of the table that are read, and what is made of them."""
    rows, width = given["residual"].shape
    matrices = ("words", "residual", "normed")
    return {
        "tokens": taken(given["tokens"], rows),
        **{name: taken(given[name], rows * width) for name in matrices},
        "gain": taken(given["gain"], width),
    }


def _rms_normed_moved(given: Given) -> dict[str, int]:
    rows, width = given["x"].shape
    matrices = {name: taken(given[name], rows * width) for name in ("x", "normed")}
    return {**matrices, "gain": taken(given["gain"], width)}


@triton.jit
def _normed(x, gain, dtype: tl.constexpr, N: tl.constexpr, epsilon):
    """Norm a row, rounded where the model's own modules round.

    Compilers divide by a constant in more than one way, so the mean is a product.
    """
    x = x * tl.rsqrt(tl.fma(tl.sum(x * x, 0), 1.0 / N, epsilon))
    return (x.to(dtype).to(tl.float32) * gain).to(dtype)


@moves(_added_moved)
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
        places = places_of(inboxes, RANKS)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(residual + row * r_r + n, inside, other=0.0).to(tl.float32)
    total = tl.zeros((TILE_N,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(added + part * a_p + row * a_r + n, inside, other=0.0).to(tl.float32)
    if RANKS > 1:
        total = add_up_ranks(
            total, row, inbox, places, rounds, gone, residual.dtype.element_ty,
            N, ROWS, RANK, RANKS, TOGETHER,
        )  # fmt: skip
    x = (x + total * times).to(residual.dtype.element_ty)
    tl.store(residual + row * r_r + n, x, inside)
    dtype: tl.constexpr = normed.dtype.element_ty
    tl.store(normed + row * n_r + n, _normed(x.to(tl.float32), g, dtype, N, epsilon), inside)


def _behind_moved(given: Given) -> dict[str, int]:
    """Count the rows that are read, normed and added to, and what norms them."""
    rows, width = given["residual"].shape
    return {
        "residual": 2 * taken(given["residual"], rows * width),
        "added": taken(given["added"], given["PARTS"] * rows * width),
        "gain": taken(given["gain"], width),
    }


@moves(_behind_moved)
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


@moves(_rms_embedded_moved)
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
    tl.store(normed + row * n_r + n, _normed(x.to(tl.float32), g, dtype, N, epsilon), inside)


@moves(_rms_normed_moved)
@triton.jit
def _norm_kernel(
    x, gain, normed,
    x_r, n_r, epsilon, rows,
    N: tl.constexpr, TILE_N: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program asks for all of its rows before it norms the first of them."""
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
        out = _normed(found[i].to(tl.float32), g, dtype, N, epsilon)
        tl.store(normed + row * n_r + n, out, inside & (row < rows))


def add_rms_norm(
    residual: Tensor,
    added: Tensor,
    gain: Tensor,
    epsilon: float,
    times: float = 1.0,
    exchange: Exchange | None = None,
) -> Tensor:
    """Add ``times`` the sum of ``[parts, rows, width]`` to the residual; return it normed.

    With an exchange the sum is that over the parts of all ranks, which call this alike.
    """
    rows, width = residual.shape
    normed = torch.empty_like(residual)
    pointers, constants = arguments(exchange)
    launch(
        _add_kernel, (rows,), residual, added, gain, normed, *pointers,
        *added.stride()[:2], residual.stride(0), normed.stride(0), epsilon, times,
        width, power_of_two(width), len(added), *constants,
        num_warps=warps_of_row(width), early=True,
    )  # fmt: skip
    return normed


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Norm many rows, to which nothing is left to be added."""
    rows, width = x.shape
    normed = torch.empty_like(x)
    launch(
        _norm_kernel, (num_tiles(rows, _ROWS_AT_ONCE),), x, gain, normed,
        x.stride(0), normed.stride(0), epsilon, rows,
        width, power_of_two(width), _ROWS_AT_ONCE, num_warps=warps_of_row(width), early=True,
    )  # fmt: skip
    return normed


def add_behind_rms_norm(residual: Tensor, added: Tensor, gain: Tensor, epsilon: float) -> None:
    """Norm the sum of ``[parts, rows, width]``, and add that to the residual."""
    rows, width = residual.shape
    launch(
        _behind_kernel, (rows,), residual, added, gain,
        *added.stride()[:2], residual.stride(0), epsilon,
        width, power_of_two(width), len(added), num_warps=warps_of_row(width), early=True,
    )  # fmt: skip


def embed_rms_norm(
    tokens: Tensor, words: Tensor, gain: Tensor, epsilon: float, times: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the residual stream of tokens, ``times`` their embeddings, and that normed."""
    width = words.shape[1]
    residual = words.new_empty((len(tokens), width))
    normed = torch.empty_like(residual)
    launch(
        _embed_kernel, (len(tokens),), tokens, words, gain, residual, normed,
        words.stride(0), residual.stride(0), normed.stride(0), epsilon, times,
        width, power_of_two(width), num_warps=warps_of_row(width), early=True,
    )  # fmt: skip
    return residual, normed


def warps_of_row(width: int) -> int:
    """Return the warps of a program, which decide in what order a row's squares are added up."""
    return 16 if width > 1024 else 4
