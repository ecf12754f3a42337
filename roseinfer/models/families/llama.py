"""Llama and its kin on fused kernels: the same weights and arithmetic as transformers' modules.

They differ in details alone: norms of queries and keys, biases, projections that come joined,
layers that do not rotate, factors in front of what is added.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import embedding

from roseinfer.kernels.cuda.whole_step import StepLayer, StepWeights
from roseinfer.kernels.triton.norm import (
    add_behind_rms_norm,
    add_rms_norm,
    embed_rms_norm,
    rms_norm,
)
from roseinfer.kernels.triton.softmax import score_arguments
from roseinfer.layer_traits import Rotation
from roseinfer.models.causal import CausalModel
from roseinfer.models.families import register
from roseinfer.models.families.layers import (
    Experts,
    GatedMlp,
    Product,
    count_paired,
    count_streamed,
    join_biases,
    join_weights,
    mlp_of,
    noting_experts,
    whole,
)
from roseinfer.models.families.whole_step import LONGEST, StepsInOneKernel
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.distributed.ranks import Ranks
    from roseinfer.kernels.exchange import Exchange

_STEADY_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Ways to rotate in which a position's angles are the same in texts of every length."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer, ``[outputs, inputs]`` each."""

    norm: Any
    """That of attention."""
    qkv: Tensor
    qkv_bias: Tensor | None
    rotation: Rotation | None
    out: Tensor
    norm_of_mlp: Any
    mlp: GatedMlp | Experts


@register(
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Phi3ForCausalLM",
    "GraniteForCausalLM",
    "SmolLM3ForCausalLM",
)
class FusedLlama(CausalModel):
    """Runs a forward pass in 8 kernels a layer, attention among them."""

    paths = (EnginePath.FUSED,)
    whole_steps = LONGEST

    @staticmethod
    def fits(model: Any) -> bool:
        """Return True for a model without unusual settings, in 16 bits if on a GPU."""
        down = model.model.layers[0].mlp.down_proj
        plain = down.bias is None and not getattr(model.config, "mlp_bias", False)
        return plain and fits_but_for_mlps(model)

    def __init__(
        self, model: Any, *, max_length: int | None = None, ranks: Ranks | None = None
    ) -> None:
        super().__init__(model, max_length=max_length, ranks=ranks)
        config = model.config
        self._embedding_times = float(getattr(config, "embedding_multiplier", 1.0))
        self._added_times = float(getattr(config, "residual_multiplier", 1.0))
        self._logits_by = float(getattr(config, "logits_scaling", 1.0))
        self._in_one_kernel = StepsInOneKernel(self, self._step_weights)
        positions = torch.arange(self.shape.max_length, device=self.device)[None]
        like = model.model.embed_tokens.weight[:1]
        tables = [table[0].contiguous() for table in model.model.rotary_emb(like, positions)]
        with torch.no_grad():
            self._layers = [
                _arranged(layer, self._norms(layer), tables) for layer in model.model.layers
            ]

    @torch.inference_mode()
    def logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        last_rows: Tensor | None,
        attention: AttentionBackend,
    ) -> Tensor:
        if (found := self._in_one_kernel.logits(token_ids, attention)) is not None:
            return self._divided(found)
        body, layers = self._model.model, self._layers
        exchange = self.exchange_of(len(token_ids), attention)
        residual, x = embed_rms_norm(
            token_ids, body.embed_tokens.weight, *_of(layers[0].norm), self._embedding_times
        )
        count_streamed(x, layers[0].qkv, attention)
        count_paired(x, layers[0].mlp, attention)
        for at, layer in enumerate(layers):
            ends = self._ends(at, last_rows, attention)
            out = self._attend(at, x, positions, attention, ends)
            if ends is not None:
                residual, last_rows = residual[ends], None
            x = self._add(residual, Product(out, layer.out), layer.norm_of_mlp, exchange)
            after = layers[at + 1].norm if at + 1 < len(layers) else body.norm
            x = self._add(residual, layer.mlp.added(x), after, exchange)
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
        """Attend in a layer; return ``[tokens, q_heads * head_dim]``, or of ``ends`` alone."""
        layer, kv_heads = self._layers[at], self.shape.num_kv_heads
        new = whole(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.shape.head_dim)
        query, key, value = new.tensor_split([-2 * kv_heads, -kv_heads], 1)
        if ends is not None:
            given = query, key, value, positions, layer.rotation
            return attention.attend_ends(at, *given, ends).flatten(1)
        if layer.rotation is None:
            out = attention.attend_new(at, query, key, value)
        else:
            out = attention.attend_rotated(at, query, key, value, positions, layer.rotation)
        return out.view(len(x), -1)

    def _add(
        self, residual: Tensor, added: Product | Tensor, norm: Any, exchange: Exchange | None
    ) -> Tensor:
        """Add a product, or parts, to the residual stream in place; return that normed."""
        if isinstance(added, Product):
            alone = self.batch_invariant and not self.ranks
            if alone and added.added_in_pairs(residual, self._added_times):
                return rms_norm(residual, *_of(norm))
        parts = self.added_up(self._parts(added), exchange)
        return add_rms_norm(residual, parts, *_of(norm), self._added_times, exchange)

    def _parts(self, added: Product | Tensor) -> Tensor:
        always = self.batch_invariant
        return added.parts(always=always) if isinstance(added, Product) else added

    def _head(self, x: Tensor, last_rows: Tensor | None) -> Tensor:
        if last_rows is not None:
            x = x[last_rows]
        logits = whole(x, self._model.lm_head.weight)
        if self.ranks:
            logits = self._model.lm_head.whole(logits)
        return self._divided(logits)

    def _divided(self, logits: Tensor) -> Tensor:
        return logits if self._logits_by == 1 else logits / self._logits_by

    def _step_weights(self) -> StepWeights:
        """Return the weights where they lie."""
        body = self._model.model
        return StepWeights(
            layers=[
                StepLayer(
                    layer.norm.weight, layer.qkv, layer.qkv_bias, layer.out,
                    layer.norm_of_mlp.weight, layer.mlp.gates_and_ups, layer.mlp.down,
                    layer.rotation,
                )
                for layer in self._layers
            ],
            words=body.embed_tokens.weight,
            head=self._model.lm_head.weight,
            norm=body.norm.weight,
            epsilon=body.norm.variance_epsilon,
            embedding_times=self._embedding_times,
            added_times=self._added_times,
            scale=score_arguments(self.traits[0], body.norm.weight).scale,
        )  # fmt: skip


