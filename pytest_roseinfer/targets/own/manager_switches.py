"""The block manager's switches, and which of them each of its fast paths needs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.fast_path import FastPath
from roseinfer import AttentionPath, Path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OPTION_CHOICES: Mapping[str, Sequence[Any]] = {
    "triton": (True, False),
    "identity": (True, False),
    "scalar_position": (True, False),
    "batched_copy_on_write": (True, False),
    "batched_rollover": (True, False),
    "batched": (True, False),
    "triton_min_batch": (1, 3),
    "triton_full_batch_min_batch": (None, 2),
}
_ALWAYS_TRITON = {"triton": True, "triton_min_batch": 1}
_TORCH = {"triton": False}
_CLONES_OFF = {"batched_copy_on_write": False}
_IDENTITY_OFF = {"identity": False}
_SCALAR_OFF = {"scalar_position": False}
_NO_SCALAR = [_IDENTITY_OFF, _SCALAR_OFF]
_SUBSETS = [_IDENTITY_OFF, {"batched_rollover": False}, _CLONES_OFF]
_moves = partial(FastPath, Path.PER_TOKEN.value)
PATHS = {
    Path.TRITON_FULL_BATCH.value: _moves(never_with=[_TORCH, *_NO_SCALAR], one_position=True),
    Path.TRITON_IDENTITY_POS.value: _moves(never_with=[_TORCH, _IDENTITY_OFF]),
    Path.TRITON_GATHER.value: _moves(runs_with=_SUBSETS, never_with=[_TORCH]),
    Path.TORCH_SCALAR.value: _moves(
        runs_with=[_TORCH], never_with=[_ALWAYS_TRITON, *_NO_SCALAR], one_position=True
    ),
    Path.TORCH_VECTOR.value: _moves(
        runs_with=[{**_TORCH, **_SCALAR_OFF}], never_with=[_ALWAYS_TRITON, _IDENTITY_OFF]
    ),
    Path.TORCH_GATHER.value: _moves(
        runs_with=[{**_TORCH, **subset} for subset in _SUBSETS], never_with=[_ALWAYS_TRITON]
    ),
    Path.CLONE_TRITON.value: _moves(never_with=[_TORCH, _CLONES_OFF]),
    Path.CLONE_TORCH.value: _moves(
        runs_with=[{**_TORCH, "batched_copy_on_write": True}],
        never_with=[{"triton": True}, _CLONES_OFF],
    ),
    AttentionPath.DECODE_TRITON.value: FastPath(
        equals=AttentionPath.REFERENCE.value, never_with=[_TORCH]
    ),
}
