"""Guides on a simulated device that does everything late, and copies what it is then."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pytest_roseinfer import DeviceQueue
from pytest_roseinfer.capabilities.simulated_device import QueuedTorch
from roseinfer import LLM, SamplingParams
from tests.guided.constraints import FORMS, drawn_params, drawn_prompt, engine, together
from tests.late_transfers import late_transfers

EVERY_OTHER = [None, *FORMS.values()]


def late_engine(queue: DeviceQueue, *, resident: bool) -> LLM:
    llm = engine("cpu", resident_decode=resident, run_ahead=3, max_batch_size=5)
    sessions, slots = llm.engine.sequence_runner, llm.engine._runner._resident
    network: Any = sessions.model._model
    queue.on_device(sessions.kv.keys, sessions.kv.values)
    queue.on_device(*network.parameters(), *network.buffers())
    if slots is not None:
        rows = slots.slots.rows
        queue.on_device(rows._rows, rows.tokens, slots.steps.tokens)
        guided = SamplingParams(guide=FORMS["words"].guide, presence_penalty=1.0)
        assert slots.supports(guided, sessions.model.shape.vocab_size)
        guides: Any = slots.steps.guides
        penalties: Any = slots.steps.penalties
        queue.on_device(
            guides.token_bitmasks, penalties.rows, penalties.token_counts, penalties._no_penalties
        )
    return llm


@pytest.mark.parametrize("resident", [False, True])
def test_texts_are_those_of_a_device_that_is_at_once(resident: bool) -> None:
    rng = random.Random(4)
    prompts = [drawn_prompt(rng) for _ in EVERY_OTHER]
    params = [drawn_params(rng, form, max_new_tokens=6) for form in EVERY_OTHER]
    want = [each.token_ids for each in together(engine("cpu"), prompts, params)]
    queue = DeviceQueue()
    with late_transfers(queue, 16):
        llm = late_engine(queue, resident=resident)
        requests = [
            llm.engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)
        ]
        for _ in range(40):
            with QueuedTorch(queue):  # the device does nothing until somebody waits for it
                llm.engine.step()
    assert not llm.engine.has_work
    assert [request.error for request in requests] == [None] * len(requests)
    assert [request.token_ids for request in requests] == want
