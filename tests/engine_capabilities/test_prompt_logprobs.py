"""Prompt logprobs of an engine that computes prompts in chunks and restarts paused requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import EngineAdapter, RequestMix, RequestSpec, Sampling, run_mix
from pytest_roseinfer.engine_capabilities.capability import required_conditions
from tests.engine_capabilities.engines.drawing_engine import (
    DrawingEngine,
    DrawnRequest,
    logits_after,
)
from tests.engine_capabilities.engines.small_mixes import reason

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK = 2


@dataclass(eq=False)
class ChunkedRequest(DrawnRequest):
    stored: int = 0
    """Number of tokens computed since it was last started."""
    preempted: bool = False
    prompt_logprobs: list[float | None] = field(default_factory=lambda: [None])


class ChunkedEngine(DrawingEngine):
    """Computes a chunk of each text in a step; a pause drops what was computed."""

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> ChunkedRequest:
        request = ChunkedRequest(list(prompt), sampling)
        self.requests.append(request)
        return request

    def step(self) -> None:
        unfinished: list[Any] = [each for each in self.requests if not each.ended]
        for request in unfinished:
            if not request.preempted and self.is_computed(request):
                tokens = [*request.prompt, *request.tokens]
                self.take(request, self.choose(tokens, request.sampling, len(request.prompt)))

    def is_computed(self, request: ChunkedRequest) -> bool:
        """Compute the next chunk of a text, and return True if that was the last."""
        text = [*request.prompt, *request.tokens]
        begin = request.stored
        request.stored = min(begin + CHUNK, len(text))
        self.record(request, begin + 1, min(request.stored + 1, len(request.prompt)))
        return request.stored == len(text)

    def record(self, request: ChunkedRequest, begin: int, end: int) -> None:
        """Record the logprobs of the prompt's tokens from ``begin`` to ``end``."""
        if begin < end:
            request.prompt_logprobs[begin:end] = self.range_logprobs(request, begin, end)

    def range_logprobs(self, request: ChunkedRequest, begin: int, end: int) -> list[float]:
        prompt = request.prompt
        return [
            self.logprob(logits_after(prompt[:at]), prompt[at], request.sampling)
            for at in range(begin, end)
        ]

    def pause(self, request: ChunkedRequest) -> None:
        request.stored, request.preempted = 0, True

    def resume(self, request: ChunkedRequest) -> None:
        request.preempted = False

    def stage(self, request: ChunkedRequest) -> str:
        if request.preempted:
            return "preempted"
        return "decoding" if request.tokens else "prefilling" if request.stored else "waiting"

    def prompt_logprobs(self, request: Any) -> list[float | None]:
        return list(request.prompt_logprobs)


class ShiftsLaterChunks(ChunkedEngine):
    def range_logprobs(self, request: ChunkedRequest, begin: int, end: int) -> list[float]:
        later = begin > 1
        return super().range_logprobs(request, begin - later, end - later)


class AddsTheRestart(ChunkedEngine):
    def record(self, request: ChunkedRequest, begin: int, end: int) -> None:
        if begin < end:
            request.prompt_logprobs += self.range_logprobs(request, begin, end)


class LosesThemInPauses(ChunkedEngine):
    def pause(self, request: ChunkedRequest) -> None:
        super().pause(request)
        if request.tokens:
            del request.prompt_logprobs[2:]

    def record(self, request: ChunkedRequest, begin: int, end: int) -> None:
        if not request.tokens:
            super().record(request, begin, end)


def served(*, pause_after: int | None = None) -> RequestMix:
    sampling = Sampling(4, ignore_eos=True, prompt_logprobs=True)
    spec = RequestSpec((1, 3, 2, 5, 4), sampling, pause_after=pause_after, pause_steps=2)
    return RequestMix((spec,), options={"batch": 4})


IN_PROMPT, LATER = served(pause_after=2), served(pause_after=5)


@pytest.mark.parametrize(
    ("mix", "conditions"),
    [
        (served(), {"prompt_logprobs_in_chunks"}),
        (IN_PROMPT, {"prompt_logprobs_in_chunks", "prompt_logprobs_restarted"}),
        (LATER, {"prompt_logprobs_in_chunks", "prompt_logprobs_restarted_later"}),
    ],
)
def test_chunks_and_restarts_are_counted(mix: RequestMix, conditions: set[str]) -> None:
    counts = run_mix(ChunkedEngine, mix)
    assert {name for name in counts if name.startswith("prompt_logprobs")} == conditions


@pytest.mark.parametrize(
    ("adapter", "mix", "message"),
    [
        (ShiftsLaterChunks, served(), "request 0: token 3 of its prompt: log-probability "),
        (AddsTheRestart, IN_PROMPT, "request 0: prompt logprobs are [None, "),
        (LosesThemInPauses, LATER, "request 0: prompt logprobs are [None, "),
    ],
)
def test_wrong_prompt_logprobs_are_found(
    adapter: type[EngineAdapter], mix: RequestMix, message: str
) -> None:
    assert reason(adapter, mix).startswith(message)


@pytest.mark.parametrize("adapter", [AddsTheRestart, LosesThemInPauses])
def test_wrong_restart_is_right_without_one(adapter: type[EngineAdapter]) -> None:
    run_mix(adapter, served())


def test_conditions_need_stages() -> None:
    name = "prompt_logprobs_in_chunks"
    assert name in required_conditions(ChunkedEngine)
    assert name not in required_conditions(DrawingEngine)
