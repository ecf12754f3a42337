"""Llama and its kin on fused kernels: the same weights and arithmetic as transformers' modules.

The models differ in details alone: norms of queries and keys, biases, projections that are joined
already, layers without rotary embeddings, multipliers of residual updates.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding

from roseinfer.kernels.cuda.whole_step import MegakernelLayer, MegakernelWeights
from roseinfer.kernels.triton.norm import (
    add_rms_norm,
    embed_rms_norm,
    rms_norm,
    rms_norm_then_add,
)
from roseinfer.kernels.triton.softmax import score_arguments
from roseinfer.models.causal import CausalModel
from roseinfer.models.families import register_family
from roseinfer.models.families.layers import (
    Experts,
    ResidualGemm,
    build_mlp,
    count_paired_gemm,
    count_streaming_gemm,
    dispatch_linear,
    record_routing,
)
from roseinfer.models.families.whole_step import MAX_MEGAKERNEL_TOKENS, MegakernelRunner
from roseinfer.models.llama_weights import (
    LLAMA_CLASSES,
    has_supported_attention,
    has_supported_layers,
    join_layer,
    rotary_tables,
)
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.distributed.ranks import Ranks
    from roseinfer.kernels.triton.all_reduce import AllReduceBuffers


@register_family(*LLAMA_CLASSES)
class FusedLlama(CausalModel):
    """Llama and its kin in 8 kernels per layer and forward pass, attention included."""

    paths = (EnginePath.FUSED,)
    max_megakernel_tokens = MAX_MEGAKERNEL_TOKENS

    @staticmethod
    def is_supported(model: Any) -> bool:
        """Return True for a model without unusual settings, in 16 bits if on a GPU."""
        return has_supported_layers(model)

    def __init__(
        self, model: Any, *, max_length: int | None = None, ranks: Ranks | None = None
    ) -> None:
        super().__init__(model, max_length=max_length, ranks=ranks)
        config = model.config
        self._embedding_multiplier = float(getattr(config, "embedding_multiplier", 1.0))
        self._residual_multiplier = float(getattr(config, "residual_multiplier", 1.0))
        self._logits_scaling = float(getattr(config, "logits_scaling", 1.0))
        self._in_one_kernel = MegakernelRunner(self, self._step_weights)
        tables = rotary_tables(model, self.shape.max_length)
        with torch.no_grad():
            self._layers = [
                join_layer(layer, self._norms(layer), tables, build_mlp(layer.mlp))
                for layer in model.model.layers
            ]

    @torch.inference_mode()
    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_rows: Tensor | None,
        attention: AttentionBackend,
    ) -> Tensor:
        if (whole_step_logits := self._in_one_kernel.logits(token_ids, attention)) is not None:
            return self._scale_logits(whole_step_logits)
        body, layers = self._model.model, self._layers
        exchange = self.all_reduce_for(len(token_ids), attention)
        residual, x = embed_rms_norm(
            token_ids,
            body.embed_tokens.weight,
            *_norm_parameters(layers[0].norm),
            self._embedding_multiplier,
        )
        count_streaming_gemm(x, layers[0].qkv, attention)
        count_paired_gemm(x, layers[0].mlp, attention)
        for at, layer in enumerate(layers):
            ends = self._last_layer_rows(at, last_rows, attention)
            out = self._attend(at, x, positions, attention, ends)
            if ends is not None:
                residual, last_rows = residual[ends], None
            x = self._add_and_norm(residual, ResidualGemm(out, layer.out), layer.mlp_norm, exchange)
            after = layers[at + 1].norm if at + 1 < len(layers) else body.norm
            x = self._add_and_norm(residual, layer.mlp.residual_update(x), after, exchange)
        return self._head(x, last_rows)

    @staticmethod
    def _norms(layer: Any) -> tuple[Any, Any]:
        """Return the norm of attention and that of the MLP."""
        return layer.input_layernorm, layer.post_attention_layernorm

    def _attend(
        self,
        at: int,
        x: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        ends: Tensor | None,
    ) -> Tensor:
        """Attend in a layer; return ``[tokens, q_heads * head_dim]``, or only rows ``ends``."""
        layer, kv_heads = self._layers[at], self.shape.num_kv_heads
        rows, head_dim = x.shape[0], self.shape.head_dim
        new = dispatch_linear(x, layer.qkv, layer.qkv_bias).view(rows, -1, head_dim)
        query, key, value = new.tensor_split([-2 * kv_heads, -kv_heads], 1)
        if ends is not None:
            arguments = query, key, value, positions, layer.rotation
            return attention.attend_last_tokens(at, *arguments, ends).flatten(1)
        if layer.rotation is None:
            out = attention.store_and_attend(at, query, key, value)
        else:
            out = attention.rotate_store_and_attend(
                at, query, key, value, positions, layer.rotation
            )
        return out.view(rows, -1)

    def _add_and_norm(
        self,
        residual: Tensor,
        added: ResidualGemm | Tensor,
        norm: Any,
        exchange: AllReduceBuffers | None,
    ) -> Tensor:
        """Add a GEMM or parts to the residual stream in place; return the normed residual."""
        if isinstance(added, ResidualGemm):
            pairs_allowed = self.batch_invariant and not self.ranks
            if pairs_allowed and added.add_paired(residual, self._residual_multiplier):
                return rms_norm(residual, *_norm_parameters(norm))
        parts = self.reduce_parts(self._split_k(added), exchange)
        return add_rms_norm(
            residual, parts, *_norm_parameters(norm), self._residual_multiplier, exchange
        )

    def _split_k(self, added: ResidualGemm | Tensor) -> Tensor:
        always = self.batch_invariant
        return added.split_k(always=always) if isinstance(added, ResidualGemm) else added

    def _head(self, x: Tensor, last_rows: Tensor | None) -> Tensor:
        if last_rows is not None:
            x = x[last_rows]
        logits = dispatch_linear(x, self._model.lm_head.weight)
        if self.ranks:
            logits = self._model.lm_head.gather_logits(logits)
        return self._scale_logits(logits)

    def _scale_logits(self, logits: Tensor) -> Tensor:
        return logits if self._logits_scaling == 1 else logits / self._logits_scaling

    def _step_weights(self) -> MegakernelWeights:
        """Return views of the weights for the megakernel."""
        body = self._model.model
        return MegakernelWeights(
            layers=[
                MegakernelLayer(
                    layer.norm.weight, layer.qkv, layer.qkv_bias, layer.out,
                    layer.mlp_norm.weight, layer.mlp.gate_up_weight, layer.mlp.down,
                    layer.rotation,
                )
                for layer in self._layers
            ],
            words=body.embed_tokens.weight,
            head=self._model.lm_head.weight,
            norm=body.norm.weight,
            epsilon=body.norm.variance_epsilon,
            embedding_multiplier=self._embedding_multiplier,
            residual_multiplier=self._residual_multiplier,
            scale=score_arguments(self.traits[0], body.norm.weight)["scale"],
        )  # fmt: skip


def _norm_parameters(norm: Any) -> tuple[Tensor, float]:
    return norm.weight, norm.variance_epsilon


# OLMo 2 on the kernels of Llama's family: its norms come after the GEMMs they belong to.


@register_family("Olmo2ForCausalLM")
class FusedOlmo2(FusedLlama):
    """OLMo 2 in 8 kernels per layer and forward pass, attention included."""

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
        count_streaming_gemm(residual, self._layers[0].qkv, attention)
        count_paired_gemm(residual, self._layers[0].mlp, attention)
        for at, layer in enumerate(self._layers):
            ends = self._last_layer_rows(at, last_rows, attention)
            out = self._attend(at, residual, positions, attention, ends)
            if ends is not None:
                residual, last_rows = residual[ends], None
            self._norm_and_add(residual, ResidualGemm(out, layer.out), layer.norm)
            self._norm_and_add(residual, layer.mlp.residual_update(residual), layer.mlp_norm)
        return self._head(body.norm(residual), last_rows)

    @staticmethod
    def _norms(layer: Any) -> tuple[Any, Any]:
        return layer.post_attention_layernorm, layer.post_feedforward_layernorm

    def _norm_and_add(self, residual: Tensor, added: ResidualGemm | Tensor, norm: Any) -> None:
        parts = self.reduce_parts(self._split_k(added), None)
        rms_norm_then_add(residual, parts, norm.weight, norm.variance_epsilon)


# Mixtures of experts whose layers are Llama's in all else: Mixtral, Qwen3's and OLMoE.


@register_family("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")
class FusedMixtral(FusedLlama):
    """A mixture of experts in 10 kernels per layer and forward pass, attention included."""

    max_megakernel_tokens = 0

    @staticmethod
    def is_supported(model: Any) -> bool:
        """Return True for a model without unusual settings, in 16 bits if on a GPU."""
        return has_supported_attention(model) and not getattr(model.config, "clip_qkv", None)

    def fused_and_module_logits(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """Return both kinds of logits, with the modules forced to the kernels' expert routing.

        The weights of experts are the kernels' too. Rounding decides near ties between experts, and
        everything after differs. An expert that the modules find much less probable is not a near
        tie.
        """
        with record_routing() as noted:
            fused_logits = self.logits(token_ids, positions, None, attention)
        wrong: list[Tensor] = []
        with ExitStack() as stack:
            chosen = iter(noted)
            for fused_layer, layer in zip(self._layers, self._model.model.layers, strict=True):
                if isinstance(fused_layer.mlp, Experts):
                    send = partial(_force_routing, *next(chosen), wrong)
                    stack.callback(layer.mlp.gate.register_forward_hook(send).remove)
            logits = CausalModel.logits(self, token_ids, positions, None, attention)
        if wrong and torch.stack(wrong).any():
            logits = torch.full_like(logits, torch.inf)
        return fused_logits, logits


def _force_routing(
    experts: Tensor,
    weights: Tensor,
    wrong: list[Tensor],
    router: Any,  # noqa: ARG001
    inputs: Any,  # noqa: ARG001
    routing: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return these experts instead of those that a router chose.

    Record whether the router finds others more probable, or weights these differently.
    """
    logits, own_weights, own_experts = routing
    at = experts.long()
    rounded = torch.finfo(logits.dtype).eps ** 0.5
    near = rounded * logits.abs().max()
    lowest_logit = logits.gather(1, own_experts).min(-1, keepdim=True).values
    wrong.append((lowest_logit - logits.gather(1, at) > near).any())
    likely = logits.float().softmax(-1)
    times = own_weights.float().sum(-1, keepdim=True) / likely.gather(1, own_experts).sum(
        -1, keepdim=True
    )
    expected_weights = likely.gather(1, at) * times
    wrong.append(
        (
            (weights.float() - expected_weights).abs()
            > near.float().expm1() * expected_weights + rounded
        ).any()
    )
    return logits, weights.to(own_weights.dtype), at
