"""OLMo 2 on the kernels of Llama's family: its norms are behind the products they belong to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding

from roseinfer.kernels.rms_norm import add_behind_rms_norm
from roseinfer.models.families import register
from roseinfer.models.families.counted_passes import count_paired, count_streamed
from roseinfer.models.families.linear_layers import Product
from roseinfer.models.families.llama import FusedLlama

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend


@register("Olmo2ForCausalLM")
class FusedOlmo2(FusedLlama):
    """Runs a forward pass in 8 kernels a layer, attention among them."""

    @torch.inference_mode()
    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_rows: Tensor | None,
        attention: AttentionBackend,
    ) -> Tensor:
        body = self._model.model
        residual = embedding(token_ids, body.embed_tokens.weight)
        count_streamed(residual, self._layers[0].qkv, attention)
        count_paired(residual, self._layers[0].mlp, attention)
        for at, layer in enumerate(self._layers):
            ends = self._ends(at, last_rows, attention)
            out = self._attend(at, residual, positions, attention, ends)
            if ends is not None:
                residual, last_rows = residual[ends], None
            self._add_normed(residual, Product(out, layer.out), layer.norm)
            self._add_normed(residual, layer.mlp.added(residual), layer.norm_of_mlp)
        return self._head(body.norm(residual), last_rows)

    @staticmethod
    def _norms(layer: Any) -> tuple[Any, Any]:
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm

    def _add_normed(self, residual: Tensor, added: Product | Tensor, norm: Any) -> None:
        parts = self.added_up(self._parts(added), None)
        add_behind_rms_norm(residual, parts, norm.weight, norm.variance_epsilon)
