"""Llama and its kin on fused kernels: the same weights and arithmetic as transformers' modules.

They differ in details alone: norms of queries and keys, biases, projections that come joined,
layers that do not rotate, factors in front of what is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear as torch_linear

from roseinfer.engine_paths import EnginePath
from roseinfer.kernels.persistent.step_weights import StepLayer, StepWeights
from roseinfer.kernels.products.gated import linear_gated, multiply_gated
from roseinfer.kernels.products.many_rows import multiply_in_parts
from roseinfer.kernels.products.streamed import (
    cut_evenly,
    num_parts,
    stream_linear,
    stream_linear_in_parts,
)
from roseinfer.kernels.rms_norm import add_rms_norm, embed_rms_norm
from roseinfer.kernels.scores import score_arguments
from roseinfer.models.causal import CausalModel
from roseinfer.models.families import register
from roseinfer.models.families.steps_in_one_kernel import LONGEST, StepsInOneKernel
from roseinfer.models.families.streamed_passes import count_streamed
from roseinfer.models.joined import join_biases, join_weights
from roseinfer.rotation import Rotation

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.kernels.sums.exchange import Exchange
    from roseinfer.ranks.ranks import Ranks

MOST_ROWS = 64
"""With more, our products read their weights once for each tile of rows, and torch's once."""
_MOST_ROWS_IN_PARTS = 512
"""With more, a whole product has enough to do for all of a GPU, and is rounded in another way."""
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
    gates_and_ups: Tensor
    down: Tensor


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
        config = model.config
        first = model.model.layers[0]
        added = (first.self_attn.o_proj, first.mlp.down_proj)
        return bool(
            config.hidden_act == "silu"
            and all(layer.bias is None for layer in added)
            and not getattr(config, "mlp_bias", False)
            and model.model.rotary_emb.rope_type in _STEADY_ROTATIONS
            and (model.dtype is not torch.float32 or model.device.type == "cpu")
        )

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
        if (whole := self._in_one_kernel.logits(token_ids, attention)) is not None:
            return self._divided(whole)
        body, layers = self._model.model, self._layers
        exchange = self.exchange_of(len(token_ids), attention)
        residual, x = embed_rms_norm(
            token_ids, body.embed_tokens.weight, *_of(layers[0].norm), self._embedding_times
        )
        count_streamed(x, layers[0].qkv, attention)
        for at, layer in enumerate(layers):
            out = self._attend(at, x, positions, attention)
            x = self._add(residual, out, layer.out, layer.norm_of_mlp, exchange)
            after = layers[at + 1].norm if at + 1 < len(layers) else body.norm
            x = self._add(residual, gated(x, layer.gates_and_ups), layer.down, after, exchange)
        return self._head(x, last_rows)

    @staticmethod
    def _norms(layer: Any) -> tuple[Any, Any]:
        """Return the norm of attention and that of the MLP."""
        return layer.input_layernorm, layer.post_attention_layernorm

    def _attend(self, at: int, x: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Attend in a layer; return ``[tokens, q_heads * head_dim]``."""
        layer, kv_heads = self._layers[at], self.shape.num_kv_heads
        new = _product(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.shape.head_dim)
        query, key, value = new.tensor_split([-2 * kv_heads, -kv_heads], 1)
        if layer.rotation is None:
            out = attention.attend_new(at, query, key, value)
        else:
            out = attention.attend_rotated(at, query, key, value, positions, layer.rotation)
        return out.view(len(x), -1)

    def _add(
        self, residual: Tensor, x: Tensor, weight: Tensor, norm: Any, exchange: Exchange | None
    ) -> Tensor:
        """Add a product to the residual stream in place; return that normed."""
        parts = self._parts(x, weight, exchange)
        return add_rms_norm(residual, parts, *_of(norm), self._added_times, exchange)

    def _parts(self, x: Tensor, weight: Tensor, exchange: Exchange | None = None) -> Tensor:
        """Compute a product as ``[parts, rows, outputs]``, still to be added up."""
        return self.added_up(in_parts(x, weight, always=self.batch_invariant), exchange)

    def _head(self, x: Tensor, last_rows: Tensor | None) -> Tensor:
        if last_rows is not None:
            x = x[last_rows]
        logits = _product(x, self._model.lm_head.weight)
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
                    layer.norm_of_mlp.weight, layer.gates_and_ups, layer.down, layer.rotation,
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


def _of(norm: Any) -> tuple[Tensor, float]:
    return norm.weight, norm.variance_epsilon


def in_parts(x: Tensor, weight: Tensor, *, always: bool) -> Tensor:
    """Compute a product as ``[parts, rows, outputs]``, still to be added up.

    The parts are those of few rows ``always``, or where that is faster than a whole product.
    """
    if len(x) > MOST_ROWS:
        if not always and len(x) > _MOST_ROWS_IN_PARTS:
            return (x @ weight.T)[None]
        if cut_evenly(*weight.shape):
            return multiply_in_parts(x, weight.T, num_parts(*weight.shape))
        if not always:
            return (x @ weight.T)[None]
    return stream_linear_in_parts(x, weight)


def gated(x: Tensor, gates_and_ups: Tensor) -> Tensor:
    """Compute the first half of a gated MLP."""
    if len(x) <= MOST_ROWS:
        return linear_gated(x, gates_and_ups)
    return multiply_gated(x @ gates_and_ups.T)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    few = len(x) <= MOST_ROWS
    return stream_linear(x, weight, bias) if few else torch_linear(x, weight, bias)


def _arranged(layer: Any, norms: tuple[Any, Any], tables: list[Tensor]) -> _Layer:
    """Join what is multiplied by the same rows."""
    attention, mlp = layer.self_attn, layer.mlp
    if hasattr(attention, "qkv_proj"):
        qkv, bias = attention.qkv_proj.weight, attention.qkv_proj.bias
    else:
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv, bias = join_weights(projections), join_biases(projections)
    if hasattr(mlp, "gate_up_proj"):
        gates_and_ups = mlp.gate_up_proj.weight
    else:
        gates_and_ups = join_weights((mlp.gate_proj, mlp.up_proj))
    return _Layer(
        norm=norms[0],
        qkv=qkv,
        qkv_bias=bias,
        rotation=_rotation(attention, tables),
        out=attention.o_proj.weight,
        norm_of_mlp=norms[1],
        gates_and_ups=gates_and_ups,
        down=mlp.down_proj.weight,
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
