"""Replacements for what other projects' engines call on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch


def unpinned(*makers: str) -> Any:
    """Return a context in which these functions of torch make tensors without pinned memory."""
    replacements: Any = {name: partial(_without_pin, getattr(torch, name)) for name in makers}
    return mock.patch.multiple(torch, **replacements)


def _without_pin(make: Any, *args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:  # noqa: ARG001
    tensor: torch.Tensor = make(*args, **options)
    return tensor
