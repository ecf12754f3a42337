"""The checks of what kernels are given that are called on their own."""

from __future__ import annotations

import torch

from roseinfer.errors import BadArgument
from roseinfer.kernels.runtime import is_interpreted


def check_cache_pair(k_cache: torch.Tensor, v_cache: torch.Tensor, dims: int) -> None:
    if k_cache.dim() != dims or k_cache.shape != v_cache.shape:
        raise BadArgument(
            f"key and value caches must be {dims}-dimensional and of one shape; they are "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if k_cache.device.type == "cpu" and not is_interpreted():
        raise BadArgument(
            "the caches are on the CPU, where Triton kernels need its interpreter: set "
            "TRITON_INTERPRET=1 before roseinfer is imported"
        )
    if k_cache.dtype != v_cache.dtype or k_cache.device != v_cache.device:
        raise BadArgument(
            "key and value caches must share dtype and device; they are "
            f"{k_cache.dtype} on {k_cache.device} and {v_cache.dtype} on {v_cache.device}"
        )


def check_index(
    name: str, index: torch.Tensor, like: torch.Tensor, length: int, bound: int
) -> None:
    """Raise unless an index tensor's kind, length and values are right; this waits for the device.

    The manager, which knows its indices, launches without these checks.
    """
    if index.dtype not in (torch.int32, torch.int64):
        raise BadArgument(f"{name} must be int32 or int64, not {index.dtype}")
    if index.device != like.device:
        raise BadArgument(f"{name} is on {index.device} and the cache on {like.device}")
    if index.shape != (length,):
        raise BadArgument(f"{name} must have shape ({length},), not {tuple(index.shape)}")
    if length:
        low, high = (int(edge) for edge in torch.aminmax(index))
        if low < 0 or high >= bound:
            raise BadArgument(f"{name} must lie in 0..{bound - 1}; it spans {low}..{high}")
