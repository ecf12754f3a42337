"""GPT-J and CodeGen: the heads are split, rotated and put together by the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer.models.doors import register
from roseinfer.models.doors.attn_method import attn_method

if TYPE_CHECKING:
    from roseinfer.models.doors import Methods


@register("GPTJAttention")
@register("CodeGenAttention")
def open_door(attention: Any) -> Methods:
    return attn_method(1 / attention.scale_attn)
