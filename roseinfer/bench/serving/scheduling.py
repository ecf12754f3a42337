"""What deciding on a step costs the host, by how many requests run and how many wait."""

from __future__ import annotations

import torch

from roseinfer.bench.reporting import SchedulingRow
from roseinfer.bench.timing import in_rounds, time_calls
from roseinfer.config import AppendPolicy, EngineConfig, SamplingParams
from roseinfer.engine.prefix_cache import PrefixCache
from roseinfer.engine.request import BlockSupply, Request
from roseinfer.engine.scheduler import Scheduler
from roseinfer.kv.manager import KVBlockManager
from roseinfer.kv.sequence import InferenceSession

_PROMPT = 200
_BLOCK_SIZE = 64
_CALLS = 50


def measure(running: int, waiting: int, rounds: int) -> SchedulingRow:
    """Steps in which every running request decodes and nobody comes or goes."""
    scheduler = _busy(running, waiting)
    step = scheduler.next_step()
    if len(step.decoding) != running or step.chunks:
        raise RuntimeError(f"{running} were to decode, not {len(step.decoding)}")

    def decide() -> float:
        return time_calls(scheduler.next_step, _CALLS, lambda: None)

    microseconds = in_rounds({"step": decide}, rounds, "scheduling")["step"].median_us
    return SchedulingRow(running, waiting, microseconds, microseconds / running)


def _busy(running: int, waiting: int) -> Scheduler:
    """A scheduler in steady state, its bookkeeping real and its cache without content."""
    config = EngineConfig(max_batch_size=running, block_size=_BLOCK_SIZE)
    blocks = running * (-(-_PROMPT // _BLOCK_SIZE) + 1)
    kv = KVBlockManager(
        1, 1, 1, _BLOCK_SIZE, blocks + 1, "cpu", torch.float32, AppendPolicy(triton=False)
    )
    scheduler = Scheduler(config, BlockSupply(kv, PrefixCache(kv), lambda _: None))
    for number in range(running + waiting):
        request = _request(number)
        if number < running:
            session = request.session
            kv.plan_append(0, session.block_lists, [_PROMPT - 1])
            session.stored = _PROMPT - 1
            session.room = len(session.block_lists[0]) * _BLOCK_SIZE
            scheduler.running[number] = request
        else:
            scheduler.add(request)
    return scheduler


def _request(number: int) -> Request:
    return Request(
        number,
        SamplingParams(),
        seed=number,
        prompt_length=_PROMPT,
        most_tokens=16,
        session=InferenceSession([[]], list(range(_PROMPT))),
        text=None,
    )
