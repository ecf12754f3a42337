"""Adding to the residual stream between two linear layers, and norming it for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from roseinfer.kernels.kernel import kernel, numel, strides
from roseinfer.kernels.runtime import cdiv, next_power_of_2
from roseinfer.kernels.triton.all_reduce import (
    ALL_REDUCE_TRAFFIC,
    all_reduce_arguments,
    all_reduce_row,
    load_inbox_addresses,
)

if TYPE_CHECKING:
    from roseinfer.kernels.kernel import TrafficTable
    from roseinfer.kernels.triton.all_reduce import AllReduceBuffers


def _row_elements(residual: Tensor) -> int:
    return residual.numel()


def _twice(own: Tensor) -> int:
    """Return the elements of a tensor that is read, and written."""
    return 2 * own.numel()


# Layer norms, in which the mean is subtracted.


_ADD_NORM_TRAFFIC: TrafficTable = {
    "residual": _twice,
    **dict.fromkeys(("added", "normed", "gain", "shift"), numel),
    "bias": lambda N, BIAS: N * BIAS,
    **ALL_REDUCE_TRAFFIC,
}
_EMBED_NORM_TRAFFIC: TrafficTable = {
    **dict.fromkeys(("tokens", "positions"), lambda residual: len(residual)),
    **dict.fromkeys(("words", "places", "residual", "normed"), _row_elements),
    **dict.fromkeys(("gain", "shift"), numel),
}


@kernel(_ADD_NORM_TRAFFIC)
def _add_norm_kernel(
    residual, added, bias, gain, shift, normed, inbox, inboxes, rounds, gone,
    a_p, a_r, r_r, n_r, epsilon,
    N: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, VALUES_PER_WORD: tl.constexpr,
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
            N, ROWS, RANK, RANKS, VALUES_PER_WORD,
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


@kernel(_EMBED_NORM_TRAFFIC)
def _embed_norm_kernel(
    tokens, positions, words, places, gain, shift, residual, normed,
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
    x = tl.load(words + token * w_r + n, inside, other=0.0).to(tl.float32)
    x += tl.load(places + position * p_r + n, inside, other=0.0).to(tl.float32)
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
    _add_norm_kernel.launch(
        (rows,), num_warps=16, **all_reduce_arguments(exchange),
        residual=residual, added=added, bias=bias, gain=norm.weight, shift=norm.bias, normed=normed,
        **strides("a_pr", added.stride()), r_r=residual.stride(0), n_r=normed.stride(0),
        epsilon=norm.eps, N=width, TILE_N=next_power_of_2(width), PARTS=added.shape[0],
        BIAS=bias is not None,
    )  # fmt: skip
    return normed


def embed_norm(
    tokens: Tensor, positions: Tensor, words: Tensor, places: Tensor, norm: Any
) -> tuple[Tensor, Tensor]:
    """Return the residual stream of tokens at positions, and the normed residual."""
    width = words.shape[1]
    residual = words.new_empty((tokens.shape[0], width))
    normed = torch.empty_like(residual)
    _embed_norm_kernel.launch(
        (tokens.shape[0],), num_warps=16,
        tokens=tokens, positions=positions, words=words, places=places,
        gain=norm.weight, shift=norm.bias, residual=residual, normed=normed,
        p_s=positions.stride(0), w_r=words.stride(0), p_r=places.stride(0),
        r_r=residual.stride(0), n_r=normed.stride(0),
        epsilon=norm.eps, N=width, TILE_N=next_power_of_2(width),
    )  # fmt: skip
    return residual, normed


# RMS norms before or after adding to the residual stream, between two linear layers.


_ROWS_PER_PROGRAM = 4
"""Rows per program, of many rows.

