"""Pauses and refusals: a paused request gets no token, and one that can never fit is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import EngineAdapter, RequestSpec, Sampling, run_mix
from tests.engine_capabilities.engines.small_mixes import GREEDY, mix, reason, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer import RequestMix
    from tests.engine_capabilities.engines.toy_engine import ToyRequest


class PausingEngine(ToyEngine):
    """Refuses requests that can never fit, and keeps paused ones out of its steps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.paused: list[ToyRequest] = []

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> ToyRequest:
        request = super().submit(prompt, sampling)
        if request.max_tokens > self.room:
            self.waiting.remove(request)
            raise ValueError("too large")
        return request

    def step(self) -> None:
        for queue in (self.waiting, self.running):
            queue[:] = [each for each in queue if each not in self.paused]
        super().step()

    def resume(self, request: ToyRequest) -> None:
        self.paused.remove(request)
        (self.running if request.tokens else self.waiting).append(request)

    def end(self, request: ToyRequest) -> None:
        if request in self.paused:
            self.resume(request)
        super().end(request)


class Pausing(ToyAdapter):
    engine_type: ClassVar[type[ToyEngine]] = PausingEngine

    def pause(self, request: Any) -> None:
        self.engine.paused.append(request)  # type: ignore[attr-defined]

    def resume(self, request: Any) -> None:
        self.engine.resume(request)  # type: ignore[attr-defined]

    def refusals(
        self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix
    ) -> tuple[type[Exception], ...]:
        fits = len(prompt) + sampling.max_new_tokens <= mix.cache_tokens
        return () if fits else (ValueError,)


class IgnoresPauses(Pausing):
    def pause(self, request: Any) -> None:
        self.engine.paused += [request, request][:0]  # type: ignore[attr-defined]

    def resume(self, request: Any) -> None:
        pass


class AcceptsAll(Pausing):
    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        return ToyEngine.submit(self.engine, prompt, sampling)


class HasPositions(Pausing):
    """Refuses prompts that leave no position for a new token."""

    positions: ClassVar[int] = 20

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        if len(prompt) >= self.positions:
            raise ValueError("too long")
        return super().submit(prompt, sampling)

    def refusals(
        self, prompt: Sequence[int], sampling: Sampling, mix: RequestMix
    ) -> tuple[type[Exception], ...]:
        too_long = len(prompt) >= HasPositions.positions
        return (ValueError,) if too_long else super().refusals(prompt, sampling, mix)


class HasOneMore(HasPositions):
    positions: ClassVar[int] = 21


PAUSED = request_spec(1, 2, pause_after=1, pause_steps=3)
WAITING = request_spec(1, 2, pause_after=0, pause_steps=3)
OVERSIZED = request_spec(1, 2, refused_before=1)


@pytest.mark.parametrize(
    ("spec", "condition"),
    [
        (PAUSED, "paused_later"),
        (WAITING, "paused_before_first_token"),
        (OVERSIZED, "request_refused"),
    ],
)
def test_right_engine_passes(spec: RequestSpec, condition: str) -> None:
    assert run_mix(Pausing, mix(spec, request_spec(3)))[condition] >= 1


@pytest.mark.parametrize(
    ("adapter", "spec", "message"),
    [
        (IgnoresPauses, PAUSED, "request 0 has been paused for 1 step and got a token"),
        (
            AcceptsAll,
            OVERSIZED,
            "a request of 64 tokens for up to 1 new ones was accepted, in a cache of 64: "
            "submit must raise ValueError",
        ),
        (
            HasOneMore,
            request_spec(1),
            "a request of 20 tokens for up to 1 new ones was accepted, in a cache of 64: "
            "submit must raise ValueError",
        ),
    ],
)
def test_wrong_engine_fails(adapter: type[EngineAdapter], spec: RequestSpec, message: str) -> None:
    assert reason(adapter, mix(spec, request_spec(3))).startswith(message)


def test_engine_that_refuses_by_positions_passes() -> None:
    assert run_mix(HasPositions, mix(request_spec(1)))["request_refused"] == 1


def test_tokens_in_flight_come_during_a_pause() -> None:
    class InFlight(IgnoresPauses):
        extra_steps = 4

    run_mix(InFlight, mix(PAUSED))


def test_events_are_described() -> None:
    spec = RequestSpec((1,), GREEDY, pause_after=2, pause_steps=1, refused_before=3)
    description = spec.describe()
    assert "after two that exceed the cache by 3 tokens" in description
    assert "paused for 1 step from 2 steps later on" in description
