"""Adapter of the engine of transformers' ``generate_batch``, driven step by step on small models.

All its requests share one random generator, so only greedy requests are tested.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities.cache_data import FastPath
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.targets import engine_models as models
from pytest_roseinfer.targets import engine_models as shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, Sampling

# The manager changes its model's attention, so the slow twin has its own model.
_served = lru_cache(models.network)


class TransformersEngine(EngineAdapter):
    """Continuous batching of transformers."""

    vocabulary = shapes.VOCABULARY
    max_tokens = shapes.MAX_TOKENS
    eos_token = shapes.EOS_TOKEN
    sampling = SamplingTraits(greedy_only=True)
    block_sizes: ClassVar[Sequence[int]] = (4, 5, 6, 8)
    paths: ClassVar[Mapping[str, FastPath]] = {
        **dict.fromkeys(("prefix hit", "preempted", "cancelled"), FastPath("no cache")),
        "chunked prefill": FastPath("no cache", aims=[{"max_batch_tokens": 3}]),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "model": ("llama", "gpt2", *shapes.WITH_WINDOWS_ALONE),
        "attention": ("sdpa", "eager"),
        "scheduler_type": ("fifo", "prefill_first"),
        "allow_block_sharing": (True, False),
        "max_batch_tokens": (64, 3, 8),
        "max_requests_per_batch": (3, 1, 2, 40),
    }

    def make(self, mix: RequestMix) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        options = dict(mix.options)
        name = options.pop("model")
        model = self.served_model(name, mix.device)
        model.set_attn_implementation(options.pop("attention"))
        # Two layer types share no sector, and need more blocks than num_blocks:
        # docs/findings/generate-batch.md.
        options["num_blocks"] = -(-mix.cache_tokens // mix.block_size) + 2 * (name == shapes.HYBRID)
        options |= {"page_size": mix.block_size, "return_logprobs": True}
        config = ContinuousBatchingConfig(auto_switch_to_flash=False, **options)
        self.manager = model.init_continuous_batching(GenerationConfig(do_sample=False), config)
        self.processor = self.manager._create_batch_processor()
        self.cache = self.processor.cache
        padding = 2 * self.cache.bytes_per_sector
        self.cache.cache_tensor[padding:].view(torch.float32).fill_(torch.nan)
        self.cache.search_prefix_match = partial(self._search, self.cache.search_prefix_match)
        self.counts: Counter[str] = Counter()
        self.outputs: dict[str, Any] = {}
        self.cancelled: set[str] = set()

    def served_model(self, name: str, device: str) -> Any:
        """Return the model of a name."""
        return _served(name, device)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        end = -1 if sampling.ignore_eos else self.eos_token
        return self.manager.add_request(
            list(prompt), max_new_tokens=sampling.max_new_tokens, eos_token_id=end, streaming=True
        )

    def step(self) -> None:
        if self.processor.prepare_next_batch():
            running = self.processor.inputs_and_outputs.requests_in_batch
            parts = any(each.state.remaining_prefill_tokens for each in running)
            self.counts["chunked prefill"] += parts
            self.processor._generation_step(self.manager.model)
            self.processor.update_batch()
        waiting = self.processor.scheduler.waiting_requests.values()
        self.counts["preempted"] += any(each._true_initial_tokens for each in waiting)
        while (output := self.manager.get_result()) is not None:
            self.outputs[output.request_id] = output

    def _search(self, search: Callable[[str, list[int]], int], name: str, prompt: list[int]) -> int:
        num_tokens = search(name, prompt)
        self.counts["prefix hit"] += num_tokens > 0
        return num_tokens

    def cancel(self, request: Any) -> None:
        self.counts["cancelled"] += not self.is_finished(request)
        self.cancelled.add(request)
        self.manager.cancel_request(request)

    def tokens(self, request: Any) -> list[int]:
        return self.outputs[request].generated_tokens if request in self.outputs else []

    def logprobs(self, request: Any) -> Sequence[float]:
        return self.outputs[request].logprobs if request in self.outputs else []

    def is_finished(self, request: Any) -> bool:
        over = request in self.outputs and self.outputs[request].is_finished()
        return over or request in self.cancelled

    def find_leaks(self) -> str:
        self.step()  # releases the requests that were cancelled last
        self.cache.evict_cached_blocks()
        self.cache.pool.try_to_free_sectors()
        num_held = self.cache.num_sectors - self.cache.pool.num_free_sectors
        return f"{num_held} sectors" if num_held else ""

    def path_counts(self) -> Mapping[str, int]:
        return self.counts

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:
        return models.logits(mix.options["model"], mix.device, tuple(tokens))


class ForkingTransformersEngine(TransformersEngine):
    """Adapter with ``num_return_sequences``, which forks a request at its last token."""

    def fork(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        """Fork a request of the maximum length, and cut each fork to its own maximum."""
        self.manager.num_return_sequences = len(samplings)
        max_new_tokens = max(each.max_new_tokens for each in samplings)
        name = self.submit(
            prompt, replace(samplings[0], max_new_tokens=max_new_tokens, ignore_eos=True)
        )
        names = [name, *(f"{name}__child#{at}" for at in range(len(samplings) - 1))]
        while not all(map(self.is_finished, names)):
            self.step()
        forks = zip(map(self.tokens, names), samplings, strict=True)
        return [_cut(tokens[: each.max_new_tokens], each) for tokens, each in forks]


def _cut(new: list[int], sampling: Sampling) -> list[int]:
    ends = TransformersEngine.eos_token in new and not sampling.ignore_eos
    return new[: new.index(TransformersEngine.eos_token) + 1] if ends else new
