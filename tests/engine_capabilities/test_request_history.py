"""A failure says what its request went through: a preemption, or a prefix from the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import Sampling
from pytest_roseinfer.engine_capabilities.lifecycle import RequestPast
from tests.engine_capabilities.engines.broken_engines import WrongPrefixEngine
from tests.engine_capabilities.engines.small_mixes import asked, mix, reason
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.engine_capabilities.engines.toy_engine import ToyRequest


class PreemptingEngine(ToyEngine):
    """It preempts the newest request behind some steps, and reads its text wrongly behind one."""

    preempts: ClassVar[Sequence[int]] = (3,)
    steps = 0
    away: ToyRequest | None = None

    def step(self) -> None:
        self.steps += 1
        if self.away:
            self.running.append(self.away)
            self.away = None
        super().step()
        if self.steps in self.preempts and self.running:
            self.away = self.running.pop()
            self.away.read ^= self.steps == 3


class TwicePreemptingEngine(PreemptingEngine):
    preempts = (1, 3)


class Preempting(ToyAdapter):
    engine_type: ClassVar[type[ToyEngine]] = PreemptingEngine
    engine: PreemptingEngine

    def stage(self, request: Any) -> str:
        if request is self.engine.away:
            return "preempted"
        return "decoding" if request in self.engine.running else "waiting"


class PreemptingTwice(Preempting):
    engine_type = TwicePreemptingEngine


def test_a_wrong_token_behind_a_preemption_says_so() -> None:
    said = reason(Preempting, mix(asked(1, 2)))
    assert said.startswith("request 0, token 3: ")
    assert said.endswith("; it was preempted after its 3rd token and came back")


def test_of_several_preemptions_the_last_is_told() -> None:
    said = reason(PreemptingTwice, mix(asked(1, 2)))
    assert said.endswith("; it was preempted 2 times, last after its 3rd token and came back")


class WrongPrefixes(ToyAdapter):
    engine_type = WrongPrefixEngine

    def cached_tokens(self, request: Any) -> int:
        return 2 * int(request.hit)


def test_a_wrong_token_behind_a_prefix_that_was_found_says_so() -> None:
    """Also where the request ends in the step in which it began."""
    one = Sampling(1)
    wrong = mix(asked(1, 2, sampling=one), asked(3, 4, sampling=one, arrival=2), prefixes=True)
    said = reason(WrongPrefixes, wrong)
    assert said.startswith("request 1, token 0: ")
    assert said.endswith("; its first 2 tokens were found in the cache")


class Scripted(ToyAdapter):
    """Its requests stand for what they are at, and are not asked for it once they have ended."""

    def stage(self, request: Any) -> str:
        assert request != "ended"
        return str(request)

    def is_finished(self, request: Any) -> bool:
        return bool(request == "ended")


def test_a_preemption_that_lasts_is_one() -> None:
    past, adapter = RequestPast(), Scripted()
    for stage in ("waiting", "decoding", "preempted", "preempted", "decoding", "ended"):
        past.note(adapter, stage, 3)
    assert past.describe() == "; it was preempted after its 3rd token and came back"


@pytest.mark.parametrize(
    ("past", "said"),
    [
        (RequestPast(), ""),
        (RequestPast(cached=1), "; its first token was found in the cache"),
        (
            RequestPast("preempted", 2, 1, 0),
            "; it was preempted before its first token and came back",
        ),
        (RequestPast("preempted", 2, 1, 2), "; it was preempted after its 2nd token"),
        (RequestPast("preempted", 2, 1, 1), "; it was preempted after its 1st token and came back"),
        (RequestPast("waiting", 2, 1, 2), "; it was preempted after its 2nd token and came back"),
    ],
)
def test_the_words(past: RequestPast, said: str) -> None:
    assert past.describe() == said


@pytest.mark.parametrize(
    ("number", "said"), [(3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (21, "21st")]
)
def test_numbers_are_spelled(number: int, said: str) -> None:
    assert f"after its {said} token" in RequestPast("decoding", 30, 1, number).describe()
