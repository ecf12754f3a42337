"""The rungs of the ladder: one optimisation after the other, each on top of those before."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from roseinfer.bench.timing import why_triton_cannot_be_timed
from roseinfer.config import AppendPolicy
from roseinfer.kv.paths import Path

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_SLOW = {"resident_decode": False, "cuda_graph": False, "run_ahead": 0, "fused_model": False}
"""The engine's switches for what the later rungs add, all off."""
_NEVER = 1 << 30
"""More tokens than any batch has."""


@dataclass(frozen=True, slots=True)
class Rung:
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``EngineConfig``, besides those that all rungs share."""
    path: Path | None = None
    """This must have written the cache in most steps, or another rung was measured."""

    def why_not_on(self, device: torch.device) -> str:
        """Return the reason that it cannot be measured there, or an empty text."""
        resident = self.settings.get("resident_decode", False)
        if resident or (self.path is not None and self.path.needs_triton):
            return why_triton_cannot_be_timed(device)
        return ""


def rungs(run_ahead: int) -> tuple[Rung, ...]:
    per_token = AppendPolicy(
        batched=False,
        batched_rollover=False,
        batched_copy_on_write=False,
        identity=False,
        scalar_position=False,
        triton=False,
    )
    batched = replace(per_token, batched=True)
    rollover = replace(batched, batched_rollover=True, batched_copy_on_write=True)
    scalar = replace(rollover, identity=True, scalar_position=True)
    triton = replace(scalar, triton=True, triton_full_batch_min_batch=_NEVER)
    full_batch = replace(triton, triton_full_batch_min_batch=None)
    resident = {**_SLOW, "resident_decode": True}
    graph = {**resident, "cuda_graph": True}
    ahead = {**graph, "run_ahead": run_ahead}
    return (
        _append("per-token append", Path.PER_TOKEN, per_token),
        _append("batched append", Path.TORCH_GATHER, batched),
        _append("batched rollover", Path.TORCH_GATHER, rollover),
        _append("identity and scalar position", Path.TORCH_SCALAR, scalar),
        _append("Triton", Path.TRITON_IDENTITY_POS, triton),
        _append("Triton full-batch", Path.TRITON_FULL_BATCH, full_batch),
        Rung("one plan per step", _SLOW),
        Rung("fused append and attention", resident),
        Rung("CUDA graph", graph),
        Rung(f"run-ahead of {run_ahead}", ahead),
        Rung("fused model", {**ahead, "fused_model": True}),
    )


def _append(name: str, path: Path, policy: AppendPolicy) -> Rung:
    """Return a rung with a block list for every layer."""
    return Rung(name, {**_SLOW, "per_layer_kv": True, "append_policy": policy}, path)
