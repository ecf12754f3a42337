"""Failures mention a preemption of their request, or its cached prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import Sampling
from pytest_roseinfer.engine_capabilities.lifecycle import RequestPast
from tests.engine_capabilities.engines.broken_engines import WrongPrefixEngine
from tests.engine_capabilities.engines.small_mixes import mix, reason, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.engine_capabilities.engines.toy_engine import ToyRequest


class PreemptingEngine(ToyEngine):
    """Preempts the newest request after some steps, and corrupts its checksum after one of them."""

    preempting_steps: ClassVar[Sequence[int]] = (3,)
    steps = 0
    preempted_request: ToyRequest | None = None

    def step(self) -> None:
        self.steps += 1
        if self.preempted_request:
            self.running.append(self.preempted_request)
            self.preempted_request = None
        super().step()
        if self.steps in self.preempting_steps and self.running:
            self.preempted_request = self.running.pop()
            self.preempted_request.checksum ^= self.steps == 3


class TwicePreemptingEngine(PreemptingEngine):
    preempting_steps = (1, 3)


class Preempting(ToyAdapter):
    engine_type: ClassVar[type[ToyEngine]] = PreemptingEngine
    engine: PreemptingEngine

    def stage(self, request: Any) -> str:
        if request is self.engine.preempted_request:
            return "preempted"
        return "decoding" if request in self.engine.running else "waiting"


class PreemptingTwice(Preempting):
    engine_type = TwicePreemptingEngine


def test_failure_mentions_a_preemption() -> None:
    message = reason(Preempting, mix(request_spec(1, 2)))
    assert message.startswith("request 0, token 3: ")
    assert message.endswith("; it was preempted after its 3rd token and came back")


def test_failure_mentions_the_last_of_several_preemptions() -> None:
    message = reason(PreemptingTwice, mix(request_spec(1, 2)))
    assert message.endswith("; it was preempted 2 times, last after its 3rd token and came back")


class WrongPrefixes(ToyAdapter):
    engine_type = WrongPrefixEngine

    def cached_tokens(self, request: Any) -> int:
        return 2 * int(request.has_prefix)


def test_failure_mentions_a_cached_prefix() -> None:
    """The message also appears where the request ends in its first step."""
    one_token = Sampling(1)
    wrong_mix = mix(
        request_spec(1, 2, sampling=one_token),
        request_spec(3, 4, sampling=one_token, arrival=2),
        prefixes=True,
    )
    message = reason(WrongPrefixes, wrong_mix)
    assert message.startswith("request 1, token 0: ")
    assert message.endswith("; its first 2 tokens were found in the cache")


class Scripted(ToyAdapter):
    """Has stages for requests, which must not be queried after the end."""

    def stage(self, request: Any) -> str:
        assert request != "ended"
        return str(request)

    def is_finished(self, request: Any) -> bool:
        return bool(request == "ended")


def test_preemption_of_several_steps_is_counted_once() -> None:
    history, adapter = RequestPast(), Scripted()
    for stage in ("waiting", "decoding", "preempted", "preempted", "decoding", "ended"):
        history.note(adapter, stage, 3)
    assert history.describe() == "; it was preempted after its 3rd token and came back"


@pytest.mark.parametrize(
    ("history", "message"),
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
def test_history_of_a_request_is_described(history: RequestPast, message: str) -> None:
    assert history.describe() == message


@pytest.mark.parametrize(
    ("number", "message"), [(3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (21, "21st")]
)
def test_ordinal_numbers_are_spelled(number: int, message: str) -> None:
    assert f"after its {message} token" in RequestPast("decoding", 30, 1, number).describe()
