"""GPT-2 run on fused kernels: the same weights and arithmetic as transformers' own modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear as torch_linear

from roseinfer.kernels.cuda.tensor_maps import supports_wgmma
from roseinfer.kernels.triton.linear import (
    gelu,
    linear,
    num_k_splits,
    split_k_linear,
    split_k_matmul,
    splits_evenly,
)
from roseinfer.kernels.triton.norm import add_norm, embed_norm
from roseinfer.models.causal import CausalModel
from roseinfer.models.families import register_family
from roseinfer.models.families.layers import count_streaming_gemm
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.distributed.ranks import Ranks

MAX_ROWS = 256
"""Largest number of rows for our kernels.

With more rows the tensor cores are busy, and torch's GEMMs are better.
"""


@register_family("GPT2LMHeadModel")
class FusedGPT2(CausalModel):
    """GPT-2 in 7 kernels per layer and forward pass, attention included.

    In float32 on a GPU, torch computes its linear layers.
    """

    paths = (EnginePath.FUSED,)

    @staticmethod
    def is_supported(model: Any) -> bool:
        """Return True for a GPT-2 without unusual settings."""
        config = model.config
        return bool(
            config.activation_function == "gelu_new"
            and config.scale_attn_weights
            and not config.scale_attn_by_inverse_layer_idx
            and not config.add_cross_attention
        )

    def __init__(
        self, model: Any, *, max_length: int | None = None, ranks: Ranks | None = None
    ) -> None:
        super().__init__(model, max_length=max_length, ranks=ranks)
        # Tensor cores do not multiply float32: torch's GEMMs are better for any number of rows.
        on_gpu_in_float32 = self.device.type == "cuda" and self.dtype is torch.float32
        self._max_rows = 0 if on_gpu_in_float32 else MAX_ROWS
        if supports_wgmma(self.device, self.dtype):
            for block in model.transformer.h:
                _make_inputs_contiguous(block.attn.c_proj)
                _make_inputs_contiguous(block.mlp.c_proj)

    @torch.inference_mode()
    def logits(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        last_rows: torch.Tensor | None,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        body = self._model.transformer
        few = len(token_ids) <= self._max_rows
        exchange = self.all_reduce_for(len(token_ids), attention)
        first = body.h[0].ln_1
        residual, x = embed_norm(token_ids, positions, body.wte.weight, body.wpe.weight, first)
        in_parts = body.h[0].attn.c_proj
        count_streaming_gemm(x, in_parts.weight.T, attention, self._num_k_splits(len(x), in_parts))
        norms = [block.ln_1 for block in body.h[1:]] + [body.ln_f]
        for layer, (block, after) in enumerate(zip(body.h, norms, strict=True)):
            mixer, mlp = block.attn, block.mlp
            new = _linear_layer(x, mixer.c_attn, few).view(x.shape[0], 3, -1, self.shape.head_dim)
            query, key, value = new.unbind(1)
            ends = self._last_layer_rows(layer, last_rows, attention)
            if ends is None:
                out = attention.store_and_attend(layer, query, key, value)
            else:
                out = attention.attend_last_tokens(layer, query, key, value, positions, None, ends)
                residual, last_rows = residual[ends], None
                few = len(residual) <= self._max_rows
            added = self.reduce_parts(self._split_k(out.flatten(1), mixer.c_proj), exchange)
            x = add_norm(residual, added, mixer.c_proj.bias, block.ln_2, exchange)
            x = _linear_layer(x, mlp.c_fc, few, activate=True)
            added = self.reduce_parts(self._split_k(x, mlp.c_proj), exchange)
            x = add_norm(residual, added, mlp.c_proj.bias, after, exchange)
        if last_rows is not None:
            x = x[last_rows]
        head = self._model.lm_head.weight
        # With an odd vocabulary size, torch's GEMM has other bits.
        uses_kernels = x.shape[0] <= self._max_rows or self.batch_invariant
        logits = linear(x, head.T) if uses_kernels else torch_linear(x, head)
        return self._model.lm_head.gather_logits(logits) if self.ranks else logits

    def _split_k(self, x: torch.Tensor, layer: Any) -> torch.Tensor:
        """Compute a layer without its bias, in parts that ``add_norm`` adds up, with the bias."""
        weight: torch.Tensor = layer.weight
        parts = self._num_k_splits(x.shape[0], layer)
        if x.shape[0] > self._max_rows:
            if not self.batch_invariant:
                return (x @ weight)[None]
            if splits_evenly(len(weight), parts):
                return split_k_matmul(x, weight, parts)
        return split_k_linear(x, weight, parts)

    def _num_k_splits(self, rows: int, layer: Any) -> int:
        inputs, outputs = layer.weight.shape
        return num_k_splits(inputs, outputs, 1 if self.batch_invariant else rows)


def _make_inputs_contiguous(layer: Any) -> None:
    """Make the inputs of a layer contiguous, for streaming GEMMs: checkpoints have outputs so."""
    transposed = layer.weight.detach().T.contiguous().T
    layer.weight = torch.nn.Parameter(transposed, requires_grad=False)


def _linear_layer(
    x: torch.Tensor, layer: Any, few: bool, *, activate: bool = False
) -> torch.Tensor:
    if few:
        return linear(x, layer.weight, layer.bias, gelu=activate)
    out = torch.addmm(layer.bias, x, layer.weight)
    return gelu(out) if activate else out
