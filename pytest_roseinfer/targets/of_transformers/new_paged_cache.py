"""Builds transformers' paged cache, without a model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from unittest import mock

from transformers import ContinuousBatchingConfig, GPT2Config
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper

if TYPE_CHECKING:
    import torch

    from pytest_roseinfer.adapters.cache import CacheSpec


def new_cache(
    spec: CacheSpec, num_blocks: int, dtype: torch.dtype, *, sharing: bool, **model: Any
) -> Any:
    """Build a cache for a model, of which nothing matters but its sizes and its kinds of layers.

    GPT-2 has no rotary embedding, which would refuse odd head sizes.
    """
    heads = {"n_head": spec.num_heads, "n_embd": spec.num_heads * spec.head_dim}
    config = GPT2Config(n_layer=spec.num_layers, **heads, **model)
    batching = ContinuousBatchingConfig(
        page_size=spec.block_size,
        num_blocks=num_blocks,
        max_batch_tokens=64,
        max_memory_percent=0.9,
        max_blocks_per_request=num_blocks,
        allow_block_sharing=sharing,
    )
    alone = DistributedHelper(None, None)
    # Without psutil every new cache logs that memory cannot be measured.
    with mock.patch.object(logging.getLogger("ContinuousBatchingLogger"), "disabled", True):
        return PagedAttentionCache(config, batching, spec.device, alone, dtype=dtype)
