"""Bloom: its attention adds ALiBi by the keys of a step, and the residual behind itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer.models.doors import attend_through_interface, register
from roseinfer.models.doors.alibi import alibi_slopes

if TYPE_CHECKING:
    import torch

    from roseinfer.models.doors import Methods


@register("BloomAttention")
def open_door(attention: Any) -> Methods:
    attention.roseinfer_slopes = alibi_slopes(attention.num_heads)
    return {"forward": _forward}


def _forward(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    out = attend_through_interface(
        self, query, key, value, self.inv_norm_factor, roseinfer_slopes=self.roseinfer_slopes
    )
    return self.dense(out.flatten(2)) + residual, None
