"""An engine that says it never idles is held to that while all its requests are decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import conformance, run_mix
from tests.engine_capabilities.engines.small_mixes import asked, mix, reason
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from collections.abc import Sequence


class DozingEngine(ToyEngine):
    """It does nothing in some of its steps."""

    naps: ClassVar[Sequence[int]] = (2, 4)
    steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps not in self.naps:
            super().step()


class SleepingEngine(DozingEngine):
    naps = (3, 4)


class NeverIdles(ToyAdapter):
    never_idles = True

    def stage(self, request: Any) -> str:
        return "decoding" if request in self.engine.running else "waiting"


class Dozes(NeverIdles):
    engine_type: ClassVar[type[ToyEngine]] = DozingEngine


class Sleeps(NeverIdles):
    engine_type: ClassVar[type[ToyEngine]] = SleepingEngine
    extra_steps = 1


TWO = mix(asked(1, 2), asked(3))


def test_a_step_in_which_nothing_is_done_is_told() -> None:
    said = "requests [0, 1] were decoding, and a step generated no token for them"
    assert reason(Dozes, TWO) == said


def test_of_several_in_a_row_it_is_told_how_many() -> None:
    said = "requests [0, 1] were decoding, and 2 steps in a row generated no token for them"
    assert reason(Sleeps, TWO) == said


@pytest.mark.parametrize(
    ("adapter", "changed"),
    [
        (NeverIdles, {}),
        (Dozes, {"never_idles": False}),
        (Dozes, {"extra_steps": 1}),
        (Sleeps, {"extra_steps": 2}),
    ],
)
def test_what_does_as_it_says_passes(adapter: type[ToyAdapter], changed: dict[str, Any]) -> None:
    assert run_mix(type("Right", (adapter,), changed), TWO)


def test_a_step_is_not_judged_while_somebody_waits() -> None:
    waiting = mix(asked(1, 2), asked(3, arrival=1), room=6)
    assert run_mix(Dozes, waiting)["crowded"]


def test_nor_before_the_first_request_or_behind_the_last() -> None:
    assert run_mix(NeverIdles, mix(asked(1, arrival=3), asked(2, arrival=12)))


def test_it_cannot_be_said_without_stages() -> None:
    class Silent(ToyAdapter):
        never_idles = True

    said = "Silent.never_idles is True, which needs stage: define that too"
    with pytest.raises(TypeError, match=said):
        conformance(Silent)
