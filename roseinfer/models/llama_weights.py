"""Weights of Llama and its kin, joined where several multiply the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from roseinfer.layer_traits import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_LENGTH_INDEPENDENT_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary embeddings whose angles do not depend on the sequence length."""


LLAMA_CLASSES = tuple(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Granite", "SmolLM3")
)
"""Classes of transformers whose layers are Llama's but for details."""

_Mlp = TypeVar("_Mlp")


@dataclass(frozen=True, slots=True)
class LlamaLayer(Generic[_Mlp]):
    """The weights of one layer, ``[outputs, inputs]`` each."""

    norm: Any
    """Attention's norm."""
    qkv: Tensor
    qkv_bias: Tensor | None
    rotation: RotaryEmbedding | None
    out: Tensor
    mlp_norm: Any
    mlp: _Mlp


def join_layer(
    layer: Any, norms: tuple[Any, Any], tables: list[Tensor], mlp: _Mlp
) -> LlamaLayer[_Mlp]:
    """Join the weights of attention that multiply the same rows.

    ``norms`` are those of attention and of the MLP.
    """
    attention = layer.self_attn
    qkv, bias = join_qkv(attention)
    rotation = rotary_embedding(attention, tables)
    return LlamaLayer(norms[0], qkv, bias, rotation, attention.o_proj.weight, norms[1], mlp)


def has_supported_layers(model: Any) -> bool:
    """Return True for a model with supported attention whose MLPs have no biases."""
    down = model.model.layers[0].mlp.down_proj
    plain = down.bias is None and not getattr(model.config, "mlp_bias", False)
    return plain and has_supported_attention(model)


def has_supported_attention(model: Any) -> bool:
    """Return True for a model whose activation, attention and dtype are those of Llama's kin."""
    return bool(
        model.config.hidden_act == "silu"
        and model.model.layers[0].self_attn.o_proj.bias is None
        and model.model.rotary_emb.rope_type in _LENGTH_INDEPENDENT_ROPE_TYPES
        and (model.dtype is not torch.float32 or model.device.type == "cpu")
    )


def rotary_tables(model: Any, max_length: int) -> list[Tensor]:
    """Return cosines and sines of all positions, ``[positions, rotated]``, in the model's dtype."""
    positions = torch.arange(max_length, device=model.device)[None]
    like = model.model.embed_tokens.weight[:1]
    return [table[0].contiguous() for table in model.model.rotary_emb(like, positions)]


def rotary_embedding(attention: Any, tables: list[Tensor]) -> RotaryEmbedding | None:
    if not getattr(attention, "use_rope", True):
        return None
    cosines, sines = tables
    if not hasattr(attention, "q_norm"):
        return RotaryEmbedding(cosines, sines)
    query, key = attention.q_norm, attention.k_norm
    norm_across_heads = query.weight.numel() > attention.head_dim
    return RotaryEmbedding(
        cosines,
        sines,
        query.weight,
        key.weight,
        query.variance_epsilon,
        norm_across_heads=norm_across_heads,
    )


def join_qkv(attention: Any) -> tuple[Tensor, Tensor | None]:
    """Join the weights and biases of queries, keys and values, which multiply the same rows."""
    if hasattr(attention, "qkv_proj"):
        return attention.qkv_proj.weight, attention.qkv_proj.bias
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return join_weights(projections), join_biases(projections)


def join_gate_up(mlp: Any) -> Tensor:
    """Join the weights of gates and of gated values."""
    if hasattr(mlp, "gate_up_proj"):
        weight: Tensor = mlp.gate_up_proj.weight
        return weight
    return join_weights((mlp.gate_proj, mlp.up_proj))


def join_weights(layers: Sequence[torch.nn.Linear]) -> Tensor:
    """Concatenate the weights into one ``[outputs, inputs]``.

    The layers keep views of it, so that nothing is stored twice.
    """
    joined = torch.cat([layer.weight.detach() for layer in layers])
    begin = 0
    for layer in layers:
        layer.weight.data = joined[begin : begin + layer.out_features]
        begin += layer.out_features
    return joined


def join_biases(layers: Sequence[torch.nn.Linear]) -> Tensor | None:
    """Concatenate the biases of the layers, which keep views of them; None if no layer has any."""
    if all(layer.bias is None for layer in layers):
        return None
    joined = layers[0].weight.new_zeros(sum(layer.out_features for layer in layers))
    begin = 0
    for layer in layers:
        if layer.bias is not None:
            own = joined[begin : begin + layer.out_features]
            layer.bias.data = own.copy_(layer.bias.detach())
        begin += layer.out_features
    return joined
