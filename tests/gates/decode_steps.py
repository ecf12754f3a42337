"""Decode steps of this engine that can be done again and again, each time the same."""

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
PROMPTS = [[first + 1, 2, 3] for first in range(REQUESTS)]
_RING = 64
"""Buffers for indices, each of which remembers what it was used for."""
_SHAPES = ((REQUESTS, 1), (REQUESTS, 2), (REQUESTS, 3), (2 * REQUESTS, 1))
"""Lengths and columns that a decode step stages: a step's block table is up to two blocks wide."""
_STEPS_TO_STEADY = 4
"""Until every buffer that tokens are read back through has been made."""
_LONG = SamplingParams(temperature=0, max_new_tokens=90, ignore_eos=True)


def counters(engine: Engine) -> Mapping[str, int]:
    """All that the engine counts itself."""
    kv = engine.sequence_runner.kv
    return {**kv.work_counts, **kv.path_counts, **engine.path_counts}


def steady(family: str, device: str, **config: Any) -> Step:
    """A step in which every request stores its token in a block it has."""
    engine = _warm(family, device, block_size=32, **config)
    _submit(engine)
    for _ in range(_STEPS_TO_STEADY):
        engine.step()
    return Step(engine.step, REQUESTS, None, lambda: counters(engine))


def boundary(family: str, device: str, **config: Any) -> Step:
    """A step in which every request opens a block."""
    block = 4
    engine = _warm(family, device, block_size=block, **config)
    running: list[Any] = []

    def come_to_the_end_of_a_block() -> None:
        for request in running:
            engine.cancel(request)
        running[:] = _submit(engine)
        while running[0].sequence.num_stored < block:
            engine.step()

    return Step(engine.step, REQUESTS, come_to_the_end_of_a_block, lambda: counters(engine))


def copy_on_write(family: str, device: str, **config: Any) -> Step:
    """A step in which every sequence writes into a block that another one holds too."""
    engine = _warm(family, device, block_size=8, **config)
    sessions = engine.sequence_runner
    held: list[CachedSequence] = []
    forks: list[CachedSequence] = []

    def share() -> None:
        for session in held:
            sessions.release(session)
        parents, _ = sessions.prefill(PROMPTS)
        for parent in parents:
            parent.token_ids.append(7)
        forks[:] = [sessions.fork(parent) for parent in parents]
        held[:] = [*parents, *forks]

    def decode() -> None:
        greedy_step(sessions, forks)

    return Step(decode, REQUESTS, share, lambda: counters(engine))


STEPS = {"steady": steady, "boundary": boundary, "copy_on_write": copy_on_write}


def _submit(engine: Engine) -> list[Any]:
    return [engine.submit(prompt, _LONG) for prompt in PROMPTS]


def _warm(family: str, device: str, **config: Any) -> Engine:
    """An engine that has built all that its steps find ready."""
    config = {"kv_cache_tokens": 512, "prefix_cache": False, **config}
    engine = LLM(tiny(family, device), device=device, **config).engine
    for ring in (
        engine.sequence_runner.staging,
        engine.sequence_runner.kv._append_executor._staging,
    ):
        for length, columns in _SHAPES:
            for _ in range(_RING):
                ring.stage([[0] * length] * columns)
    return engine
