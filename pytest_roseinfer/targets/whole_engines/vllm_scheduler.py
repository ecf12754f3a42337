"""vLLM's scheduler (V1), with a worker that needs no GPU."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.adapters.fast_path import FastPath
from pytest_roseinfer.targets.others.vllm_kv import vllm_part
from pytest_roseinfer.targets.whole_engines.vllm_settings import new_request, new_scheduler
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
        "draft accepted": FastPath(_ALONE, [{"drafts": 2}]),
        "draft rejected": FastPath(_ALONE, [{"drafts": 2}]),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "windows": ((None,), (5,), (None, 3), (2, 6, None)),
        "max_num_batched_tokens": (64, 3, 8),
        "max_num_seqs": (8, 1, 2, 40),
        "policy": ("fcfs", "priority"),
        "long_prefill_token_threshold": (0, 4),
        "async_scheduling": (False, True),
        "drafts": (0, 1, 2),  # with more than a step has tokens it hangs: docs/found.md
    }

    def make(self, mix: RequestMix) -> None:
        self.scheduler = new_scheduler(mix)
        blocks = self.scheduler.kv_cache_config.num_blocks
        self.worker = VllmWorker(blocks, mix.block_size, mix.options["windows"])
        self.on_their_way: deque[tuple[Any, dict[str, list[int]]]] = deque()
        self.counts: Counter[str] = Counter()
        self.names = itertools.count()
        manager = self.scheduler.kv_cache_manager
        manager.get_computed_blocks = partial(self._found, manager.get_computed_blocks)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        asked = list(prompt), sampling.max_new_tokens, None if sampling.ignore_eos else self.end
        request = new_request(str(next(self.names)), *asked, self.scheduler.block_size)
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
        for name, drafts in step.scheduled_spec_decode_tokens.items():
            self.counts["draft accepted"] += len(given[name]) > 1
            self.counts["draft rejected"] += len(given[name]) <= len(drafts)
        self.on_their_way.append((step, given))
        busy = step.total_num_scheduled_tokens and self.scheduler.vllm_config.max_concurrent_batches
        while len(self.on_their_way) >= (busy or 1):
            self._bring(*self.on_their_way.popleft())

    def _bring(self, step: Any, given: dict[str, list[int]]) -> None:
        rows = {name: row for row, name in enumerate(given)}
        output = vllm_part("v1.outputs").ModelRunnerOutput
        self.scheduler.update_from_output(step, output([*given], rows, [*given.values()]))
        if most := self.scheduler.num_spec_tokens:
            going = [each.request_id for each in self.scheduler.running]
            drafts = [self.worker.drafts(each, most, self.vocabulary) for each in going]
            drafted = vllm_part("v1.outputs").DraftTokenIds(going, drafts)
            self.scheduler.update_draft_token_ids(drafted)

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
