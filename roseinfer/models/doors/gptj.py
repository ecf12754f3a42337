"""GPT-J and CodeGen: the heads are split, rotated and put together by the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer.models.doors import attend_through_interface, register

if TYPE_CHECKING:
    import torch

    from roseinfer.models.doors import Methods


@register("GPTJAttention")
@register("CodeGenAttention")
def open_door(attention: Any) -> Methods:  # noqa: ARG001
    return {"_attn": _attend}


def _attend(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,  # noqa: ARG001
) -> tuple[torch.Tensor, None]:
    out = attend_through_interface(self, query, key, value, 1 / self.scale_attn)
    return out.transpose(1, 2), None
