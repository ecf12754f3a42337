"""Falcon: positions by rotation or by ALiBi, and keys that several heads share."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from roseinfer.models.doors import attend_through_interface, register
from roseinfer.models.doors.alibi import alibi_slopes

if TYPE_CHECKING:
    import torch

    from roseinfer.models.doors import Methods


@register("FalconAttention")
def open_door(attention: Any) -> Methods:
    # The model rounds them, times the positions, to bfloat16. These are what it was meant to have.
    slopes = alibi_slopes(attention.num_heads)
    attention.roseinfer_slopes = tuple(slope * attention.inv_norm_factor for slope in slopes)
    return {"forward": _forward}


def _forward(
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
