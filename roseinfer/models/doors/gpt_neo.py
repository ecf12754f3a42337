"""GPT-Neo: scores are not scaled, and local layers see a window that no mask tells of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer.models.doors import register
from roseinfer.models.doors.attn_method import attn_method

if TYPE_CHECKING:
    from roseinfer.models.doors import Methods


@register("GPTNeoSelfAttention")
def open_door(attention: Any) -> Methods:
    attention.layer_idx = attention.layer_id
    local = attention.attention_type == "local"
    return attn_method(1.0, roseinfer_window=attention.config.window_size if local else None)
