"""Adapter of LMDeploy's PyTorch engine: its scheduler, inputs maker and loop, without a GPU.

A fake executor stores a key per token that depends on the previous keys, as attention finds them by
block tables, and for recurrent layers a state per request that is copied to and from checkpoints.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import transformers

from pytest_roseinfer import EngineAdapter, FastPath
from pytest_roseinfer.engine_capabilities.prefix_reuse import PrefixReuseTraits
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.targets.partial_import import import_part
from pytest_roseinfer.targets.prefix_keys import key_of

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Mapping, Sequence

    from pytest_roseinfer import RequestMix, Sampling

_INSTALL = "python -m tests.others.fetch lmdeploy, and add its folder to PYTHONPATH"


def _part(name: str) -> Any:
    # One of its folders is called transformers: the package is imported before.
    importlib.import_module("transformers.models.auto")
    assert transformers
    logging.getLogger("lmdeploy").setLevel(logging.CRITICAL)
    return import_part("lmdeploy", f"pytorch.{name}", _INSTALL)


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the engine waits")


# The fake executor.


def _next_key(token: int, position: int, visible: Sequence[int], state: int) -> tuple[int, int]:
    """Return the key of a token, and the recurrent state after it."""
    state = key_of(token, state, ())
    return key_of(token, position, [state, *visible]), state


class _Row:
    """Request in the persistent batch of a worker."""

    def __init__(self, history: int, state: int) -> None:
        self.history, self.state = history, state
        self.table: list[int] = []
        self.ignored = 0
        self.token = -1
        self.left = 0


class LmdeployExecutor:
    """Fake executor, with the persistent batch of a model agent."""

    device_type = "cpu"

    def __init__(self, mix: RequestMix, num_blocks: int, num_states: int, eos: int) -> None:
        self.size, self.window = mix.block_size, mix.options["window"]
        self.eos = eos
        self.keys = [[-1] * self.size for _ in range(num_blocks)]
        self.states = [0] * num_states
        self.is_ssm = mix.options["states"]
        self.rows: list[_Row] = []
        self.outputs: deque[Any] = deque()
        self.ends: list[bool] = []
        """True for each request of the running batch that ends by the stop token."""

    async def forward_async(self, forward: Mapping[str, Any]) -> None:
        inputs, delta, plans = forward["inputs"], forward["delta"], forward["cache_inputs"]
        if delta is not None:
            self._select(delta)
        if plans is not None:
            self._restore(plans)
        if inputs is None:
            rows = self.rows
            counts = [1] * len(rows)
            tokens = [row.token for row in rows]
        else:
            rows = self._new_rows(inputs)
            counts, tokens = inputs.seq_length.tolist(), inputs.input_ids[0].tolist()
        new, at = [], 0
        for row, count in zip(rows, counts, strict=True):
            new.append(self._forward(row, tokens[at : at + count]))
            at += count
        if plans is not None:
            self._save(plans)
        stopped = []
        for row, token, seq in zip(rows, new, forward["sampling_inputs"], strict=True):
            row.token = token
            if inputs is not None:
                row.left = seq.sampling_param.max_new_tokens - seq.num_new_tokens
            row.left -= 1
            stops = not seq.sampling_param.ignore_eos and token == self.eos
            stopped.append(row.left <= 0 or stops)
        if inputs is not None and not (inputs.is_chunk and not inputs.is_last_chunk):
            self.rows = [*self.rows, *rows]
        agent = _part("engine.model_agent.agent")
        self.outputs.append(agent.BatchedOutputs(torch.tensor(new)[:, None], torch.tensor(stopped)))

    async def get_output_async(self) -> Any:
        return self.outputs.popleft()

    def _select(self, delta: Any) -> None:
        self.rows = [self.rows[row] for row in delta.indice_cpu.tolist()]
        if delta.block_offsets is not None:
            for row, table in zip(self.rows, delta.block_offsets.tolist(), strict=True):
                row.table = table
        if delta.num_ignored_history is not None:
            for row, ignored in zip(self.rows, delta.num_ignored_history.tolist(), strict=True):
                row.ignored = ignored

    def _new_rows(self, inputs: Any) -> list[_Row]:
        rows = []
        for at, history in enumerate(inputs.history_lengths.tolist()):
            state = int(inputs.state_offsets[at]) if self.is_ssm else -1
            row = _Row(history, state)
            row.table = inputs.block_offsets[at].tolist()
            row.ignored = int(inputs.num_ignored_history[at])
            rows.append(row)
        return rows

    def _restore(self, plans: Any) -> None:
        self._copy_blocks(plans.kv_restore_plan)
        self._copy_states(plans.state_restore_plan)

    def _save(self, plans: Any) -> None:
        self._copy_blocks(plans.kv_save_plan)
        self._copy_states(plans.state_save_plan)

    def _copy_blocks(self, plan: Any) -> None:
        if plan is not None:
            for source, target in plan.T.tolist():
                self.keys[target] = [*self.keys[source]]

    def _copy_states(self, plan: Any) -> None:
        if plan is not None:
            for source, target in zip(*plan, strict=True):
                self.states[target] = self.states[source]

    def _forward(self, row: _Row, tokens: Sequence[int]) -> int:
        """Store the tokens of a request; return the next one."""
        state = self.states[row.state] if self.is_ssm and row.history else 0
        key = 0
        for position, token in enumerate(tokens, row.history):
            first = max(0, position - self.window + 1) if self.window > 0 else 0
            visible = [self._slot(row, at) for at in range(first, position)]
            key, state = _next_key(token, position, visible, state if self.is_ssm else 0)
            at = position - row.ignored
            self.keys[row.table[at // self.size]][at % self.size] = key
        if self.is_ssm:
            self.states[row.state] = state
        row.history += len(tokens)
        return key % LmdeployEngine.vocabulary

    def _slot(self, row: _Row, position: int) -> int:
        at = position - row.ignored
        if at < 0:
            return -1
        return self.keys[row.table[at // self.size]][at % self.size]


_ALONE = "all anew"


class LmdeployEngine(EngineAdapter):
    """LMDeploy's PyTorch engine, with a fake executor."""

    eos_token = 5
    sampling = SamplingTraits(greedy_only=True)
    extra_steps = 3
    prefix_reuse = PrefixReuseTraits(
        finds="full blocks",
        evicts="least recent",
        enabled_by={"caches": True, "window": -1, "states": False},
    )
    block_sizes: ClassVar[Sequence[int]] = (4, 2, 3, 8)
    paths: ClassVar[Mapping[str, FastPath]] = {
        "prefix hit": FastPath(_ALONE, aims=[{"caches": True, "window": -1}]),
        "preempted": FastPath(_ALONE),
    }
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "caches": (True, False),
        "window": (-1, 3, 5),  # no limit, or the last tokens
        "states": (False, True),  # of recurrent layers
        "decode_interval": (0, 1, 2),  # blocks from one state that is saved to the next
        "max_prefill_token_num": (64, 3, 8),
        "max_batches": (8, 1, 2),
        "prefill_interval": (1, 4),
    }

    def make(self, mix: RequestMix) -> None:
        options, size = mix.options, mix.block_size
        config = _part("config")
        spare = options["prefill_interval"] + size
        num_blocks = -(-(mix.cache_tokens + spare) // size)
        batches, budget = options["max_batches"], 2
        states = batches + 2 + budget if options["states"] else 0
        cache = config.CacheConfig(
            max_batches=batches,
            block_size=size,
            num_cpu_blocks=0,
            num_gpu_blocks=num_blocks,
            window_size=options["window"],
            max_prefill_token_num=options["max_prefill_token_num"],
            enable_prefix_caching=options["caches"],
            states_shapes=[((1,), torch.float32)] if states else [],
            num_state_caches=states or None,
            prefix_cache_state_budget=budget,
            prefix_cache_decode_state_interval=options["decode_interval"] * size,
        )
        scheduling = config.SchedulerConfig(
            max_batches=batches,
            max_session_len=1 << 20,
            prefill_interval=options["prefill_interval"],
        )
        sequences = _part("strategies.ar.sequence").ARSequenceStrategy()
        meta = _part("messages").SequenceMeta(size, strategy=sequences)
        self.scheduler = _part("paging.scheduler").Scheduler(scheduling, cache, seq_meta=meta)
        self.executor = LmdeployExecutor(mix, num_blocks, states, self.eos_token)
        makers = _part("engine.inputs_maker")
        self.maker = makers.InputsMakerAsync(
            executor=self.executor,
            scheduler=self.scheduler,
            state_checkpoints=self.scheduler.state_checkpoints,
            adapter_manager=SimpleNamespace(num_adapters=lambda: 1),
            engine_strategy=_part("strategies.ar.engine").AREngineStrategy(scheduling, cache),
            sampling_strategy=SimpleNamespace(make_sampling_inputs=lambda running: running),
            model_agent_strategy=_part("strategies.ar.model_agent").ARModelAgentStrategy(),
            config=makers.InputsMakerConfig(
                max_batches=batches,
                max_prefill_token_num=cache.max_prefill_token_num,
                role=cache.role,
                block_size=size,
                kernel_block_size=size,
                window_size=cache.window_size,
                enable_prefix_caching=cache.enable_prefix_caching,
                prefix_cache_decode_state_interval=cache.prefix_cache_decode_state_interval,
                is_ssm=states > 0,
                prefill_interval=options["prefill_interval"],
            ),
        )
        loops = _part("engine.engine_loop")
        self.loop = loops.EngineLoop(
            req_manager=None,
            scheduler=self.scheduler,
            state_checkpoints=self.scheduler.state_checkpoints,
            executor=self.executor,
            seq_strategy=sequences,
            inputs_maker=self.maker,
            config=loops.EngineLoopConfig(role=cache.role),
        )
        self.next: tuple[Any, Any] = (None, None)
        self.requests: list[Any] = []
        self.ended: set[int] = set()
        self.cached: dict[int, int] = {}
        """Cached tokens of each request at its latest start, by session."""
        self.counts: Counter[str] = Counter()

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        params = _part("messages").SamplingParam(
            max_new_tokens=sampling.max_new_tokens, ignore_eos=sampling.ignore_eos
        )
        session = self.scheduler.add_session(len(self.requests))
        request = session.add_sequence(np.array([*prompt]), params)
        request.resp = SimpleNamespace(_input_logprobs=None, data=None)
        self.requests.append(request)
        return request

    def step(self) -> None:
        if self.next[1] is None and self.loop.has_runable_event.has_unfinished():
            self.next = _run(self.loop._main_loop_try_send_next_inputs())
        forward, running = self.next
        if running is None:
            return
        self.scheduler.activate_seqs(running)
        for each in running:  # which forget it when they end
            self.cached[each.session_id] = each.cached_tokens
            self.counts["prefix hit"] += each.cached_tokens > 0
        self.next = _run(self.loop._main_loop_get_outputs(running=running, forward_inputs=forward))
        self.counts["preempted"] += len(self.maker.to_evict_seqs) > 0
        self.maker.preempt_invalid_decode_seqs()
        self._end_finished()

    def _end_finished(self) -> None:
        stopped = _part("messages").MessageStatus.STOPPED
        for request in self.requests:
            if request.status == stopped and request.session_id not in self.ended:
                self.ended.add(request.session_id)
                self.scheduler.end_session(request.session_id)

    def cancel(self, request: Any) -> None:
        if request.session_id not in self.ended:
            self.scheduler.stop_session(request.session_id)
            self._end_finished()

    def tokens(self, request: Any) -> list[int]:
        tokens: list[int] = request.generated_ids.tolist() if request.num_new_tokens else []
        return tokens

    def is_finished(self, request: Any) -> bool:
        return request.session_id in self.ended

    def cached_tokens(self, request: Any) -> int:
        return self.cached.get(request.session_id, 0)

    def find_leaks(self) -> str:
        for _ in range(3):
            self.step()
        scheduler = self.scheduler
        scheduler.block_trie.evict(scheduler.block_manager.num_gpu_blocks)
        manager = scheduler.block_manager
        held = manager.num_gpu_blocks - manager.get_num_free_gpu_blocks()
        states = scheduler.state_manager.get_num_runtime_states()
        return ", ".join([f"{held} blocks"] * (held > 0) + [f"{states} states"] * (states > 0))

    def path_counts(self) -> Mapping[str, int]:
        return {path: self.counts[path] for path in self.paths}

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> Any:
        keys: list[int] = []
        state, window = 0, mix.options["window"]
        for at, token in enumerate(tokens):
            first = max(0, at - window + 1) if window > 0 else 0
            key, after = _next_key(token, at, keys[first:], state if mix.options["states"] else 0)
            state = after
            keys.append(key)
        return [float(token == keys[-1] % self.vocabulary) for token in range(self.vocabulary)]


# Repairs of known findings, so that a search finds the others.


class RepairedLmdeployEngine(LmdeployEngine):
    """LMDeploy's engine without its known findings, but for those of ``findings``."""

    findings: ClassVar[Collection[str]] = ()
    """Names of the methods of this class that are not applied."""

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        for repair in (self.release_preempted, self.save_right_step, self.order_by_time):
            if repair.__name__ not in self.findings:
                repair()

    def release_preempted(self) -> None:
        """Free the blocks and the state of a preempted request, which is computed again."""
        preempt = self.scheduler.preempt_seqs

        def preempt_seqs(seqs: Any) -> None:
            seqs = [*seqs]
            preempt(seqs)
            for seq in seqs:
                seq.state.release_paging_resources()

        self.scheduler.preempt_seqs = preempt_seqs

    def save_right_step(self) -> None:
        """Save no state in a decode step, whose token is not counted yet."""
        self.maker._make_decode_cache_inputs = lambda *_: None

    def order_by_time(self) -> None:
        """Keep the fractions of seconds of access times."""
        memory = self.scheduler.block_manager.allocator._log_mem
        memory.access_time = memory.access_time.astype(float)


# Each finding alone.


class KeepsStateOfPreempted(RepairedLmdeployEngine):
    findings = ("release_preempted",)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **RepairedLmdeployEngine.option_choices,
        "caches": (False,),
        "window": (-1,),
        "states": (True,),
    }
    paths: ClassVar[Mapping[str, FastPath]] = {"preempted": FastPath(_ALONE)}


class SavesStateUnderStaleStep(RepairedLmdeployEngine):
    findings = ("save_right_step",)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **RepairedLmdeployEngine.option_choices,
        "caches": (True,),
        "window": (-1,),
        "states": (True,),
        "decode_interval": (1, 2),
    }


class OrdersBySeconds(RepairedLmdeployEngine):
    findings = ("order_by_time",)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **RepairedLmdeployEngine.option_choices,
        "caches": (True,),
        "window": (-1,),
        "states": (False,),
        "decode_interval": (0,),
    }
