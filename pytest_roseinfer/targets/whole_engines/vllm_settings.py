"""What vLLM's scheduler is built with, without a model, and what it is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from pytest_roseinfer.targets.others.vllm_kv import vllm_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.mix import RequestMix

_NONE = ("num_lookahead_tokens", "num_prefill_lookahead_tokens", "num_hash_lookahead_tokens")


class _Settings(SimpleNamespace):
    """What is left out is off."""

    def __getattr__(self, name: str) -> None:
        return None


class _NoGrammars:
    """No request is held to a grammar."""

    def accept_tokens(self, *_: object) -> bool:
        return True

    def validate_tokens(self, _: object, tokens: list[int]) -> list[int]:
        return tokens


def new_request(name: str, prompt: list[int], most: int, end: int | None, block_size: int) -> Any:
    """Return a request; which ones are more urgent follows from how long they are."""
    params = vllm_part("sampling_params").SamplingParams(max_tokens=most)
    params.update_from_generation_config({}, end)
    utils, sha256 = vllm_part("v1.core.kv_cache_utils"), vllm_part("utils.hashing").sha256
    utils.init_none_hash(sha256)
    hasher = utils.get_request_block_hasher(block_size, sha256)
    own = {"priority": len(prompt) % 3, "block_hasher": hasher}
    return vllm_part("v1.request").Request(name, prompt, params, None, **own)


def new_scheduler(mix: RequestMix) -> Any:
    options = dict(mix.options)
    windows, drafts = options.pop("windows"), options.pop("drafts")
    room = -(-mix.cache_tokens // mix.block_size)
    blocks = 1 + len(windows) * room  # one is nobody's
    parts = vllm_part("v1.core.sched.async_scheduler")
    kind = parts.Scheduler
    if options["async_scheduling"]:
        kind, drafts = parts.AsyncScheduler, 0  # its worker would draft by itself
    return kind(
        _settings(blocks, room * mix.block_size, options, drafts),
        _groups(mix.block_size, blocks, windows),
        structured_output_manager=_NoGrammars(),
        block_size=mix.block_size,
    )


def _settings(blocks: int, longest: int, options: Mapping[str, Any], drafts: int) -> _Settings:
    """Return what stands for a ``VllmConfig``; ``options`` are those of a ``SchedulerConfig``.

    vLLM refuses to start where the ``longest`` request has not room enough alone.
    """
    no = dict.fromkeys(
        ("use_eagle", "use_eagle_block_drop", "needs_eagle_block_drop"), lambda: False
    )
    config = vllm_part("config")
    # A step has a token for each request at least, or they are refused.
    requests = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    own = {**options, "max_num_seqs": requests}
    scheduling = config.SchedulerConfig(**own, max_model_len=longest, is_encoder_decoder=False)
    in_flight = 1 + options["async_scheduling"]
    return _Settings(
        **dict.fromkeys(_NONE, 0),
        num_speculative_tokens=drafts,
        speculative_config=_Settings(**no, max_num_new_slots_for_drafting=0) if drafts else None,
        scheduler_config=scheduling,
        cache_config=_Settings(num_gpu_blocks=blocks, enable_prefix_caching=True),
        parallel_config=config.ParallelConfig(),
        observability_config=config.ObservabilityConfig(),
        model_config=_Settings(max_model_len=longest),
        ec_manager_config=_Settings(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=_Settings(),
        max_concurrent_batches=in_flight,
        max_in_flight_tokens=in_flight * scheduling.max_num_batched_tokens,
    )


def _groups(block_size: int, blocks: int, windows: Sequence[int | None]) -> Any:
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
