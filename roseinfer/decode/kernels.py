"""Which Triton kernels a decode step runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roseinfer.kernels.runtime import load_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(frozen=True, slots=True)
class DecodeKernels:
    append_and_attend: Callable[..., torch.Tensor]
    advance_to_likeliest: Callable[..., None]


def load_decode_kernels(device: torch.device) -> DecodeKernels | None:
    """None where they cannot run. Imports Triton, so this is asked once, at the start."""
    if not load_kernels(device)[0]:
        return None
    from roseinfer.kernels.attend_decode import append_and_attend
    from roseinfer.kernels.likeliest import advance_to_likeliest

    return DecodeKernels(append_and_attend, advance_to_likeliest)
