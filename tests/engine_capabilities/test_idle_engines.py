"""Engines that declare ``never_idles``: every step must generate tokens while all decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import conformance, run_mix
from tests.engine_capabilities.engines.small_mixes import mix, reason, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from collections.abc import Sequence


class IdlingEngine(ToyEngine):
    """Does nothing in some of its steps."""

    idle_steps: ClassVar[Sequence[int]] = (2, 4)
    steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps not in self.idle_steps:
            super().step()


class IdlingTwiceEngine(IdlingEngine):
    idle_steps = (3, 4)


class NeverIdles(ToyAdapter):
    never_idles = True

    def stage(self, request: Any) -> str:
        return "decoding" if request in self.engine.running else "waiting"


class IdlesOnce(NeverIdles):
    engine_type: ClassVar[type[ToyEngine]] = IdlingEngine


class IdlesTwice(NeverIdles):
    engine_type: ClassVar[type[ToyEngine]] = IdlingTwiceEngine
    extra_steps = 1


TWO_REQUESTS = mix(request_spec(1, 2), request_spec(3))


def test_idle_step_is_reported() -> None:
    message = "requests [0, 1] were decoding, and a step generated no token for them"
    assert reason(IdlesOnce, TWO_REQUESTS) == message


def test_consecutive_idle_steps_are_counted() -> None:
    message = "requests [0, 1] were decoding, and 2 steps in a row generated no token for them"
    assert reason(IdlesTwice, TWO_REQUESTS) == message


@pytest.mark.parametrize(
    ("adapter", "attributes"),
    [
        (NeverIdles, {}),
        (IdlesOnce, {"never_idles": False}),
        (IdlesOnce, {"extra_steps": 1}),
        (IdlesTwice, {"extra_steps": 2}),
    ],
)
def test_engine_that_keeps_its_declaration_passes(
    adapter: type[ToyAdapter], attributes: dict[str, Any]
) -> None:
    assert run_mix(type("Right", (adapter,), attributes), TWO_REQUESTS)


def test_idle_step_is_allowed_while_a_request_waits() -> None:
    waiting_mix = mix(request_spec(1, 2), request_spec(3, arrival=1), room=6)
    assert run_mix(IdlesOnce, waiting_mix)["crowded"]


def test_idle_steps_without_requests_are_allowed() -> None:
    assert run_mix(NeverIdles, mix(request_spec(1, arrival=3), request_spec(2, arrival=12)))


def test_never_idles_needs_the_method_stage() -> None:
    class Silent(ToyAdapter):
        never_idles = True

    message = "Silent.never_idles is True, which needs stage: define that too"
    with pytest.raises(TypeError, match=message):
        conformance(Silent)
