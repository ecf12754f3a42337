"""Adapter of vLLM's scheduler (V1), with a fake worker that needs no GPU."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities.cache_data import FastPath
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.targets.prefix_keys import key_of
from pytest_roseinfer.targets.vllm_kv import vllm_part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, Sampling

# Construction of the scheduler and its requests, without a model.


_NONE = ("num_lookahead_tokens", "num_prefill_lookahead_tokens", "num_hash_lookahead_tokens")


class Settings(SimpleNamespace):
    """Settings object on which every unset field reads as None."""

    def __getattr__(self, name: str) -> None:
        return None


class NoGrammars:
    """Stub of the structured output manager: no request has a grammar."""

    def accept_tokens(self, *_: object) -> bool:
        return True

    def validate_tokens(self, _: object, tokens: list[int]) -> list[int]:
        return tokens


def new_request(
    name: str, prompt: list[int], max_tokens: int, end: int | None, block_size: int
) -> Any:
    """Return a request, whose priority depends on its prompt's length."""
    params = vllm_part("sampling_params").SamplingParams(max_tokens=max_tokens)
    params.update_from_generation_config({}, end)
    utils, sha256 = vllm_part("v1.core.kv_cache_utils"), vllm_part("utils.hashing").sha256
    utils.init_none_hash(sha256)
    hasher = utils.get_request_block_hasher(block_size, sha256)
    fields = {"priority": len(prompt) % 3, "block_hasher": hasher}
    return vllm_part("v1.request").Request(name, prompt, params, None, **fields)


