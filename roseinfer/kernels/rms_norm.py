"""Adding to the residual stream between two linear layers, and RMS norms in front or behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.moves import moves, taken
from roseinfer.kernels.runtime import launch, num_tiles, power_of_two
from roseinfer.kernels.sums.add_up_ranks import (
    add_up_ranks,
    arguments,
    exchange_moved,
    places_of,
)

if TYPE_CHECKING:
    from roseinfer.kernels.moves import Given
    from roseinfer.kernels.sums.exchange import Exchange

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


def _embedded_moved(given: Given) -> dict[str, int]:
    """Count the rows of the table that are read, and what is made of them."""
    rows, width = given["residual"].shape
    matrices = ("words", "residual", "normed")
    return {
        "tokens": taken(given["tokens"], rows),
        **{name: taken(given[name], rows * width) for name in matrices},
        "gain": taken(given["gain"], width),
    }


def _normed_moved(given: Given) -> dict[str, int]:
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


@moves(_embedded_moved)
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


@moves(_normed_moved)
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
