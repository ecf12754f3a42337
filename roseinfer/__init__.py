"""roseinfer: a small LLM inference engine whose fast paths are checked against slow twins.

    import torch
    from roseinfer import AppendPolicy, KVBlockManager

    kv = KVBlockManager(num_layers=2, num_heads=4, head_dim=64, block_size=16,
                        max_blocks_per_layer=128, device="cpu", dtype=torch.float32,
                        policy=AppendPolicy(triton=False))
    first, second = [], []                     # two sequences' blocks in layer 0
    kv.append_token_batch(0, [first, second], torch.randn(2, 4, 64), torch.randn(2, 4, 64))
    keys, values = kv.gather_sequence(0, first)

Names are imported when first used, so ``import roseinfer`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roseinfer.config import AppendPolicy as AppendPolicy
    from roseinfer.config import SamplingParams as SamplingParams
    from roseinfer.errors import BadArgument as BadArgument
    from roseinfer.errors import BadBlock as BadBlock
    from roseinfer.errors import BadRefcount as BadRefcount
    from roseinfer.errors import ConfigError as ConfigError
    from roseinfer.errors import OutOfBlocks as OutOfBlocks
    from roseinfer.errors import RoseinferError as RoseinferError
    from roseinfer.errors import StalePlan as StalePlan
    from roseinfer.errors import TritonUnavailable as TritonUnavailable
    from roseinfer.errors import UnsupportedModel as UnsupportedModel
    from roseinfer.kv.manager import KVBlockManager as KVBlockManager
    from roseinfer.kv.paths import Condition as Condition
    from roseinfer.kv.paths import Path as Path
    from roseinfer.kv.plan import AppendPlan as AppendPlan
    from roseinfer.kv.pool import KVBlockInfo as KVBlockInfo

_HOMES = {
    "AppendPlan": "roseinfer.kv.plan",
    "AppendPolicy": "roseinfer.config",
    "BadArgument": "roseinfer.errors",
    "BadBlock": "roseinfer.errors",
    "BadRefcount": "roseinfer.errors",
    "Condition": "roseinfer.kv.paths",
    "ConfigError": "roseinfer.errors",
    "KVBlockInfo": "roseinfer.kv.pool",
    "KVBlockManager": "roseinfer.kv.manager",
    "OutOfBlocks": "roseinfer.errors",
    "Path": "roseinfer.kv.paths",
    "RoseinferError": "roseinfer.errors",
    "SamplingParams": "roseinfer.config",
    "StalePlan": "roseinfer.errors",
    "TritonUnavailable": "roseinfer.errors",
    "UnsupportedModel": "roseinfer.errors",
}

__version__ = "0.1.0"
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'roseinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
