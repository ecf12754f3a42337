"""Brings the ranks of a model together, before any of them loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from roseinfer.config import Launched
from roseinfer.errors import ConfigError
from roseinfer.models.loading import rank_device
from roseinfer.parallel.follower import follow
from roseinfer.ranks.meeting import follow_launched, lead_launched, start_others

if TYPE_CHECKING:
    from roseinfer.config import EngineConfig
    from roseinfer.ranks.ranks import LeadingRank


def lead(model: Any, config: EngineConfig, device: str | None, dtype: str | None) -> LeadingRank:
    """Return the ranks that load the same model; this process leads them.

    Under ``torchrun`` the first process does. In the others this follows until the first lets them
    go, and ends them.
    """
    size, launched = config.tensor_parallel_size, Launched.from_env()
    if launched is not None and launched.size != size:
        raise ConfigError(
            f"tensor_parallel_size={size}, and torchrun started {launched.size} processes: give "
            f"torchrun --nproc-per-node {size}, or start the command without it"
        )
    if launched is not None and launched.rank:
        follow(follow_launched(launched), launched.rank, size)
    where = rank_device(device, 0, size)
    if isinstance(model, nn.Module):
        model.to("cpu")  # the others read it from the message, and would fill this rank's GPU
    bring_together = start_others if launched is None else lead_launched
    return bring_together(size, where, (model, config, device, dtype))
