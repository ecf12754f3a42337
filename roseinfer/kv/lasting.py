"""Tensors that outlive the call that makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def lasting() -> AbstractContextManager[Any]:
    """Make tensors, within this context, that may be written to at any time later.

    A tensor made in inference mode could be written to in inference mode alone, and a buffer is
    made or grown wherever its first use happens to be.
    """
    return torch.inference_mode(mode=False)
