"""Models that every rank makes itself, on the device that it is given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from roseinfer.models import loading
from tests.distributed.followers import build
from tests.distributed.test_sharded_models import MODELS

if TYPE_CHECKING:
    import torch


def made(device: torch.device, model: str) -> Any:
    return build(MODELS[model]).to(device)


def made_with_room(device: torch.device, model: str, leader: int, room: int) -> Any:
    """Make a model; in any process but the leader's, leave so many bytes for a cache."""
    if os.getpid() != leader:
        loading._MAX_CPU_CACHE_BYTES = room
    return made(device, model)
