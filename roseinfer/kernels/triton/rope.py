"""Norms and rotary embeddings of the heads of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from roseinfer.kernels.runtime import launch, next_power_of_2
from roseinfer.kernels.traffic import declare_traffic, num_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.kernels.traffic import LaunchArguments
    from roseinfer.layer_traits import RotaryEmbedding


class RotaryArguments(NamedTuple):
    """Arguments of a kernel that rotates heads, in its order of parameters."""

    cosines: Tensor
    sines: Tensor
    query_norm_weight: Tensor
    key_norm_weight: Tensor
    epsilon: float
    rotary_dim: int
    """Rotated elements of a head; 0 without a rotation."""
    has_head_norm: bool
    norm_across_heads: bool
    """True where all heads of a token are normed as one row."""


def rotary_arguments(rotation: RotaryEmbedding | None, unused: Tensor) -> RotaryArguments:
    """Return the arguments; ``unused`` stands for what a layer does not have."""
    if rotation is None:
        return RotaryArguments(unused, unused, unused, unused, 0.0, 0, False, False)
    query, key = rotation.query_norm_weight, rotation.key_norm_weight
    return RotaryArguments(
        rotation.cosines,
        rotation.sines,
        unused if query is None else query,
        unused if key is None else key,
        rotation.epsilon,
        rotation.cosines.shape[1],
        query is not None,
        rotation.norm_across_heads,
    )


def rotation_traffic(arguments: LaunchArguments, rows: int) -> dict[str, int]:
    """Return the bytes of the norms, and of the angles of ``rows`` positions."""
    traffic = {
        name: num_bytes(arguments[name], rows * arguments["TURN"]) for name in ("cosines", "sines")
    }
    if arguments["NORMED"]:
        traffic |= {
            name: num_bytes(arguments[name], arguments[name].numel())
            for name in ("query_norm_weight", "key_norm_weight")
        }
    return traffic


@triton.jit
def load_rotated(
    heads, at, dims, position, cosines, sines, gain, epsilon,
    HEADS: tl.constexpr, D: tl.constexpr, TURN: tl.constexpr, NORMED: tl.constexpr,
    TOGETHER: tl.constexpr,
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
    if NORMED and TOGETHER:
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


def _rotated_traffic(arguments: LaunchArguments) -> dict[str, int]:
    """Count every head twice, read and written, and the angles and norms."""
    tokens = len(arguments["positions"])
    heads = {"query": arguments["Q_HEADS"], "key": arguments["K_HEADS"]}
    traffic = {
        name: 2 * num_bytes(arguments[name], tokens * count * arguments["D"])
        for name, count in heads.items()
    }
    traffic["positions"] = num_bytes(arguments["positions"], tokens)
    return traffic | rotation_traffic(arguments, tokens)


@declare_traffic(_rotated_traffic)
@triton.jit
def _rotate_kernel(
    query, key, positions, cosines, sines, query_norm_weight, key_norm_weight, epsilon,
    TURN: tl.constexpr, NORMED: tl.constexpr, TOGETHER: tl.constexpr,
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
        turned_q = load_rotated(
            queries, q, dims, position, cosines, sines, query_norm_weight, epsilon,
            Q_HEADS, D, TURN, NORMED, TOGETHER,
        )  # fmt: skip
    if K_HEADS:
        turned_k = load_rotated(
            keys, k, dims, position, cosines, sines, key_norm_weight, epsilon,
            K_HEADS, D, TURN, NORMED, TOGETHER,
        )  # fmt: skip
    # A head is read by several threads, each of which may be later than those that write it.
    tl.debug_barrier()
    if Q_HEADS:
        tl.store(
            queries[:, None] + dims[None, :], turned_q.to(query.dtype.element_ty),
            (q < Q_HEADS)[:, None] & whole,
        )  # fmt: skip
    if K_HEADS:
        tl.store(
            keys[:, None] + dims[None, :], turned_k.to(key.dtype.element_ty),
            (k < K_HEADS)[:, None] & whole,
        )  # fmt: skip


def rotate(
    query: Tensor | None, key: Tensor | None, positions: Tensor, rotation: RotaryEmbedding
) -> None:
    """Norm and rotate ``[tokens, heads, head_dim]`` in place; elements of heads are contiguous.

    Either may be None; only the other is rotated then.
    """
    given = query if query is not None else key
    assert given is not None
    query, key = (given[:, :0] if each is None else each for each in (query, key))
    tokens, q_heads, head_dim = query.shape
    k_heads = key.shape[1]
    arguments = rotary_arguments(rotation, given)
    launch(
        _rotate_kernel, (tokens,), query, key, positions, *arguments,
        *query.stride()[:2], *key.stride()[:2], positions.stride(0),
        q_heads, k_heads, head_dim,
        next_power_of_2(q_heads), next_power_of_2(k_heads),
        next_power_of_2(head_dim), num_warps=4, pdl=True,
    )  # fmt: skip
