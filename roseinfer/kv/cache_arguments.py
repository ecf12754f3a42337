"""Checks what a cache is built from, before memory is taken for it."""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from roseinfer.config import AppendPolicy
from roseinfer.errors import BadArgument, with_kind

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST = 1 << 62
"""Sums of a few of these fit into the 64 bits that torch has."""


def checked_size(name: str, value: Any) -> int:
    """Return a size as an int."""
    try:
        size = index(value)
    except (TypeError, ValueError, RuntimeError):  # the latter are numpy's and torch's
        raise BadArgument(f"{name} must be a whole number, not {value!r}") from None
    if size < 1:
        raise BadArgument(f"{name} must be at least 1, not {value!r}")
    if size > _MOST:
        raise BadArgument(f"{name} must be at most 2**62, not {value!r}")
    return size


def checked_device(device: Any) -> torch.device:
    """Return a device on which torch can make a tensor."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    # torch raises the last one for a GPU that it was not built for.
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        said = with_kind(error).splitlines()[0]
        raise BadArgument(f"device {device!r}: torch has no such device: {said}") from error
    return found


def check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise BadArgument(
            f"a cache of {dtype} is not supported; choose a dtype of {', '.join(map(str, DTYPES))}"
        )


def check_policy(policy: Any) -> None:
    if not isinstance(policy, AppendPolicy):
        raise BadArgument(f"policy must be an AppendPolicy, not {policy!r}")
