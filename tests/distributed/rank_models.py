"""Models that every rank builds itself, on its device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from roseinfer.models import loading
from tests.distributed.followers import build
from tests.distributed.test_sharded_models import MODELS

if TYPE_CHECKING:
    import torch


def build_on(device: torch.device, model: str) -> Any:
    return build(MODELS[model]).to(device)


def build_with_limit(device: torch.device, model: str, leader: int, max_bytes: int) -> Any:
    """Build a model; in any process but the leader's, limit the bytes for a cache."""
    if os.getpid() != leader:
        loading._MAX_CPU_CACHE_BYTES = max_bytes
    return build_on(device, model)
