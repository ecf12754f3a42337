"""GPT-Neo: scores are not scaled, and local layers see a window that no mask tells of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer.models.doors import attend_through_interface, register

if TYPE_CHECKING:
    import torch

    from roseinfer.models.doors import Methods


@register("GPTNeoSelfAttention")
def open_door(attention: Any) -> Methods:
    attention.layer_idx = attention.layer_id
    return {"_attn": _attend}


def _attend(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,  # noqa: ARG001
) -> tuple[torch.Tensor, None]:
    window = self.config.window_size if self.attention_type == "local" else None
    out = attend_through_interface(self, query, key, value, 1.0, roseinfer_window=window)
    return out.transpose(1, 2), None
