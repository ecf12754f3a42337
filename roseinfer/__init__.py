"""roseinfer: a small LLM inference engine whose fast paths are checked against slow ones.

    import torch
    from roseinfer import AppendPolicy, KVBlockManager

    kv = KVBlockManager(num_layers=2, num_heads=4, head_dim=64, block_size=16,
                        max_blocks_per_layer=128, device="cpu", dtype=torch.float32,
                        policy=AppendPolicy(triton=False))
    first, second = [], []                     # block lists of two sequences in layer 0
    kv.append_token_batch(0, [first, second], torch.randn(2, 4, 64), torch.randn(2, 4, 64))
    keys, values = kv.gather_sequence(0, first)

Names are imported when first used, so ``import roseinfer`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roseinfer.async_llm import AsyncLLM as AsyncLLM
    from roseinfer.config import AppendPolicy as AppendPolicy
    from roseinfer.config import EngineConfig as EngineConfig
    from roseinfer.errors import BadArgument as BadArgument
    from roseinfer.errors import BadBlock as BadBlock
    from roseinfer.errors import BadRefcount as BadRefcount
    from roseinfer.errors import ConfigError as ConfigError
    from roseinfer.errors import DetokenizationFailed as DetokenizationFailed
    from roseinfer.errors import EngineStopped as EngineStopped
    from roseinfer.errors import NoDistribution as NoDistribution
    from roseinfer.errors import OutOfBlocks as OutOfBlocks
    from roseinfer.errors import RanksFailed as RanksFailed
    from roseinfer.errors import RequestTooLarge as RequestTooLarge
    from roseinfer.errors import RoseinferError as RoseinferError
    from roseinfer.errors import StalePlan as StalePlan
    from roseinfer.errors import StepFailed as StepFailed
    from roseinfer.errors import TooBusy as TooBusy
    from roseinfer.errors import TritonUnavailable as TritonUnavailable
    from roseinfer.errors import UnsupportedModel as UnsupportedModel
    from roseinfer.guided.guide import Guide as Guide
    from roseinfer.kv.manager import KVBlockManager as KVBlockManager
    from roseinfer.kv.plan import AppendPlan as AppendPlan
    from roseinfer.kv.pool import KVBlockInfo as KVBlockInfo
    from roseinfer.llm import LLM as LLM
    from roseinfer.llm import RequestOutput as RequestOutput
    from roseinfer.models.tiny import TinyGPT2 as TinyGPT2
    from roseinfer.models.tiny import tiny_gpt2 as tiny_gpt2
    from roseinfer.paths import AttentionPath as AttentionPath
    from roseinfer.paths import Condition as Condition
    from roseinfer.paths import EnginePath as EnginePath
    from roseinfer.paths import Path as Path
    from roseinfer.sampling_params import SamplingParams as SamplingParams

_HOMES = {
    name: f"roseinfer.{home}"
    for home, names in {
        "async_llm": "AsyncLLM",
        "config": "AppendPolicy EngineConfig",
        "paths": "AttentionPath Condition EnginePath Path",
        "errors": "BadArgument BadBlock BadRefcount ConfigError DetokenizationFailed "
        "EngineStopped NoDistribution OutOfBlocks RanksFailed RequestTooLarge "
        "RoseinferError StalePlan StepFailed TooBusy TritonUnavailable UnsupportedModel",
        "guided.guide": "Guide",
        "kv.manager": "KVBlockManager",
        "kv.plan": "AppendPlan",
        "kv.pool": "KVBlockInfo",
        "llm": "LLM RequestOutput",
        "models.tiny": "TinyGPT2 tiny_gpt2",
        "sampling_params": "SamplingParams",
    }.items()
    for name in names.split()
}
"""Module of each public name."""

__version__ = "0.1.0"
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'roseinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
