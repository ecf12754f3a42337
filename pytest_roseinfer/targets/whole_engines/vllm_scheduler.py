"""vLLM's scheduler (V1), with a worker that needs no GPU."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.adapters.fast_path import FastPath
from pytest_roseinfer.targets.others.vllm_kv import vllm_part
from pytest_roseinfer.targets.whole_engines.vllm_settings import groups, settings
from pytest_roseinfer.targets.whole_engines.vllm_worker import VllmWorker, logits_by

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_roseinfer.adapters.mix import RequestMix, Sampling

_ALONE = "all anew"


class VllmScheduler(EngineAdapter):
    end = 5
    takes_sampling = False
    lag = 1
    paths: ClassVar[Mapping[str, FastPath]] = {
        "prefix hit": FastPath(_ALONE),
        "chunked prefill": FastPath(_ALONE, [{"max_num_batched_tokens": 3}]),
        "preempted": FastPath(_ALONE),
        "cancelled": FastPath(_ALONE),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "windows": ((None,), (5,), (None, 3), (2, 6, None)),
        "max_num_batched_tokens": (64, 3, 8),
        "max_num_seqs": (8, 1, 2),
        "policy": ("fcfs", "priority"),
        "async_scheduling": (False, True),
    }

    def make(self, mix: RequestMix) -> None:
        options = dict(mix.options)
        windows, late = options.pop("windows"), options["async_scheduling"]
        blocks = 1 + len(windows) * -(-mix.cache_tokens // mix.block_size)
        scheduler = vllm_part("v1.core.sched.async_scheduler")
        kind = scheduler.AsyncScheduler if late else scheduler.Scheduler
        self.scheduler = kind(
            settings(blocks, options),
            groups(mix.block_size, blocks, windows),
            structured_output_manager=SimpleNamespace(accept_tokens=lambda *_: True),
            block_size=mix.block_size,
        )
        self.worker = VllmWorker(blocks, mix.block_size, windows)
        self.on_their_way: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self.counts: Counter[str] = Counter()
        self.names = itertools.count()
        manager = self.scheduler.kv_cache_manager
        manager.get_computed_blocks = partial(self._found, manager.get_computed_blocks)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        wishes = {"max_tokens": sampling.max_new_tokens, "ignore_eos": sampling.ignore_eos}
        params = vllm_part("sampling_params").SamplingParams(**wishes)
        params.update_from_generation_config({}, self.end)
        utils, sha256 = vllm_part("v1.core.kv_cache_utils"), vllm_part("utils.hashing").sha256
        utils.init_none_hash(sha256)
        hasher = utils.get_request_block_hasher(self.scheduler.block_size, sha256)
        new = vllm_part("v1.request").Request
        request = new(str(next(self.names)), list(prompt), params, None, block_hasher=hasher)
        self.scheduler.add_request(request)
        return request

    def _found(self, look_up: Callable[..., Any], *request: Any) -> Any:
        found = look_up(*request)
        self.counts["prefix hit"] += found[1] > 0
        return found

    def step(self) -> None:
        """Schedule a step and have it done; with async scheduling it ends a step later."""
        before = sum(each.num_preemptions for each in self.scheduler.requests.values())
        step = self.scheduler.schedule()
        after = sum(each.num_preemptions for each in self.scheduler.requests.values())
        self.counts["preempted"] += after > before
        given = self.worker.execute(step, self.vocabulary)
        self.counts["chunked prefill"] += not all(given.values())
        self.on_their_way.append((step, given))
        busy = step.total_num_scheduled_tokens and self.scheduler.vllm_config.max_concurrent_batches
        while len(self.on_their_way) >= (busy or 1):
            self._bring(*self.on_their_way.popleft())

    def _bring(self, step: Any, given: dict[str, list[int]]) -> None:
        rows = {name: row for row, name in enumerate(given)}
        output = vllm_part("v1.outputs").ModelRunnerOutput
        self.scheduler.update_from_output(step, output([*given], rows, [*given.values()]))

    def cancel(self, request: Any) -> None:
        self.counts["cancelled"] += not self.ended(request)
        aborted = vllm_part("v1.request").RequestStatus.FINISHED_ABORTED
        self.scheduler.finish_requests(request.request_id, aborted)

    def tokens(self, request: Any) -> list[int]:
        return list(request.output_token_ids)

    def ended(self, request: Any) -> bool:
        return bool(request.is_finished())

    def leftovers(self) -> str:
        self.step()  # what was cancelled last leaves now
        pool = self.scheduler.kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return f"{held} blocks" if held else ""

    def path_counts(self) -> Mapping[str, int]:
        return self.counts

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:
        return logits_by(mix.options["windows"], tokens, self.vocabulary)
