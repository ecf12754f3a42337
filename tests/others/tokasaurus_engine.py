"""Adapter of tokasaurus' manager: its scheduler, block allocator and batches, without a GPU.

A fake model worker stores a key per token that depends on all previous keys, as attention finds
them by the page table of each batch; the next token follows from the key.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from contextlib import nullcontext
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch

from pytest_roseinfer import EngineAdapter, FastPath
from pytest_roseinfer.engine_capabilities.prefix_reuse import PrefixReuseTraits
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.targets.partial_import import import_part, stub_package
from pytest_roseinfer.targets.prefix_keys import argmax_token, key_of, logits_of
from tests.others.source_repair import Repair, repaired

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pytest_roseinfer import RequestMix, Sampling

_INSTALL = "python -m tests.others.fetch tokasaurus, and add its folder to PYTHONPATH"


def _part(name: str) -> Any:
    """Import a part of tokasaurus without its kernels, which need a GPU."""
    with stub_package("flashinfer"):
        return import_part("tokasaurus", name, _INSTALL)


class TokasaurusWorker:
    """Fake model worker, with the table of last tokens of a real one."""

    def __init__(self, config: Any, vocabulary: int) -> None:
        self.size, self.vocabulary = config.page_size, vocabulary
        self.keys = [-1] * config.kv_cache_num_tokens
        self.last_tokens = [-1] * config.max_seqs_per_forward
        self.counts: Counter[str] = Counter()

    def run(self, batch: Any) -> Any:
        """Run a batch; return what the worker sends to the manager."""
        info = batch.attention_info_builder
        visible = [*self._slots_of_prefills(info.prefill_builder), *self._slots_of_decodes(info)]
        tokens = [*batch.prefill_input_ids]
        tokens += [self.last_tokens[row] for row in batch.decoding_batch_indices()]
        places, positions = info.append_kv_token_indices, batch.position_ids
        keys = [0] * len(tokens)
        # Each layer stores all keys before it attends, so the order of requests does not matter.
        for at in sorted(range(len(tokens)), key=positions.__getitem__):
            before = [self.keys[slot] for slot in visible[at][: positions[at]]]
            keys[at] = self.keys[places[at]] = key_of(tokens[at], positions[at], before)
        new = [argmax_token(keys[at], self.vocabulary) for at in batch.lm_head_indices]
        for row, token in zip(batch.lm_head_batch_indices(), new, strict=True):
            self.last_tokens[row] = token
        types = _part("model.types")
        return types.ModelOutput(
            schedule_id=batch.schedule_id, tensors=types.ModelOutputTensors(torch.tensor(new))
        )

    def _slots_of_prefills(self, pages: Any) -> Iterator[list[int]]:
        """Yield the slots that each prefilled token may read."""
        for row, slots in enumerate(self._slots(pages)):
            for _ in range(pages.qo_indptr[row + 1] - pages.qo_indptr[row]):
                yield slots

    def _slots_of_decodes(self, info: Any) -> Iterator[list[int]]:
        """Yield the slots that each decoded token may read: of a shared prefix, then its own."""
        shared: list[list[int]] = []
        if info.hydragen_builder is not None:
            shared = list(self._slots_of_prefills(info.hydragen_builder))
            self.counts["shared prefix"] += len(shared) > 0
        for row, slots in enumerate(self._slots(info.decode_builder)):
            yield [*shared[row], *slots] if row < len(shared) else slots

    def _slots(self, pages: Any) -> Iterator[list[int]]:
        for row, last in enumerate(pages.kv_last_page_len):
            blocks = pages.kv_indices[pages.kv_indptr[row] : pages.kv_indptr[row + 1]]
            slots = [block * self.size + at for block in blocks for at in range(self.size)]
            yield slots[: len(slots) - self.size + last]


_ALONE = "all anew"
_EARLY = {"scheduling_steps_ahead": 8}


class TokasaurusEngine(EngineAdapter):
    """tokasaurus' manager, with a fake model worker; requests get what its server returns."""

    eos_token = 5
    sampling = SamplingTraits(greedy_only=True)
    extra_steps = 12
    prefix_reuse = PrefixReuseTraits(finds="some")
    paths: ClassVar[Mapping[str, FastPath]] = {
        "prefix hit": FastPath(_ALONE),
        "preempted": FastPath(_ALONE, aims=[{"early_stopping_init_mean": 0.3}]),
        "shared prefix": FastPath(_ALONE, aims=[{"use_hydragen": True}]),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "scheduling_steps_ahead": (8, 1, 3),
        "worker_batches": (1, 3),  # that the worker runs while the manager is busy
        "max_tokens_per_forward": (64, 8),
        "max_seqs_per_forward": (8, 1, 2),
        "use_spec_allocation": (True, False),
        "early_stopping_init_mean": (None, 0.3),
        "early_stopping_initial_wait": (16, 1),
        "greedy_prefill": (True, False),
        "prefill_round_up_multiple": (16, 1),
        "enable_precise_onboard": (True, False),
        "precise_onboard_batch_size": (128, 2),
        "use_hydragen": (False, True),
    }

    def make(self, mix: RequestMix) -> None:
        options = dict(mix.options)
        self.worker_batches = options.pop("worker_batches")
        common, types = _part("common_types"), _part("manager.types")
        config = common.ServerConfig()
        blocks = math.ceil(mix.cache_tokens / mix.block_size)
        settings = {
            **options,
            "page_size": mix.block_size,
            "kv_cache_num_tokens": blocks * mix.block_size,
            "track_early_stopping": options["use_spec_allocation"],
            "use_cudagraphs": False,
            "early_stopping_num_prediction_buckets": 16,
            "hydragen_min_group_size": 2,
            "hydragen_min_prefix_len": mix.block_size,
        }
        for name, value in settings.items():
            setattr(config, name, value)
        self.config, self.worker = config, TokasaurusWorker(config, self.vocabulary)
        allocator = _part("manager.allocator")
        texts = SimpleNamespace(decode_batch=lambda texts, **_: [""] * len(texts))
        tokenizer = SimpleNamespace(from_pretrained=lambda *_: SimpleNamespace(_tokenizer=texts))
        ends = SimpleNamespace(eos_token_id=self.eos_token)
        settings_of_model = SimpleNamespace(from_pretrained=lambda *_, **__: ends)
        with mock.patch.multiple(
            types, AutoTokenizer=tokenizer, GenerationConfig=settings_of_model
        ):
            self.state = types.ManagerState(
                config=config,
                block_allocator=allocator.BlockAllocator(blocks, mix.block_size),
                batch_index_allocator=allocator.BatchIndexAllocator(config.max_seqs_per_forward),
                q_manager_to_model=SimpleQueue(),
                q_model_to_manager=SimpleQueue(),
                q_server_to_manager=SimpleQueue(),
                q_manager_to_server=SimpleQueue(),
                process_name="manager",
            )
        self.state.stats_tracker.reset()
        self.state.logger = logging.getLogger(__name__)
        if config.track_early_stopping:
            self.state.early_stopping_tracker = _part(
                "manager.stopping_predictor"
            ).EarlyStoppingTracker(
                buffer_size=config.early_stopping_buffer_size,
                initial_wait=config.early_stopping_initial_wait,
                init_mean=config.early_stopping_init_mean,
                init_std=config.early_stopping_init_std,
            )
        self.requests = 0
        self.outputs: dict[str, Any] = {}
        """What the manager returned, by request."""
        self.seqs: dict[str, Any] = {}
        """Latest sequence of each request; a preempted request gets another."""
        self.generated: dict[str, list[int]] = {}
        """Most tokens that each request had at a time, since a preempted one begins again."""
        self.cancelled: set[str] = set()
        self.counts: Counter[str] = Counter()

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        server = _part("server.types")
        self.requests += 1
        request = server.TokasaurusRequest(
            id=f"request-{self.requests}",
            input_ids=[*prompt],
            max_num_tokens=sampling.max_new_tokens,
            sampling_params=server.SamplingParams(temperature=0.0, top_p=1.0),
            stop=[],
            n=1,
            ignore_eos=sampling.ignore_eos,
        )
        self.state.q_server_to_manager.put(request)
        return request

    def step(self) -> None:
        """Run what the worker has time for, and an iteration of the manager's loop."""
        with self.repairs():
            self._step()

    def repairs(self) -> AbstractContextManager[object]:
        """Return a context in which the project's code is repaired."""
        return nullcontext()

    def _step(self) -> None:
        state, manager = self.state, _part("manager.manager")
        for _ in range(self.worker_batches):
            self._run_worker()
        manager.handle_new_server_commands(state)
        manager.handle_new_model_outputs(state)
        manager.try_cancelling_requests(state)
        steps = self.config.scheduling_steps_ahead - state.num_inflight_batches
        if state.scheduling_queue.num_unfinished_seqs() > 0 and steps > 0:
            manager.schedule_steps(state, steps)
            self._count_starts()
        if state.scheduling_queue.num_unfinished_seqs() == 0:
            manager.send_to_model(state, _part("model.types").NoMoreInputs())
        manager.run_sanity_checks(state)
        self._receive()

    def _count_starts(self) -> None:
        for seq in self.state.scheduling_queue.running_seqs():
            if self.seqs.get(seq.request.id) is not seq:
                self.counts["preempted"] += seq.request.id in self.seqs
                self.seqs[seq.request.id] = seq
                self.counts["prefix hit"] += seq.seq_output.num_cached_prompt_tokens > 0

    def _run_worker(self) -> None:
        try:
            batch = self.state.q_manager_to_model.get_nowait()
        except Empty:
            return
        if isinstance(batch, _part("model.types").ModelInput):
            self.state.q_model_to_manager.put(self.worker.run(batch))

    def _receive(self) -> None:
        for output in _part("utils").queue_iterator(self.state.q_manager_to_server):
            if output.id not in self.cancelled:
                self.outputs[output.id] = output.sequence_outputs[0]

    def cancel(self, request: Any) -> None:
        if request.id not in self.outputs:
            self.cancelled.add(request.id)
            cancelled = _part("server.types").CancelledRequest(request.id)
            self.state.q_server_to_manager.put(cancelled)

    def tokens(self, request: Any) -> list[int]:
        if request.id in self.outputs:
            return list(self.outputs[request.id].completion_ids)
        known = self.generated.get(request.id, [])
        if request.id in self.seqs and request.id not in self.cancelled:
            latest = self.seqs[request.id].seq_output.completion_ids
            known = self.generated[request.id] = max(known, [*latest], key=len)
        return known

    def is_finished(self, request: Any) -> bool:
        return request.id in self.outputs or request.id in self.cancelled

    def cached_tokens(self, request: Any) -> int:
        seq = self.seqs.get(request.id)
        return int(seq.seq_output.num_cached_prompt_tokens) if seq else 0

    def find_leaks(self) -> str:
        for _ in range(12):
            self.step()
        state = self.state
        blocks = state.block_allocator.num_used_blocks()
        rows = self.config.max_seqs_per_forward
        rows -= len(state.batch_index_allocator.available_indices)
        held = {"blocks": blocks, "rows": rows, "batches": state.num_inflight_batches}
        held["queued requests"] = state.scheduling_queue.num_unfinished_seqs()
        return ", ".join(f"{number} {kind}" for kind, number in held.items() if number)

    def path_counts(self) -> Mapping[str, int]:
        counts = self.counts + self.worker.counts
        return {path: counts[path] for path in self.paths}

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:  # noqa: ARG002
        return logits_of(tokens, self.vocabulary)


# Repairs of known findings, so that a search finds the others.

REPAIRS = {
    "one token": Repair(
        "manager.scheduler",
        "calc_block_usage_over_time",
        "assert additional_blocks_needed == 0",
        "pass",
        users=("manager.manager",),
    ),
}
"""Repairs by finding."""


class RepairedTokasaurusEngine(TokasaurusEngine):
    """tokasaurus' manager without its known findings, but for those of ``findings``."""

    findings: ClassVar[Collection[str]] = ()
    """Findings that are not repaired."""

    def repairs(self) -> AbstractContextManager[object]:
        return repaired(_part, REPAIRS, but=self.findings)


class CompletesOneToken(RepairedTokasaurusEngine):
    findings = ("one token",)


class PromisesRecency(RepairedTokasaurusEngine):
    """Promises that the least recent text is evicted first."""

    prefix_reuse = PrefixReuseTraits(finds="full blocks", evicts="least recent")
