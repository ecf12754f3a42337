"""Guides on a simulated device that runs everything late and copies the current state."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pytest_roseinfer import DeviceQueue
from pytest_roseinfer.capabilities.simulated_device import QueuedTorch
from roseinfer import LLM, SamplingParams
from tests.guided.constraints import JUDGED_GUIDES, draw_params, draw_prompt, engine, generate_all
from tests.late_transfers import late_transfers

GUIDES_AND_NONE = [None, *JUDGED_GUIDES.values()]


def queued_engine(queue: DeviceQueue, *, resident: bool) -> LLM:
    llm = engine("cpu", resident_decode=resident, run_ahead=3, max_batch_size=5)
    sessions, slots = llm.engine.sequence_runner, llm.engine._runner._resident
    network: Any = sessions.model._model
    queue.on_device(sessions.kv.keys, sessions.kv.values)
    queue.on_device(*network.parameters(), *network.buffers())
    if slots is not None:
        rows = slots.slots.rows
        queue.on_device(rows._rows, rows.tokens, slots.steps.tokens)
        guided = SamplingParams(guide=JUDGED_GUIDES["words"].guide, presence_penalty=1.0)
        assert slots.supports(guided, sessions.model.shape.vocab_size)
        guides: Any = slots.steps.guides
        penalties: Any = slots.steps.penalties
        queue.on_device(
            guides.token_bitmasks, penalties.rows, penalties.token_counts, penalties._no_penalties
        )
    return llm


@pytest.mark.slow
@pytest.mark.parametrize("resident", [False, True])
def test_completions_match_those_of_a_synchronous_device(resident: bool) -> None:
    rng = random.Random(4)
    prompts = [draw_prompt(rng) for _ in GUIDES_AND_NONE]
    params = [draw_params(rng, judged, max_new_tokens=6) for judged in GUIDES_AND_NONE]
    expected = [each.token_ids for each in generate_all(engine("cpu"), prompts, params)]
    queue = DeviceQueue()
    with late_transfers(queue, 16):
        llm = queued_engine(queue, resident=resident)
        requests = [
            llm.engine.submit(prompt, params_of_prompt)
            for prompt, params_of_prompt in zip(prompts, params, strict=True)
        ]
        for _ in range(40):
            with QueuedTorch(queue):  # the device does nothing until the host waits for it
                llm.engine.step()
    assert not llm.engine.has_work
    assert [request.error for request in requests] == [None] * len(requests)
    assert [request.token_ids for request in requests] == expected
