"""Whether times of the Triton kernels taken here would mean anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.kernels.runtime import is_interpreted, why_unusable

if TYPE_CHECKING:
    import torch


def why_triton_cannot_be_timed(device: torch.device) -> str:
    """The reason, or nothing where they can be."""
    reason = why_unusable(device)
    if not reason and is_interpreted():
        return "Triton's interpreter is on, and its speed says nothing about the kernels"
    return reason
