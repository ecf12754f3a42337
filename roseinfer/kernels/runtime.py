"""Which Triton kernels can run on a device, decided once, and the reason when none can."""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING

from roseinfer.errors import TritonUnavailable
from roseinfer.kv.paths import Path

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_warned: set[str] = set()


def load_kernels(device: torch.device) -> tuple[dict[Path, Callable[..., None]], str]:
    """The unchecked launchers by path; or none of them, and why they cannot run on ``device``.

    Imports Triton, so this is asked when a cache is built and never on the hot path.
    """
    if importlib.util.find_spec("triton") is None:
        return {}, "the triton package is not installed"
    from roseinfer.kernels import append as append_triton
    from roseinfer.kernels import clone as clone_triton

    if device.type != "cuda" and not (device.type == "cpu" and append_triton.is_interpreted()):
        return {}, (
            f"Triton compiles nothing for {device.type}, and its interpreter is off "
            "(set TRITON_INTERPRET=1 before the first cache is built)"
        )
    launchers: dict[Path, Callable[..., None]] = {
        Path.TRITON_FULL_BATCH: append_triton.launch_full_batch,
        Path.TRITON_IDENTITY_POS: append_triton.launch_identity_pos,
        Path.TRITON_GATHER: append_triton.launch_gather,
        Path.CLONE_TRITON: clone_triton.launch_clone,
    }
    return launchers, ""


def warn_unavailable_once(reason: str) -> None:
    """Say, once per reason and process, that torch paths write in Triton's place."""
    if reason in _warned:
        return
    _warned.add(reason)
    warnings.warn(
        f"Triton KV append is on but cannot run: {reason}. Torch operations write instead; "
        "AppendPolicy(triton=False) says that is meant.",
        TritonUnavailable,
        stacklevel=2,
    )
