"""Norms and rotary embeddings of the heads of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from roseinfer.kernels.kernel import kernel, strides
from roseinfer.kernels.runtime import next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.kernel import TrafficTable
    from roseinfer.layer_traits import RotaryEmbedding


def angle_elements(query: Tensor, own: Tensor | None, TURN: int | None = None) -> int:
    """Return the cosines, or sines, by which rows are rotated, each by its position."""
    if TURN is None:
        TURN = 0 if own is None else own.shape[1]
    return len(query) * TURN


_ROTATE_TRAFFIC: TrafficTable = {
    "query": lambda own: 2 * own.numel(),
    "key": lambda own: 2 * own.numel(),
    "positions": lambda query: len(query),
    "cosines": angle_elements,
    "sines": angle_elements,
    **dict.fromkeys(
        ("query_norm_weight", "key_norm_weight"),
        lambda own, NORMED: own.numel() if NORMED else 0,
    ),
}


@triton.jit
def load_rotated(
    heads, at, dims, position, cosines, sines, gain, epsilon,
    HEADS: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr, NORMED: tl.constexpr,
    ACROSS_HEADS: tl.constexpr,
):  # fmt: skip
    """Load ``[heads, dims]`` at the heads' addresses, normed and rotated, in float32.

    ``at`` numbers the heads. Those from HEADS on, and dims after the end of a head, are 0.
    """
    dtype = heads.dtype.element_ty
    HALF: tl.constexpr = TURN // 2
    inside = (at < HEADS)[:, None] & (dims < D)[None, :]
    turns = dims < TURN
    across = tl.where(dims < HALF, dims + HALF, tl.where(turns, dims - HALF, dims))
    x = tl.load(heads[:, None] + dims[None, :], inside, other=0.0).to(tl.float32)
    y = tl.load(heads[:, None] + across[None, :], inside, other=0.0).to(tl.float32)
    if NORMED and ACROSS_HEADS:
        shrink = tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / (HEADS * D) + epsilon)
        gains = gain + at[:, None] * D
        own = tl.load(gains + dims[None, :], inside, other=0.0).to(tl.float32)
        other = tl.load(gains + across[None, :], inside, other=0.0).to(tl.float32)
        x = (x * shrink * own).to(dtype).to(tl.float32)
        y = (y * shrink * other).to(dtype).to(tl.float32)
    elif NORMED:
        shrink = tl.rsqrt(tl.sum(x * x, 1) / D + epsilon)[:, None]
        own = tl.load(gain + dims, dims < D, other=0.0).to(tl.float32)[None, :]
        other = tl.load(gain + across, dims < D, other=0.0).to(tl.float32)[None, :]
        x = ((x * shrink).to(dtype).to(tl.float32) * own).to(dtype).to(tl.float32)
        y = ((y * shrink).to(dtype).to(tl.float32) * other).to(dtype).to(tl.float32)
    cosine = tl.load(cosines + position * TURN + dims, turns, other=1.0).to(tl.float32)
    sine = tl.load(sines + position * TURN + dims, turns, other=0.0).to(tl.float32)
    sine = tl.where(dims < HALF, -sine, sine)
    return x * cosine[None, :] + y * sine[None, :]


@kernel(_ROTATE_TRAFFIC)
def _rotate_kernel(
    query, key, positions, cosines, sines, query_norm_weight, key_norm_weight, epsilon,
    TURN: tl.constexpr, NORMED: tl.constexpr, ACROSS_HEADS: tl.constexpr,
    q_s, q_h, k_s, k_h, p_s,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, D: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, TILE_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token: of queries, of keys, or of both."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, TILE_D)
    q, k = tl.arange(0, TILE_Q), tl.arange(0, TILE_K)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + token * p_s).to(tl.int64)
    whole = (dims < D)[None, :]
    queries = query + token * q_s + q * q_h
    keys = key + token * k_s + k * k_h
    if Q_HEADS:
        rotated_q = load_rotated(
            queries, q, dims, position, cosines, sines, query_norm_weight, epsilon,
            Q_HEADS, D, TURN, NORMED, ACROSS_HEADS,
        )  # fmt: skip
    if K_HEADS:
        rotated_k = load_rotated(
            keys, k, dims, position, cosines, sines, key_norm_weight, epsilon,
            K_HEADS, D, TURN, NORMED, ACROSS_HEADS,
        )  # fmt: skip
    # A head is read by several threads, each of which may be later than those that write it.
    tl.debug_barrier()
    if Q_HEADS:
        tl.store(
            queries[:, None] + dims[None, :], rotated_q.to(query.dtype.element_ty),
            (q < Q_HEADS)[:, None] & whole,
        )  # fmt: skip
    if K_HEADS:
        tl.store(
            keys[:, None] + dims[None, :], rotated_k.to(key.dtype.element_ty),
            (k < K_HEADS)[:, None] & whole,
        )  # fmt: skip


def rotate(
    query: Tensor | None, key: Tensor | None, positions: Tensor, rotation: RotaryEmbedding
) -> None:
    """Norm and rotate ``[tokens, heads, head_dim]`` in place; elements of heads are contiguous.

    Either may be None; only the other is rotated then.
    """
    either = query if query is not None else key
    assert either is not None
    query, key = (either[:, :0] if each is None else each for each in (query, key))
    tokens, q_heads, head_dim = query.shape
    k_heads = key.shape[1]
    norm_weights = rotation.query_norm_weight, rotation.key_norm_weight
    query_norm_weight, key_norm_weight = (
        either if each is None else each
        for each in norm_weights  # not read without a norm
    )
    _rotate_kernel.launch(
        (tokens,), query=query, key=key, positions=positions,
        cosines=rotation.cosines, sines=rotation.sines, TURN=rotation.cosines.shape[1],
        query_norm_weight=query_norm_weight, key_norm_weight=key_norm_weight,
        epsilon=rotation.epsilon, NORMED=rotation.query_norm_weight is not None,
        ACROSS_HEADS=rotation.norm_across_heads,
        **strides("q_sh", query.stride()), **strides("k_sh", key.stride()),
        p_s=positions.stride(0), Q_HEADS=q_heads, K_HEADS=k_heads, D=head_dim,
        TILE_Q=next_power_of_2(q_heads), TILE_K=next_power_of_2(k_heads),
        TILE_D=next_power_of_2(head_dim),
    )  # fmt: skip
