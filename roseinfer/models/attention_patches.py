"""Attention patches for models that do not use transformers' attention interface.

A patch replaces methods of a module, found by its class name, with methods that go through the
interface as other models do. Besides the interface's own keywords it may pass ``roseinfer_window``,
the number of tokens that a token sees, and ``roseinfer_slopes``, one for each head.
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

    PatchedMethods = Mapping[str, Callable[..., Any]]


_PATCHES: dict[str, Callable[[Any], PatchedMethods]] = {}
_Patch = TypeVar("_Patch", bound="Callable[[Any], PatchedMethods]")
_INTERFACE = AttentionInterface()


def register_patch(class_name: str) -> Callable[[_Patch], _Patch]:
    """Register a patch for a class of modules: it prepares a module and returns the new methods."""

    def note(door: _Patch) -> _Patch:
        _PATCHES[class_name] = door
        return door

    return note


def apply_patches(network: Any) -> list[Any]:
    """Replace the methods of all modules that have a patch; return these modules."""
    opened = [module for module in network.modules() if type(module).__name__ in _PATCHES]
    for module in opened:
        module.roseinfer_config = network.config
        for name, method in _PATCHES[type(module).__name__](module).items():
            setattr(module, name, MethodType(method, module))
    return opened


def remove_patches(opened: list[Any]) -> None:
    """Restore the modules' original methods."""
    for module in opened:
        for name in _PATCHES[type(module).__name__](module):
            delattr(module, name)


def set_attention(network: Any, name: str) -> bool:
    """Set the network's attention function by its name; return True if its layers use it."""
    if any(type(module).__name__ in _PATCHES for module in network.modules()):
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
    **options: Any,
) -> torch.Tensor:
    """Attend with ``[1, heads, tokens, head_dim]`` each; return ``[1, tokens, heads, head_dim]``.

    No mask is passed: the cache knows the order of the tokens.
    """
    attend = _INTERFACE[module.roseinfer_config._attn_implementation]
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: torch.Tensor = attend(module, query, key, value, None, scaling=scaling, **options)[0]
    return out


# ALiBi slopes: the penalty on a distant key's score, by head.


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes: a geometric series, with steps in between for the remaining heads.

    The series ends at 2 to the power of -8 for the largest power of two that is at most ``heads``.
    """
    power_of_two = 1 << (heads.bit_length() - 1)
    steps = [8 * at / power_of_two for at in range(1, power_of_two + 1)]
    half_steps = [8 * at / (2 * power_of_two) for at in range(1, 2 * power_of_two, 2)]
    return tuple(2.0**-step for step in (steps + half_steps)[:heads])


# Patches of ``_attn``, which some families call with heads that are split already.


def attn_method(scaling: float, **options: Any) -> PatchedMethods:
    """Return a method that attends with this scaling, and passes the other keywords on."""

    def attend(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,  # noqa: ARG001
    ) -> tuple[torch.Tensor, None]:
        out = attend_through_interface(self, query, key, value, scaling, **options)
        return out.transpose(1, 2), None

    return {"_attn": attend}


@register_patch("BloomAttention")
def patch_bloom(attention: Any) -> PatchedMethods:
    """Patch Bloom, whose attention adds ALiBi by the keys of a step, and then the residual."""
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


@register_patch("FalconAttention")
def patch_falcon(attention: Any) -> PatchedMethods:
    # The model rounds slopes times positions to bfloat16. These are the slopes it was meant to
    # have.
    """Patch Falcon, which has rotary embeddings or ALiBi, and KV heads shared by query heads."""
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


@register_patch("GPTNeoSelfAttention")
def patch_gpt_neo(attention: Any) -> PatchedMethods:
    """Patch GPT-Neo: scores are not scaled, and local layers have a window without a mask."""
    attention.layer_idx = attention.layer_id
    local = attention.attention_type == "local"
    return attn_method(1.0, roseinfer_window=attention.config.window_size if local else None)


@register_patch("GPTJAttention")
@register_patch("CodeGenAttention")
def patch_gptj(attention: Any) -> PatchedMethods:
    """Patch GPT-J and CodeGen, which split, rotate and join the heads themselves."""
    return attn_method(1 / attention.scale_attn)


# MPT, whose attention adds ALiBi by the keys of a step, and whose model requires a mask.


_NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
"""Dummy mask; transformers uses a mask of four dimensions unchanged."""


@register_patch("MptModel")
def patch_mpt_model(model: Any) -> PatchedMethods:  # noqa: ARG001
    return {"forward": _forward_without_mask}


@register_patch("MptAttention")
def patch_mpt(attention: Any) -> PatchedMethods:
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


# Attention of the current forward pass.
#
# It is not passed as an argument, since many models do not forward unknown arguments to their
# layers.


CURRENT_ATTENTION: ContextVar[Attention | None] = ContextVar("running_attention", default=None)
"""Attention of the current forward pass; None outside the engine."""
