"""Models that every rank makes itself, on the device that it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.parallel.followers import build
from tests.parallel.test_shares import MODELS

if TYPE_CHECKING:
    import torch


def made(device: torch.device, model: str) -> Any:
    return build(MODELS[model]).to(device)