def fits_but_for_mlps(model: Any) -> bool:
    """Return True for a model whose activation, attention and dtype are those of Llama's kin."""
    return bool(
        model.config.hidden_act == "silu"
        and model.model.layers[0].self_attn.o_proj.bias is None
        and model.model.rotary_emb.rope_type in _STEADY_ROTATIONS
        and (model.dtype is not torch.float32 or model.device.type == "cpu")
    )


def _of(norm: Any) -> tuple[Tensor, float]:
    return norm.weight, norm.variance_epsilon


def _arranged(layer: Any, norms: tuple[Any, Any], tables: list[Tensor]) -> _Layer:
    """Join what is multiplied by the same rows."""
    attention = layer.self_attn
    if hasattr(attention, "qkv_proj"):
        qkv, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
    else:
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv, bias = join_weights(projections), join_biases(projections)
    return _Layer(
        norm=norms[0],
        qkv=qkv,
        qkv_bias=bias,
        rotation=_rotation(attention, tables),
        out=attention.o_proj.weight,
        norm_of_mlp=norms[1],
        mlp=mlp_of(layer.mlp),
    )


def _rotation(attention: Any, tables: list[Tensor]) -> Rotation | None:
    if not getattr(attention, "use_rope", True):
        return None
    cosines, sines = tables
    if not hasattr(attention, "q_norm"):
        return Rotation(cosines, sines)
    query, key = attention.q_norm, attention.k_norm
    together = query.weight.numel() > attention.head_dim
    return Rotation(
        cosines, sines, query.weight, key.weight, query.variance_epsilon, together=together
    )


# OLMo 2 on the kernels of Llama's family: its norms are behind the products they belong to.


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


# Models with experts whose layers are Llama's in all else: Mixtral, Qwen3's and OLMoE.


@register("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")
class FusedMixtral(FusedLlama):
    """Runs a forward pass in 10 kernels a layer, attention among them."""

    whole_steps = 0

    @staticmethod
    def fits(model: Any) -> bool:
        """Return True for a model without unusual settings, in 16 bits if on a GPU."""
        return fits_but_for_mlps(model) and not getattr(model.config, "clip_qkv", None)

    def logits_in_two_ways(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """Have the modules send each token where the kernels send it, weighed as it is there.

        Rounding decides near ties between experts, and from there on all is another. What the
        modules hold for much less likely is no near tie.
        """
        with noting_experts() as noted:
            ours = self.logits(token_ids, positions, None, attention)
        wrong: list[Tensor] = []
        with ExitStack() as stack:
            chosen = iter(noted)
            for own, layer in zip(self._layers, self._model.model.layers, strict=True):
                if isinstance(own.mlp, Experts):
                    send = partial(_send, *next(chosen), wrong)
                    stack.callback(layer.mlp.gate.register_forward_hook(send).remove)
            logits = CausalModel.logits(self, token_ids, positions, None, attention)
        if wrong and torch.stack(wrong).any():
            logits = torch.full_like(logits, torch.inf)
        return ours, logits


def _send(
    experts: Tensor,
    weights: Tensor,
    wrong: list[Tensor],
    router: Any,  # noqa: ARG001
    given: Any,  # noqa: ARG001
    found: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return these experts in place of those that a router has found.

    It is noted whether the router holds others for likelier, or weighs these otherwise.
    """
    logits, own_weights, own = found
    at = experts.long()
    rounded = torch.finfo(logits.dtype).eps ** 0.5
    near = rounded * logits.abs().max()
    least = logits.gather(1, own).min(-1, keepdim=True).values
    wrong.append((least - logits.gather(1, at) > near).any())
    likely = logits.float().softmax(-1)
    times = own_weights.float().sum(-1, keepdim=True) / likely.gather(1, own).sum(-1, keepdim=True)
    want = likely.gather(1, at) * times
    wrong.append(((weights.float() - want).abs() > near.float().expm1() * want + rounded).any())
    return logits, weights.to(own_weights.dtype), at
