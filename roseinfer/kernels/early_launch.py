"""Whether a kernel may start before the one in front of it has ended."""

from __future__ import annotations

from functools import cache

import torch


def early(like: torch.Tensor) -> bool:
    """NVIDIA GPUs of compute capability 9 and up let kernels start early that say when to wait.

    A kernel that does must have waited before it writes anything, and before it reads what
    another kernel of the same step has written. What lets the next one in may come before the
    wait: each waits for the end of the one in front, which has waited itself. Only a step's first
    kernel must wait before, since others read what the step before wrote without waiting.
    """
    return like.is_cuda and _lets_kernels_start_early(like.get_device())


@cache
def _lets_kernels_start_early(device: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
