"""Adapter of nano-vllm's engine: its scheduler, its blocks and its model runner, without a GPU.

A fake model stores a key per token that depends on all previous keys, as attention finds them by
the runner's block tables and slots; the next token follows from the key.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities.cache_data import FastPath
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.targets.nano_vllm import INSTALL
from pytest_roseinfer.targets.partial_import import import_part, stub_package
from pytest_roseinfer.targets.prefix_keys import argmax_token, key_of, logits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, Sampling

# The fake model.


class NanoVllmModel:
    """Fake model that reads and writes keys in the slots of the runner's context."""

    def __init__(self, config: SimpleNamespace, vocabulary: int) -> None:
        self.block_size, self.vocabulary = config.kvcache_block_size, vocabulary
        self.keys = [-1] * config.num_kvcache_blocks * config.kvcache_block_size
        self.get_context: Any = import_part("nanovllm", "utils.context", INSTALL).get_context

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> list[int]:
        """Return the key of the last token of each sequence."""
        context = self.get_context()
        if context.is_prefill:
            ends, lengths = context.cu_seqlens_q.tolist(), context.cu_seqlens_k.diff().tolist()
        else:
            ends, lengths = [*range(len(tokens) + 1)], context.context_lens.tolist()
        places = zip(positions.tolist(), context.slot_mapping.tolist(), strict=True)
        new = [*zip(tokens.tolist(), places, strict=True)]
        last = []
        for row, length in enumerate(lengths):
            keys: list[int] = []
            rows = new[ends[row] : ends[row + 1]]
            for before, (token, (position, slot)) in enumerate(rows, length - len(rows)):
                visible_keys = keys
                if context.block_tables is not None:
                    visible_keys = self._stored(context.block_tables[row].tolist(), before)
                keys.append(key_of(token, position, visible_keys))
                self.keys[slot] = keys[-1]
            last.append(keys[-1])
        return last

    def _stored(self, table: list[int], length: int) -> list[int]:
        size = self.block_size
        return [self.keys[table[at // size] * size + at % size] for at in range(length)]

    def compute_logits(self, keys: list[int]) -> torch.Tensor:
        """Return the argmax tokens, which the runner's sampler passes through."""
        return torch.as_tensor([argmax_token(key, self.vocabulary) for key in keys])


_ALONE = "all anew"


class NanoVllmEngine(EngineAdapter):
    """nano-vllm's scheduler and block manager, with a fake model."""

    eos_token = 5
    sampling = SamplingTraits(greedy_only=True)
    # It uses multiples of 256 tokens, by the same code; blocks of 1 token need other code.
    block_sizes: ClassVar[Sequence[int]] = (4, 2, 3, 5, 8)
    paths: ClassVar[Mapping[str, FastPath]] = {
        "prefix hit": FastPath(_ALONE),
        "chunked prefill": FastPath(_ALONE, aims=[{"max_num_batched_tokens": 3}]),
        "preempted": FastPath(_ALONE),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "max_num_batched_tokens": (64, 3, 8),
        "max_num_seqs": (8, 1, 2, 40),
    }

    def make(self, mix: RequestMix) -> None:
        with stub_package("flash_attn"):
            engine = import_part("nanovllm", "engine.llm_engine", INSTALL)
        self.new_params = engine.SamplingParams
        engine.Sequence.block_size = mix.block_size  # a class attribute, as its engine sets it
        config = SimpleNamespace(
            eos=self.eos_token,
            kvcache_block_size=mix.block_size,
            num_kvcache_blocks=-(-mix.cache_tokens // mix.block_size),
            **mix.options,
        )
        self.counts: Counter[str] = Counter()
        self.engine = object.__new__(engine.LLMEngine)
        self.engine.scheduler = engine.Scheduler(config)
        manager = self.engine.scheduler.block_manager
        manager.can_allocate = partial(self._count_prefix_hit, manager.can_allocate)
        self.engine.model_runner = object.__new__(engine.ModelRunner)
        vars(self.engine.model_runner).update(
            block_size=mix.block_size,
            world_size=1,
            rank=0,
            enforce_eager=True,
            model=NanoVllmModel(config, self.vocabulary),
            sampler=lambda argmax_token, _: argmax_token,
        )

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        wishes = {"max_tokens": sampling.max_new_tokens, "ignore_eos": sampling.ignore_eos}
        self.engine.add_request(list(prompt), self.new_params(**wishes))
        return self.engine.scheduler.waiting[-1]

    def step(self) -> None:
        if self.engine.is_finished():
            return
        on_cpu = mock.patch.object(torch.Tensor, "cuda", lambda tensor, **_: tensor)
        with on_cpu, mock.patch.object(torch, "tensor", _unpinned_tensor):
            self.engine.step()
        waiting = self.engine.scheduler.waiting
        self.counts["preempted"] += any(each.num_completion_tokens for each in waiting)
        self.counts["chunked prefill"] += any(each.block_table for each in waiting)

    def _count_prefix_hit(self, look_up: Callable[[Any], int], request: Any) -> int:
        num_blocks = look_up(request)
        self.counts["prefix hit"] += num_blocks > 0
        return num_blocks

    def tokens(self, request: Any) -> list[int]:
        return list(request.completion_token_ids)

    def is_finished(self, request: Any) -> bool:
        return bool(request.is_finished)

    def find_leaks(self) -> str:
        held_blocks = self.engine.scheduler.block_manager.used_block_ids
        return f"{len(held_blocks)} blocks" if held_blocks else ""

    def path_counts(self) -> Mapping[str, int]:
        return self.counts

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:  # noqa: ARG002
        return logits_of(tokens, self.vocabulary)


def _unpinned_tensor(values: Any, *, dtype: torch.dtype, **_: bool) -> torch.Tensor:
    return torch.as_tensor(values, dtype=dtype)
