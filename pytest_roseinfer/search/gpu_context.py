"""Notices that what was tested broke the GPU's context: after that, nothing works in a process."""

from __future__ import annotations

import torch

LOST = (
    "It was not made smaller: the GPU's context is gone, and nothing in this process works any "
    "more. CUDA says so late, so a step before may be to blame: replay it with "
    "CUDA_LAUNCH_BLOCKING=1."
)


class GpuLostError(RuntimeError):
    """An earlier test broke the GPU's context."""

    def __init__(self) -> None:
        super().__init__(
            "the GPU's context is gone since a test before failed: run this one in another process"
        )


def is_lost() -> bool:
    """Ask a GPU that is in use whether it still does anything."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