8,192 rows of 2,048 take 21 us on an H200, and 26 us with one row per program.
"""


_ADD_TRAFFIC: TrafficTable = {
    "residual": _twice,
    **dict.fromkeys(("added", "normed", "gain"), numel),
    **ALL_REDUCE_TRAFFIC,
}
_NORM_THEN_ADD_TRAFFIC: TrafficTable = {"residual": _twice, "added": numel, "gain": numel}
_EMBED_TRAFFIC: TrafficTable = {
    "tokens": lambda residual: len(residual),
    **dict.fromkeys(("words", "residual", "normed"), _row_elements),
    "gain": numel,
}


@triton.jit
def _rms_normalize(x, gain, dtype: tl.constexpr, N: tl.constexpr, epsilon):
    """Norm a row, rounded where the model's own modules round.

    Compilers divide by a constant in more than one way, so the mean is computed by multiplication.
    """
    x = x * tl.rsqrt(tl.fma(tl.sum(x * x, 0), 1.0 / N, epsilon))
    return (x.to(dtype).to(tl.float32) * gain).to(dtype)


@kernel(_ADD_TRAFFIC)
def _add_kernel(
    residual, added, gain, normed, inbox, inboxes, rounds, gone,
    a_p, a_r, r_r, n_r, epsilon, times,
    N: tl.constexpr, TILE_N: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, VALUES_PER_WORD: tl.constexpr,
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
            N, ROWS, RANK, RANKS, VALUES_PER_WORD,
        )  # fmt: skip
    x = (x + total * times).to(residual.dtype.element_ty)
    tl.store(residual + row * r_r + n, x, inside)
    dtype: tl.constexpr = normed.dtype.element_ty
    tl.store(normed + row * n_r + n, _rms_normalize(x.to(tl.float32), g, dtype, N, epsilon), inside)


@kernel(_NORM_THEN_ADD_TRAFFIC)
def _norm_then_add_kernel(
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


@kernel(_EMBED_TRAFFIC)
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


@kernel({"x": numel, "normed": numel, "gain": numel}, do_not_specialize=["rows"])
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
    loaded = ()
    for i in tl.static_range(ROWS):
        row = first + i
        own = tl.load(x + row * x_r + n, inside & (row < rows), other=0.0)
        loaded = loaded + (own,)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(ROWS):
        row = first + i
        out = _rms_normalize(loaded[i].to(tl.float32), g, dtype, N, epsilon)
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
    _add_kernel.launch(
        (rows,), num_warps=num_row_warps(width), **all_reduce_arguments(exchange),
        residual=residual, added=added, gain=gain, normed=normed,
        **strides("a_pr", added.stride()), r_r=residual.stride(0), n_r=normed.stride(0),
        epsilon=epsilon, times=times, N=width, TILE_N=next_power_of_2(width), PARTS=added.shape[0],
    )  # fmt: skip
    return normed


def rms_norm(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """Norm many rows, without adding to them."""
    rows, width = x.shape
    normed = torch.empty_like(x)
    _norm_kernel.launch(
        (cdiv(rows, _ROWS_PER_PROGRAM),), num_warps=num_row_warps(width),
        x=x, gain=gain, normed=normed, x_r=x.stride(0), n_r=normed.stride(0),
        epsilon=epsilon, rows=rows, N=width, TILE_N=next_power_of_2(width), ROWS=_ROWS_PER_PROGRAM,
    )  # fmt: skip
    return normed


def rms_norm_then_add(residual: Tensor, added: Tensor, gain: Tensor, epsilon: float) -> None:
    """Norm the sum of ``[parts, rows, width]``, and add it to the residual."""
    rows, width = residual.shape
    _norm_then_add_kernel.launch(
        (rows,), num_warps=num_row_warps(width),
        residual=residual, added=added, gain=gain,
        **strides("a_pr", added.stride()), r_r=residual.stride(0),
        epsilon=epsilon, N=width, TILE_N=next_power_of_2(width), PARTS=added.shape[0],
    )  # fmt: skip


def embed_rms_norm(
    tokens: Tensor, words: Tensor, gain: Tensor, epsilon: float, times: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the residual stream of tokens, ``times`` their embeddings, and the normed residual."""
    width = words.shape[1]
    residual = words.new_empty((tokens.shape[0], width))
    normed = torch.empty_like(residual)
    _embed_kernel.launch(
        (tokens.shape[0],), num_warps=num_row_warps(width),
        tokens=tokens, words=words, gain=gain, residual=residual, normed=normed,
        w_r=words.stride(0), r_r=residual.stride(0), n_r=normed.stride(0),
        epsilon=epsilon, times=times, N=width, TILE_N=next_power_of_2(width),
    )  # fmt: skip
    return residual, normed


def num_row_warps(width: int) -> int:
    """Return the warps of a program, which fix the order in which a row's squares are added up."""
    return 16 if width > 1024 else 4
