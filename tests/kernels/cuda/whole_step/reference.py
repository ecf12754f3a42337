"""A whole step written down in torch, rounded where the kernels round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.kernels.cuda.whole_step import MegakernelLayer, MegakernelWeights, StepSizes

_LOG2_E = 1.4426950408889634


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def _normed(x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    return _rounded(_rounded(x * torch.rsqrt(x.square().mean() + epsilon)) * gain.float())


def _rotated(heads: Tensor, gain: Tensor | None, layer: MegakernelLayer, position: int) -> Tensor:
    if layer.rotation is None:
        return heads
    if gain is not None:
        epsilon = layer.rotation.epsilon
        heads = torch.stack([_normed(head, gain, epsilon) for head in heads])
    cosine, sine = (
        table[position].float() for table in (layer.rotation.cosines, layer.rotation.sines)
    )
    turning, rest = heads[:, : len(cosine)], heads[:, len(cosine) :]
    first, second = turning.chunk(2, 1)
    turned = turning * cosine + torch.cat((-second, first), 1) * sine
    return _rounded(torch.cat((turned, rest), 1))


def _attended(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attend with ``[heads, dim]`` to ``[tokens, kv_heads, dim]``."""
    group = len(query) // keys.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("hd,thd->ht", query, keys) * (scale / _LOG2_E)
    return _rounded(torch.einsum("ht,thd->hd", scores.softmax(1), values))


def step(
    sizes: StepSizes,
    weights: MegakernelWeights,
    caches: Sequence[tuple[Tensor, Tensor]],
    token: int,
    blocks: Sequence[int],
    length: int,
) -> Tensor:
    """Store a token behind ``length`` others in these blocks, and return its logits."""
    block, place = blocks[length // sizes.block_size], length % sizes.block_size
    x = _rounded(weights.words[token].float() * weights.embedding_multiplier)
    for layer, (keys, values) in zip(weights.layers, caches, strict=True):
        new = layer.qkv.float() @ _normed(x, layer.norm, weights.epsilon)
        if layer.qkv_bias is not None:
            new = new + layer.qkv_bias.float()
        heads = _rounded(new).view(-1, sizes.dim)
        q, k, v = heads.tensor_split([sizes.heads, sizes.heads + sizes.kv_heads])
        turn = layer.rotation
        q = _rotated(q, turn.query_norm_weight if turn else None, layer, length)
        k = _rotated(k, turn.key_norm_weight if turn else None, layer, length)
        keys[block, :, place], values[block, :, place] = k.to(keys.dtype), v.to(keys.dtype)
        seen_keys, seen_values = (
            cache[list(blocks)].transpose(1, 2).flatten(0, 1)[: length + 1].float()
            for cache in (keys, values)
        )
        attended = _attended(q, seen_keys, seen_values, weights.scale).flatten()
        x = _rounded(x + layer.out.float() @ attended * weights.residual_multiplier)
        both = _rounded(layer.gate_up_weight.float() @ _normed(x, layer.mlp_norm, weights.epsilon))
        gate, up = both.chunk(2)
        hidden = _rounded(_rounded(torch.nn.functional.silu(gate)) * up)
        x = _rounded(x + layer.down.float() @ hidden * weights.residual_multiplier)
    return (weights.head.float() @ _normed(x, weights.norm, weights.epsilon))[None]