def new_scheduler(mix: RequestMix) -> Any:
    options = dict(mix.options)
    windows, drafts = options.pop("windows"), options.pop("drafts")
    room = -(-mix.cache_tokens // mix.block_size)
    blocks = 1 + len(windows) * room  # one is the null block
    parts = vllm_part("v1.core.sched.async_scheduler")
    kind = parts.Scheduler
    if options["async_scheduling"]:
        kind, drafts = (
            parts.AsyncScheduler,
            0,
        )  # with async scheduling the worker itself would draft
    return kind(
        scheduler_settings(blocks, room * mix.block_size, options, drafts),
        _groups(mix.block_size, blocks, windows),
        structured_output_manager=NoGrammars(),
        block_size=mix.block_size,
    )


def scheduler_settings(
    blocks: int, longest: int, options: Mapping[str, Any], drafts: int
) -> Settings:
    """Return a stand-in for a ``VllmConfig``; ``options`` are those of a ``SchedulerConfig``.

    vLLM refuses to start if the ``longest`` request does not fit into the cache.
    """
    no = dict.fromkeys(
        ("use_eagle", "use_eagle_block_drop", "needs_eagle_block_drop"), lambda: False
    )
    config = vllm_part("config")
    # vLLM requires that a step has at least one token per request.
    requests = min(options["max_num_seqs"], options["max_num_batched_tokens"])
    scheduler_options = {**options, "max_num_seqs": requests}
    scheduling = config.SchedulerConfig(
        **scheduler_options, max_model_len=longest, is_encoder_decoder=False
    )
    in_flight = 1 + options["async_scheduling"]
    return Settings(
        **dict.fromkeys(_NONE, 0),
        num_speculative_tokens=drafts,
        speculative_config=Settings(**no, max_num_new_slots_for_drafting=0) if drafts else None,
        scheduler_config=scheduling,
        cache_config=Settings(num_gpu_blocks=blocks, enable_prefix_caching=True),
        parallel_config=config.ParallelConfig(),
        observability_config=config.ObservabilityConfig(),
        model_config=Settings(max_model_len=longest),
        ec_manager_config=Settings(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=Settings(),
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


# The fake worker: it stores keys that depend on all keys seen.


Window = int | None


class VllmWorker:
    """Fake model runner, with requests, block tables and keys as in vLLM's."""

    def __init__(self, blocks: int, block_size: int, windows: Sequence[Window]) -> None:
        self.size, self.windows = block_size, windows
        self.keys = [[-1] * (blocks * block_size) for _ in windows]
        """Key in each slot, by layer group."""
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, tuple[list[int], ...]] = {}

    def execute(self, step: Any, vocabulary: int) -> dict[str, list[int]]:
        """Run a step; return the new tokens of each of its requests.

        A chunk of a prompt gets none, and accepted drafts give more than one.
        """
        begins, drafts = self._update_requests(step), step.scheduled_spec_decode_tokens
        return {
            name: self._forward(name, begins[name], count, drafts.get(name, []), vocabulary)
            for name, count in step.num_scheduled_tokens.items()
        }

    def drafts(self, name: str, count: int, vocabulary: int) -> list[int]:
        """Draft the next tokens: the first is right, and some of the others."""
        tokens = [*self.tokens[name]]
        for at in range(count):
            right = logits_by(self.windows, tokens, vocabulary).index(1.0)
            tokens.append((right + (at and len(tokens) % 3)) % vocabulary)
        return tokens[len(tokens) - count :]

    def _update_requests(self, step: Any) -> dict[str, int]:
        """Apply a step's updates; return the position of each request's first token."""
        for name in step.finished_req_ids:
            self.tokens.pop(name, None)
        begins = {}
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.tables[new.req_id] = tuple(list(table) for table in new.block_ids)
            begins[new.req_id] = new.num_computed_tokens
        running = step.scheduled_cached_reqs
        columns = running.req_ids, running.new_block_ids, running.num_computed_tokens
        for name, blocks, computed in zip(*columns, strict=True):
            begins[name] = computed
            if name in running.resumed_req_ids:
                self.tables[name] = tuple(list(table) for table in blocks)
            elif blocks is not None:
                for table, more in zip(self.tables[name], blocks, strict=True):
                    table.extend(more)
        return begins

    def _forward(
        self, name: str, begin: int, count: int, drafts: Sequence[int], vocabulary: int
    ) -> list[int]:
        tokens = self.tokens[name]
        step_tokens = [*tokens, *drafts][begin : begin + count]
        predicted = [
            sum(self._store(group, name, at, token) for group in range(len(self.windows)))
            % vocabulary
            for at, token in enumerate(step_tokens, begin)
        ]
        if begin + count < len(tokens):
            return []
        new = predicted[len(predicted) - len(drafts) - 1 :]
        accepted = next(
            (at for at, (a, b) in enumerate(zip(new, drafts, strict=False)) if a != b),
            len(drafts),
        )
        tokens += new[: accepted + 1]
        return new[: accepted + 1]

    def _store(self, group: int, name: str, position: int, token: int) -> int:
        first = first_seen(self.windows[group], position)
        slots = [self._slot(group, name, at) for at in range(first, position + 1)]
        visible = [self.keys[group][slot] for slot in slots[:-1]]
        key = key_of(token, position, visible)
        self.keys[group][slots[-1]] = key
        return key

    def _slot(self, group: int, name: str, at: int) -> int:
        return self.tables[name][group][at // self.size] * self.size + at % self.size


def first_seen(window: Window, position: int) -> int:
    return max(0, position - window + 1) if window else 0


def logits_by(windows: Sequence[Window], tokens: Sequence[int], vocabulary: int) -> list[float]:
    """Return the logits of the next token of a worker that sees the right keys."""
    last = 0
    for window in windows:
        keys: list[int] = []
        for at, token in enumerate(tokens):
            keys.append(key_of(token, at, keys[first_seen(window, at) :]))
        last += keys[-1]
    return [float(token == last % vocabulary) for token in range(vocabulary)]


_ALONE = "all anew"
_DRAFTS = [{"drafts": 2}, {"drafts": 1}]


class VllmScheduler(EngineAdapter):
    """vLLM's scheduler, with a fake worker."""

    eos_token = 5
    sampling = SamplingTraits(greedy_only=True)
    extra_steps = 1
    paths: ClassVar[Mapping[str, FastPath]] = {
        "prefix hit": FastPath(_ALONE),
        "chunked prefill": FastPath(_ALONE, aims=[{"max_num_batched_tokens": 3}]),
        "preempted": FastPath(_ALONE),
        "cancelled": FastPath(_ALONE),
        "draft accepted": FastPath(_ALONE, _DRAFTS),
        "draft rejected": FastPath(_ALONE, _DRAFTS),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "windows": ((None,), (5,), (None, 3), (2, 6, None)),
        "max_num_batched_tokens": (64, 3, 8),
        "max_num_seqs": (8, 1, 2, 40),
        "policy": ("fcfs", "priority"),
        "long_prefill_token_threshold": (0, 4),
        "async_scheduling": (False, True),
        "drafts": (0, 1, 2),  # more than tokens of a step hang: docs/findings
    }

    def make(self, mix: RequestMix) -> None:
        self.scheduler = new_scheduler(mix)
        blocks = self.scheduler.kv_cache_config.num_blocks
        self.worker = VllmWorker(blocks, mix.block_size, mix.options["windows"])
        self.in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self.counts: Counter[str] = Counter()
        self.names = itertools.count()
        manager = self.scheduler.kv_cache_manager
        manager.get_computed_blocks = partial(self._count_prefix_hit, manager.get_computed_blocks)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        end = None if sampling.ignore_eos else self.eos_token
        name, max_tokens = str(next(self.names)), sampling.max_new_tokens
        request = new_request(name, list(prompt), max_tokens, end, self.scheduler.block_size)
        self.scheduler.add_request(request)
        return request

    def _count_prefix_hit(self, look_up: Callable[..., Any], *request: Any) -> Any:
        cached = look_up(*request)
        self.counts["prefix hit"] += cached[1] > 0
        return cached

    def step(self) -> None:
        """Schedule a step and run it; with async scheduling its output is read a step later."""
        before = sum(each.num_preemptions for each in self.scheduler.requests.values())
        step = self.scheduler.schedule()
        after = sum(each.num_preemptions for each in self.scheduler.requests.values())
        self.counts["preempted"] += after > before
        new_tokens = self.worker.execute(step, self.vocabulary)
        self.counts["chunked prefill"] += not all(new_tokens.values())
        for name, drafts in step.scheduled_spec_decode_tokens.items():
            self.counts["draft accepted"] += len(new_tokens[name]) > 1
            self.counts["draft rejected"] += len(new_tokens[name]) <= len(drafts)
        self.in_flight.append((step, new_tokens))
        busy = step.total_num_scheduled_tokens and self.scheduler.vllm_config.max_concurrent_batches
        while len(self.in_flight) >= (busy or 1):
            self._finish_step(*self.in_flight.popleft())

    def _finish_step(self, step: Any, new_tokens: dict[str, list[int]]) -> None:
        rows = {name: row for row, name in enumerate(new_tokens)}
        output = vllm_part("v1.outputs").ModelRunnerOutput
        self.scheduler.update_from_output(step, output([*new_tokens], rows, [*new_tokens.values()]))
        if num_drafts := self.scheduler.num_spec_tokens:
            running = [each.request_id for each in self.scheduler.running]
            drafts = [self.worker.drafts(each, num_drafts, self.vocabulary) for each in running]
            drafted = vllm_part("v1.outputs").DraftTokenIds(running, drafts)
            self.scheduler.update_draft_token_ids(drafted)

    def cancel(self, request: Any) -> None:
        self.counts["cancelled"] += not self.is_finished(request)
        aborted = vllm_part("v1.request").RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests(request.request_id, aborted)

    def tokens(self, request: Any) -> list[int]:
        return list(request.output_token_ids)

    def is_finished(self, request: Any) -> bool:
        return bool(request.is_finished())

    def find_leaks(self) -> str:
        self.step()  # releases the requests that were cancelled last
        pool = self.scheduler.kv_cache_manager.block_pool
        num_held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return f"{num_held} blocks" if num_held else ""

    def path_counts(self) -> Mapping[str, int]:
        return self.counts

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:
        return logits_by(mix.options["windows"], tokens, self.vocabulary)
