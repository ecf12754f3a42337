"""MPT: its attention adds ALiBi by the keys of a step, and its model insists on a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roseinfer.models.doors import attend_through_interface, register
from roseinfer.models.doors.alibi import alibi_slopes

if TYPE_CHECKING:
    from roseinfer.models.doors import Methods

_NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
"""Transformers takes a mask of four dimensions as it is."""


@register("MptModel")
def open_model(model: Any) -> Methods:  # noqa: ARG001
    return {"forward": _forward_without_mask}


@register("MptAttention")
def open_door(attention: Any) -> Methods:
    attention.roseinfer_slopes = alibi_slopes(attention.n_heads)
    return {"forward": _forward}


def _forward_without_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs | {"attention_mask": _NO_MASK})


def _forward(
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
