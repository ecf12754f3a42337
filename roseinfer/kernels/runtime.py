"""Where Triton kernels run, whether they are interpreted, and checks of their arguments.

Importing this does not import Triton, which decides at its first import whether kernels are
interpreted.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from roseinfer.errors import BadArgument


def unusable_reason(device: torch.device) -> str:
    """Return why no Triton kernel can run on ``device``; empty where they can.

    This imports Triton. It is called when a cache is built and never on the hot path.
    """
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    if device.type == "cuda" or (device.type == "cpu" and is_interpreted()):
        return ""
    return (
        f"Triton compiles nothing for {device.type}, and its interpreter is off "
        "(set TRITON_INTERPRET=1 before the first cache is built)"
    )


@cache
def is_interpreted() -> bool:
    """Return True if Triton's interpreter runs this process's kernels, without compiling any."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def cdiv(numbers: int, of_tile: int) -> int:
    """Return ``numbers / of_tile``, rounded up.

    Triton's own versions of this function and the next take ten times as long on the host.
    """
    return -(-numbers // of_tile)


def next_power_of_2(least: int) -> int:
    """Return the first power of two that is at least ``least``."""
    return 1 << (least - 1).bit_length()


# Argument checks of kernels that are called directly.


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
    """Raise unless an index tensor's dtype, shape and values are right; this waits for the device.

    The cache manager, whose indices are valid, launches without these checks.
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
