"""Attention in place of ``_attn``, to which some families hand the heads after splitting them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer.models.doors import attend_through_interface

if TYPE_CHECKING:
    import torch

    from roseinfer.models.doors import Methods


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
