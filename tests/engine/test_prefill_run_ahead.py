"""Prefill steps launched before the tokens of previous steps are read."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import roseinfer
from pytest_roseinfer import DeviceQueue
from pytest_roseinfer.capabilities.simulated_device import QueuedTorch
from roseinfer import LLM, SamplingParams
from tests.engine.test_random_mixes import assert_no_block_is_lost
from tests.late_transfers import late_transfers
from tests.models.families import VOCABULARY, tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roseinfer.engine.request import Request

_PACKAGE = str(Path(roseinfer.__file__).parent)
LENGTH = 7
PER_STEP = 20
"""Tokens per step: two whole prompts and part of a third, whose logits are unused."""
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_k": 9}
KINDS: dict[str, Sequence[SamplingParams]] = {
    "one token": [SamplingParams(max_new_tokens=1)],
    "sampled": [SamplingParams(max_new_tokens=1, **SAMPLED)],
    "mixed lengths": [SamplingParams(max_new_tokens=count) for count in (1, 5)],
    "logprobs": [SamplingParams(max_new_tokens=1, top_logprobs=2, prompt_logprobs=True)],
    "penalties": [
        SamplingParams(max_new_tokens=3, presence_penalty=1.5),
        SamplingParams(max_new_tokens=3, repetition_penalty=1.3, **SAMPLED),
    ],
}
all_kinds = pytest.mark.parametrize("kind", KINDS)


class TensorsFromLists(TorchFunctionMode):
    """Records callers that build tensors from lists: on a GPU each waits for all launched work."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: set[str] = set()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        from_list = function in (torch.tensor, torch.as_tensor)
        indexed = function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if from_list or (indexed and _has_list(args[1])):
            self.callers.add(_caller())
        return function(*args, **(kwargs or {}))


def _has_list(index: Any) -> bool:
    return any(isinstance(each, list) for each in (index if isinstance(index, tuple) else [index]))


def _caller() -> str:
    """Return the engine function that is running."""
    frame = sys._getframe(1)
    while not frame.f_code.co_filename.startswith(_PACKAGE):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_name


def engine(device: str, **config: Any) -> LLM:
    settings: dict[str, Any] = {"block_size": 4, "kv_cache_tokens": 400}
    settings["prefill_max_tokens"] = PER_STEP
    settings |= {"resident_decode": True, "run_ahead": 2, "prefix_cache": False} | config
    if device == "cpu":  # which stands for a GPU; its own backend need not run ahead
        settings["attention_backend"] = "reference"
    llm = LLM(tiny("llama", device), device=device, dtype="float32", **settings)
    slots = llm.engine._runner._resident
    assert slots is not None
    assert slots.supports(SamplingParams(presence_penalty=1.0), VOCABULARY), "no penalties in slots"
    return llm


def queued_engine(queue: DeviceQueue) -> LLM:
    llm = engine("cpu")
    sessions, slots = llm.engine.sequence_runner, llm.engine._runner._resident
    assert slots is not None
    network: Any = sessions.model._model
    penalties: Any = slots.steps.penalties
    queue.on_device(sessions.kv.keys, sessions.kv.values)
    queue.on_device(*network.parameters(), *network.buffers())
    queue.on_device(slots.slots.rows._rows, slots.slots.rows.tokens, slots.steps.tokens)
    queue.on_device(penalties.rows, penalties.token_counts, penalties._no_penalties)
    return llm


def submit(llm: LLM, params: Sequence[SamplingParams], count: int = 9) -> list[Request]:
    prompts = [[(at * 5 + token) % VOCABULARY for token in range(LENGTH)] for at in range(count)]
    return [
        llm.engine.submit(prompt, params[at % len(params)]) for at, prompt in enumerate(prompts)
    ]


def run(llm: LLM) -> None:
    for _ in range(60):
        if llm.engine.has_work:
            llm.engine.step()
    assert not llm.engine.has_work


@pytest.mark.sampled_cases
@all_kinds
def test_host_waits_only_for_the_step_before_the_previous(kind: str) -> None:
    expected = submit(plain := engine("cpu", run_ahead=0), KINDS[kind])
    run(plain)
    queue = DeviceQueue()
    with late_transfers(queue, 64):
        llm = queued_engine(queue)
        requests = submit(llm, KINDS[kind])
        launched = []
        with QueuedTorch(queue):  # the device does nothing until the host waits for it
            for _ in range(2):
                assert llm.engine.step() == []
                launched.append(queue.num_submitted)
                assert queue.num_started == 0, "the second step waited for the first"
            updates = llm.engine.step()
            assert launched[0] // 2 < queue.num_started <= launched[0], (
                "the third step did not wait for the first alone"
            )
            assert [each.request for each in updates] == requests[:2]
            run(llm)
    assert [each.token_ids for each in requests] == [each.token_ids for each in expected]
    assert [each.top_logprobs for each in requests] == [each.top_logprobs for each in expected]
    assert [each.prompt_logprobs for each in requests] == [
        each.prompt_logprobs for each in expected
    ]
    assert_no_block_is_lost(llm)


@all_kinds
def test_prefill_step_builds_no_tensor_from_a_list(device: str, kind: str) -> None:
    llm = engine(device)
    submit(llm, KINDS[kind])
    with TensorsFromLists() as from_list:
        run(llm)
    # The reference attention does, which no GPU runs unless configured to.
    assert from_list.callers <= {"gather"}


@all_kinds
def test_prefill_step_does_not_synchronize(device: str, kind: str) -> None:
    if device != "cuda":
        pytest.skip("a CPU has nothing to wait for")
    llm = engine(device)
    for _ in range(2):  # the first time allocates memory and compiles kernels
        submit(llm, KINDS[kind])
        run(llm)
    submit(llm, KINDS[kind])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(4):
                llm.engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    syncs = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    assert not syncs, "expected tokens to be copied after the step and awaited by an event"
