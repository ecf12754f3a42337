"""Llama and its kin by few torch operations a layer, for a CPU.

There a step of few tokens takes as long for calls of modules as for reading weights. Weights that
multiply the same rows are joined, and positions are looked up once a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu

from roseinfer.models.causal import CausalModel
from roseinfer.models.llama_weights import (
    LLAMA_CLASSES,
    LlamaLayer,
    has_supported_layers,
    join_gate_up,
    join_layer,
    rotary_tables,
)
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend


class _JoinedMlp(NamedTuple):
    gate_up: Tensor
    down: Tensor


class JoinedLlama(CausalModel):
    """A model of Llama's family that takes half the torch operations of its own modules."""

    paths = (EnginePath.JOINED,)

    @staticmethod
    def is_supported(model: Any) -> bool:
        """Return True for a model of the family without unusual settings."""
        return type(model).__name__ in LLAMA_CLASSES and has_supported_layers(model)

    def __init__(self, model: Any, *, max_length: int | None = None) -> None:
        super().__init__(model, max_length=max_length)
        self._embedding_multiplier = float(getattr(model.config, "embedding_multiplier", 1.0))
        self._residual_multiplier = float(getattr(model.config, "residual_multiplier", 1.0))
        self._logits_scaling = float(getattr(model.config, "logits_scaling", 1.0))
        tables = rotary_tables(model, self.shape.max_length)
        with torch.no_grad():
            self._layers = [_join_layer(layer, tables) for layer in model.model.layers]
            cosines, sines = tables
            first, second = sines.chunk(2, -1)
            self._cosines, self._signed_sines = cosines, torch.cat((-first, second), -1)

    @torch.inference_mode()
    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_rows: Tensor | None,
        attention: AttentionBackend,
    ) -> Tensor:
        body = self._model.model
        residual = embedding(token_ids, body.embed_tokens.weight) * self._embedding_multiplier
        angles = self._cosines[positions][:, None], self._signed_sines[positions][:, None]
        for at, layer in enumerate(self._layers):
            x = self._attend(at, _normed(residual, layer.norm), angles, attention)
            residual = self._add(residual, x, layer.out)
            x = linear(_normed(residual, layer.mlp_norm), layer.mlp.gate_up)
            gate, up = x.chunk(2, -1)
            residual = self._add(residual, silu(gate).mul_(up), layer.mlp.down)
        if last_rows is not None:
            residual = residual[last_rows]
        logits: Tensor = self._model.lm_head(_normed(residual, body.norm))
        return logits if self._logits_scaling == 1 else logits / self._logits_scaling

    def _add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Add a GEMM to the residual stream."""
        return torch.addmm(residual, x, weight.T, alpha=self._residual_multiplier)

    def _attend(
        self, at: int, x: Tensor, angles: tuple[Tensor, Tensor], attention: AttentionBackend
    ) -> Tensor:
        layer, kv_heads = self._layers[at], self.shape.num_kv_heads
        new = linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.shape.head_dim)
        query, key, value = new.tensor_split([-2 * kv_heads, -kv_heads], 1)
        rotation = layer.rotation
        if rotation is not None and rotation.query_norm_weight is None:
            _rotate(new[:, :-kv_heads], *angles)  # queries and keys at once
        elif rotation is not None:
            shape = (self.shape.head_dim,)
            query = rms_norm(query, shape, rotation.query_norm_weight, rotation.epsilon)
            key = rms_norm(key, shape, rotation.key_norm_weight, rotation.epsilon)
            _rotate(query, *angles)
            _rotate(key, *angles)
        return attention.store_and_attend(at, query, key, value).flatten(1)


def _join_layer(layer: Any, tables: list[Tensor]) -> LlamaLayer[_JoinedMlp]:
    norms = layer.input_layernorm, layer.post_attention_layernorm
    mlp = _JoinedMlp(join_gate_up(layer.mlp), layer.mlp.down_proj.weight)
    return join_layer(layer, norms, tables, mlp)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _rotate(heads: Tensor, cosines: Tensor, signed_sines: Tensor) -> None:
    """Rotate the first elements of heads in place.

    Elements are exchanged with those half a width on; the sines of the first half are negated.
    """
    width = cosines.shape[-1]
    rotary = heads[..., :width]
    exchanged = rotary.roll(width // 2, -1)
    rotary.mul_(cosines).addcmul_(exchanged, signed_sines)
