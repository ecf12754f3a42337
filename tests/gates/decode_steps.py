"""Repeatable decode steps of roseinfer's engine, which do the same work each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.step_work import Step
from roseinfer import LLM, SamplingParams
from tests.models.families import greedy_step, tiny

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roseinfer.engine.engine import Engine
    from roseinfer.kv.sequence import CachedSequence

REQUESTS = 3
PROMPTS = [[first_token + 1, 2, 3] for first_token in range(REQUESTS)]
_RING = 64
"""Index buffers, each of which caches its last contents."""
_SHAPES = ((REQUESTS, 1), (REQUESTS, 2), (REQUESTS, 3), (2 * REQUESTS, 1))
"""Lengths and columns that a decode step stages: a step's block table is up to two blocks wide."""
_STEPS_TO_STEADY = 4
"""Steps until every readback buffer is allocated."""
_LONG = SamplingParams(temperature=0, max_new_tokens=90, ignore_eos=True)


def counters(engine: Engine) -> Mapping[str, int]:
    """Return all counters of the engine."""
    kv = engine.sequence_runner.kv
    return {**kv.work_counts, **kv.path_counts, **engine.path_counts}


def steady(family: str, device: str, **config: Any) -> Step:
    """Return a step in which every request stores its token in a block it has."""
    engine = _warm(family, device, block_size=32, **config)
    _submit(engine)
    for _ in range(_STEPS_TO_STEADY):
        engine.step()
    return Step(engine.step, REQUESTS, None, lambda: counters(engine))


def boundary(family: str, device: str, **config: Any) -> Step:
    """Return a step in which every request begins a block."""
    block = 4
    engine = _warm(family, device, block_size=block, **config)
    running: list[Any] = []

    def fill_the_block() -> None:
        for request in running:
            engine.cancel(request)
        running[:] = _submit(engine)
        while running[0].sequence.num_stored < block:
            engine.step()

    return Step(engine.step, REQUESTS, fill_the_block, lambda: counters(engine))


def copy_on_write(family: str, device: str, **config: Any) -> Step:
    """Return a step in which every sequence writes to a block that another one holds too."""
    engine = _warm(family, device, block_size=8, **config)
    runner = engine.sequence_runner
    sequences: list[CachedSequence] = []
    forks: list[CachedSequence] = []

    def share() -> None:
        for sequence in sequences:
            runner.release(sequence)
        parents, _ = runner.prefill(PROMPTS)
        for parent in parents:
            parent.token_ids.append(7)
        forks[:] = [runner.fork(parent) for parent in parents]
        sequences[:] = [*parents, *forks]

    def decode() -> None:
        greedy_step(runner, forks)

    return Step(decode, REQUESTS, share, lambda: counters(engine))


STEPS = {"steady": steady, "boundary": boundary, "copy_on_write": copy_on_write}


def _submit(engine: Engine) -> list[Any]:
    return [engine.submit(prompt, _LONG) for prompt in PROMPTS]


def _warm(family: str, device: str, **config: Any) -> Engine:
    """Return an engine whose buffers and caches for the steps are filled."""
    config = {"kv_cache_tokens": 512, "prefix_cache": False, **config}
    if device == "cpu":  # which stands for a GPU: not what a CPU runs by default
        config.setdefault("fused_model", False)
        config.setdefault("paged_attention", False)
    engine = LLM(tiny(family, device), device=device, **config).engine
    for ring in (
        engine.sequence_runner.staging,
        engine.sequence_runner.kv._append_executor._staging,
    ):
        for length, columns in _SHAPES:
            for _ in range(_RING):
                ring.stage([[0] * length] * columns)
    return engine
