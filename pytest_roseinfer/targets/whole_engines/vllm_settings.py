"""What vLLM's scheduler is built with, without a model: its settings and groups of layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer.targets.others.vllm_kv import vllm_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MOST = 64
"""The most tokens of a request."""
_NONE = (
    "num_speculative_tokens",
    "num_lookahead_tokens",
    "num_prefill_lookahead_tokens",
    "num_hash_lookahead_tokens",
)


class _Settings(SimpleNamespace):
    """What is left out is off."""

    def __getattr__(self, name: str) -> None:
        return None


def settings(blocks: int, options: Mapping[str, Any]) -> _Settings:
    """Return what stands for a ``VllmConfig``; ``options`` are those of a ``SchedulerConfig``."""
    config = vllm_part("config")
    # A step has a token for each request at least, or they are refused.
    requests = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    own = {**options, "max_num_seqs": requests}
    scheduling = config.SchedulerConfig(**own, max_model_len=_MOST, is_encoder_decoder=False)
    in_flight = 1 + options["async_scheduling"]
    return _Settings(
        **dict.fromkeys(_NONE, 0),
        scheduler_config=scheduling,
        cache_config=_Settings(num_gpu_blocks=blocks, enable_prefix_caching=True),
        parallel_config=config.ParallelConfig(),
        observability_config=config.ObservabilityConfig(),
        model_config=_Settings(max_model_len=_MOST),
        ec_manager_config=_Settings(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=_Settings(),
        max_concurrent_batches=in_flight,
        max_in_flight_tokens=in_flight * scheduling.max_num_batched_tokens,
    )


def groups(block_size: int, blocks: int, windows: Sequence[int | None]) -> Any:
    """Return the ``KVCacheConfig`` of a model with a group of layers for each window."""
    interface = vllm_part("v1.kv_cache_interface")
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    kinds = [
        interface.SlidingWindowSpec(**shape, sliding_window=window)
        if window
        else interface.FullAttentionSpec(**shape)
        for window in windows
    ]
    members = [interface.KVCacheGroupSpec([], kind) for kind in kinds]
    return interface.KVCacheConfig(blocks, [], members)
