"""Doors to models that compute attention in a way of their own: each family's is one file here.

A door replaces methods of a module, found by its class, by ones that go through transformers'
attention interface as other models do. Beside that interface's own keywords it may ask for
``roseinfer_window``, the tokens that a token sees, and ``roseinfer_slopes``, one for each head.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import AttentionInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roseinfer.attention.backend import Attention

if TYPE_CHECKING:
    Methods = Mapping[str, Callable[..., Any]]


_DOORS: dict[str, Callable[[Any], Methods]] = {}
_Door = TypeVar("_Door", bound="Callable[[Any], Methods]")
_INTERFACE = AttentionInterface()


def register(class_name: str) -> Callable[[_Door], _Door]:
    """Register a door for modules of a class: it prepares one, and says what to replace by what."""

    def note(door: _Door) -> _Door:
        _DOORS[class_name] = door
        return door

    return note


def open_doors(network: Any) -> list[Any]:
    """Replace what there are doors for, and return the modules whose methods were replaced."""
    opened = [module for module in network.modules() if type(module).__name__ in _DOORS]
    for module in opened:
        module.roseinfer_config = network.config
        for name, method in _DOORS[type(module).__name__](module).items():
            setattr(module, name, MethodType(method, module))
    return opened


def close_doors(opened: list[Any]) -> None:
    """Give the modules their own methods back."""
    for module in opened:
        for name in _DOORS[type(module).__name__](module):
            delattr(module, name)


def use_attention(network: Any, name: str) -> bool:
    """Have the network's layers attend by the function of that name, and say if they can."""
    if any(type(module).__name__ in _DOORS for module in network.modules()):
        network.config._attn_implementation = name
    else:
        network.set_attn_implementation(name)
    return bool(network.config._attn_implementation == name)


def attend_through_interface(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    **asked: Any,
) -> torch.Tensor:
    """Attend with ``[1, heads, tokens, head_dim]`` each, and return the heads behind the tokens.

    Masks are not handed on: the cache knows what is before what.
    """
    attend = _INTERFACE[module.roseinfer_config._attn_implementation]
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: torch.Tensor = attend(module, query, key, value, None, scaling=scaling, **asked)[0]
    return out


# How fast ALiBi takes off from the score of a distant key, head by head.


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes: a geometric series, with the steps in between where heads are left over.

    The series ends at 2 to the power of -8 for the largest power of two that ``heads`` holds.
    """
    whole = 1 << (heads.bit_length() - 1)
    steps = [8 * at / whole for at in range(1, whole + 1)]
    between = [8 * at / (2 * whole) for at in range(1, 2 * whole, 2)]
    return tuple(2.0**-step for step in (steps + between)[:heads])


# Attention in place of ``_attn``, to which some families hand the heads after splitting them.


def attn_method(scaling: float, **asked: Any) -> Methods:
    """Return a method that attends with this scaling, and asks for the rest by keyword."""

    def attend(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,  # noqa: ARG001
    ) -> tuple[torch.Tensor, None]:
        out = attend_through_interface(self, query, key, value, scaling, **asked)
        return out.transpose(1, 2), None

    return {"_attn": attend}


@register("BloomAttention")
def patch_bloom(attention: Any) -> Methods:
    """Bloom: its attention adds ALiBi by the keys of a step, and the residual behind itself."""
    attention.roseinfer_slopes = alibi_slopes(attention.num_heads)
    return {"forward": _bloom_forward}


def _bloom_forward(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    out = attend_through_interface(
        self, query, key, value, self.inv_norm_factor, roseinfer_slopes=self.roseinfer_slopes
    )
    return self.dense(out.flatten(2)) + residual, None


@register("FalconAttention")
def patch_falcon(attention: Any) -> Methods:
    # The model rounds them, times the positions, to bfloat16. These are what it was meant to have.
    """Falcon: positions by rotation or by ALiBi, and keys that several heads share."""
    slopes = alibi_slopes(attention.num_heads)
    attention.roseinfer_slopes = tuple(slope * attention.inv_norm_factor for slope in slopes)
    return {"forward": _falcon_forward}


def _falcon_forward(
    self: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    *_: Any,
    position_embeddings: Any = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    split = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (states.transpose(1, 2) for states in split)
    # The newest kind repeats a key for every head that shares it.
    key, value = (shared[:, :: shared.shape[1] // self.num_kv_heads] for shared in (key, value))
    slopes = None
    if alibi is None:
        rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    else:
        slopes = self.roseinfer_slopes
    out = attend_through_interface(
        self, query, key, value, self.inv_norm_factor, roseinfer_slopes=slopes
    )
    return self.dense(out.flatten(2)), None


@register("GPTNeoSelfAttention")
def patch_gpt_neo(attention: Any) -> Methods:
    """GPT-Neo: scores are not scaled, and local layers see a window that no mask tells of."""
    attention.layer_idx = attention.layer_id
    local = attention.attention_type == "local"
    return attn_method(1.0, roseinfer_window=attention.config.window_size if local else None)


@register("GPTJAttention")
@register("CodeGenAttention")
def patch_gptj(attention: Any) -> Methods:
    """GPT-J and CodeGen: the heads are split, rotated and put together by the model itself."""
    return attn_method(1 / attention.scale_attn)


# MPT: its attention adds ALiBi by the keys of a step, and its model insists on a mask.


_NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
"""Transformers takes a mask of four dimensions as it is."""


@register("MptModel")
def open_model(model: Any) -> Methods:  # noqa: ARG001
    return {"forward": _forward_without_mask}


@register("MptAttention")
def patch_mpt(attention: Any) -> Methods:
    attention.roseinfer_slopes = alibi_slopes(attention.n_heads)
    return {"forward": _mpt_forward}


def _forward_without_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs | {"attention_mask": _NO_MASK})


def _mpt_forward(
    self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
    query, key, value = mixed.unflatten(-1, (3, self.n_heads, -1)).transpose(1, 3).unbind(2)
    out = attend_through_interface(
        self, query, key, value, self.softmax_scale, roseinfer_slopes=self.roseinfer_slopes
    )
    return self.out_proj(out.flatten(2)), None


# The attention that the present forward pass runs with.
#
# It is no argument, since many models do not hand on to their layers what they do not know.


RUNNING: ContextVar[Attention | None] = ContextVar("running_attention", default=None)
"""None outside the engine."""
