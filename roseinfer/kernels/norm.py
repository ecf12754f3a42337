"""Adding to the residual stream between two linear layers, and norming it for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.moves import moves, taken
from roseinfer.kernels.runtime import launch, power_of_two
from roseinfer.kernels.sums.add_up_ranks import (
    add_up_ranks,
    arguments,
    exchange_moved,
    places_of,
)

if TYPE_CHECKING:
    from roseinfer.kernels.moves import Given
    from roseinfer.kernels.sums.exchange import Exchange


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
