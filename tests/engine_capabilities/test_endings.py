"""Ends of requests: reasons must be right, and each kind of end is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from pytest_roseinfer import (
    EngineAdapter,
    RequestMix,
    RequestSpec,
    Sampling,
    SamplingTraits,
    run_mix,
)
from pytest_roseinfer.engine_capabilities.capability import mix_conditions, required_conditions
from pytest_roseinfer.engine_capabilities.endings import ending_of
from pytest_roseinfer.engine_capabilities.text import INCOMPLETE, stop_strings
from pytest_roseinfer.engines.run import settle
from tests.engine_capabilities.engines.drawing_engine import END, DrawingEngine
from tests.engine_capabilities.engines.small_mixes import mix, reason, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence


class Reasoning(DrawingEngine):
    """Reports right reasons, by the state of the request."""

    eos_token = END

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        self.cancelled: list[Any] = []

    def cancel(self, request: Any) -> None:
        self.cancelled += [request] * (not request.ended)
        super().cancel(request)

    def finish_reason(self, request: Any) -> str:
        if request in self.cancelled:
            return "cancelled"
        return self.reason_of(request)

    def reason_of(self, request: Any) -> str:
        text, stops = self.decode(request.tokens), request.sampling.stop
        if any(each in text for each in stops):
            return "stop string"
        by_token = request.tokens[-1] == END and not request.sampling.ignore_eos
        return "stop token" if by_token else "length"


class SaysStop(Reasoning):
    """Does not tell stop tokens and stop strings apart."""

    def reason_of(self, request: Any) -> str:
        exact = super().reason_of(request)
        return exact if exact == "length" else "stop"


class AlwaysLength(Reasoning):
    def reason_of(self, request: Any) -> str:  # noqa: ARG002
        return "length"


class AlwaysStop(Reasoning):
    def reason_of(self, request: Any) -> str:  # noqa: ARG002
        return "stop"


class NeverCancelled(Reasoning):
    def finish_reason(self, request: Any) -> str:
        return self.reason_of(request) if request.tokens else "length"


def served(*specs: RequestSpec) -> RequestMix:
    return RequestMix(specs, options={"batch": 4})


LENGTH = RequestSpec((1,), Sampling(3, ignore_eos=True))
TOKEN = RequestSpec((1, 3), Sampling(6, temperature=30.0), ends_first=True)
STRING = RequestSpec((1, 3), Sampling(6, temperature=3.0, seed=1), stop_spans=((0, 1),))
CANCEL = RequestSpec((1,), Sampling(3, ignore_eos=True), cancel_after=0)
EVERY = served(LENGTH, TOKEN, STRING, CANCEL)


@pytest.mark.parametrize("adapter", [Reasoning, SaysStop, DrawingEngine])
def test_right_reasons_pass(adapter: type[EngineAdapter]) -> None:
    counts = run_mix(adapter, EVERY)
    assert counts["ended_by_length_later"] == 1
    assert counts["ended_by_stop_string_at_first_token"] == 1
    assert counts["ended_by_stop_token_at_first_token"] == 1
    assert counts["cancelled_before_first_token"] == 1


@pytest.mark.parametrize(
    ("adapter", "spec", "message"),
    [
        (AlwaysLength, TOKEN, "'length'; it ends by token 7, so it must be 'stop token'"),
        (AlwaysLength, STRING, "'length'; it ends by its stop string "),
        (AlwaysStop, LENGTH, "'stop'; it ends at its limit of 3 tokens, so it must be 'length'"),
        (
            NeverCancelled,
            CANCEL,
            "'length'; it ends as it was cancelled, so it must be 'cancelled'",
        ),
    ],
)
def test_wrong_reason_is_found(
    adapter: type[EngineAdapter], spec: RequestSpec, message: str
) -> None:
    wrong = reason(adapter, served(spec))
    assert wrong.startswith("request 0 ended after ")
    assert message in wrong


def test_stop_token_at_the_limit_needs_the_token() -> None:
    """Without ``eos_token``, nobody knows if the last token allowed also ends the text."""
    spec = RequestSpec((1,), Sampling(2))
    assert ending_of(Reasoning(), spec, [0, END]).reason == "stop token"
    assert ending_of(DrawingEngine(), spec, [0, END]).reasons == {"length", "stop", "stop token"}
    assert ending_of(DrawingEngine(), spec, [END]).reason == "stop token"


class SecondToken(Reasoning):
    """Ends texts by one of two tokens, of which the model generates the second."""

    eos_token = END + 1
    other_eos_tokens = (END,)


def test_ends_by_a_further_stop_token_are_counted() -> None:
    requests, name = served(TOKEN, LENGTH), "ended_by_other_stop_token"
    assert run_mix(SecondToken, requests)[name] == 1
    assert not run_mix(Reasoning, requests)[name]
    assert name in required_conditions(SecondToken)
    assert name not in required_conditions(Reasoning)
    assert "so it must be 'stop token'" in reason(
        type("Unseen", (AlwaysLength,), {"eos_token": END + 1, "other_eos_tokens": (END,)}),
        served(TOKEN),
    )


def test_flushed_character_ends_a_text_that_has_ended() -> None:
    spec = RequestSpec((1,), Sampling(2, stop=(INCOMPLETE,)))
    ending = ending_of(Reasoning(), spec, [0, 3])
    assert ending.reason == "stop string"
    assert "length" in ending.reasons


def test_incomplete_character_is_a_stop_string_at_the_end_only() -> None:
    spec = RequestSpec((1,), stop_spans=((-1, 1), (-2, 2), (1, 1)))
    assert stop_strings(spec, "ab" + INCOMPLETE) == ("b",)
    assert stop_strings(spec, "ab" + INCOMPLETE, []) == (INCOMPLETE, "b" + INCOMPLETE, "b")
    assert stop_strings(spec, "ab" + INCOMPLETE, ["a", "a" + INCOMPLETE]) == (
        "b" + INCOMPLETE,
        "b",
    )
    assert stop_strings(spec, INCOMPLETE + "ab", [])[:2] == ("b", "ab")


class SplitsCharacters(Reasoning):
    """Draws the first half of a character last, so that a flush completes the stop string."""

    conditions: ClassVar[Sequence[str]] = ("ended_by_flushed_stop_string",)

    def choose(self, tokens: Sequence[int], sampling: Any, prompt_length: int) -> int:
        return 3 if len(tokens) - prompt_length == sampling.max_new_tokens - 1 else 0


class IgnoresFlushedText(SplitsCharacters):
    def flush(self, request: Any) -> None:
        request.pieces.append(request.pending + request.rest_bytes.decode(errors="replace"))


class StopsInFlushedText(SplitsCharacters):
    def flush(self, request: Any) -> None:
        request.pending += request.rest_bytes.decode(errors="replace")
        ended = any(self.ends_with(request, stop) for stop in request.sampling.stop)
        stop = max((s for s in request.sampling.stop if self.ends_with(request, s)), default="")
        request.pieces.append(request.pending[: len(request.pending) - ended * len(stop)])


def test_stop_string_that_the_flush_completes_is_cut() -> None:
    spec = RequestSpec((1,), Sampling(3, ignore_eos=True), stop_spans=((-1, 1),))
    unjudged = {"logits": EngineAdapter.logits, "logprobs": EngineAdapter.logprobs}
    unjudged |= dict.fromkeys(("top_logprobs", "prompt_logprobs"))
    for name in ("top_logprobs", "prompt_logprobs"):
        unjudged[name] = getattr(EngineAdapter, name)
    right = type("Right", (StopsInFlushedText,), unjudged)
    wrong = type("Wrong", (IgnoresFlushedText,), unjudged)
    assert run_mix(right, served(spec))["ended_by_flushed_stop_string"] == 1
    assert "its tokens decode to 'aa'" in reason(wrong, served(spec))


def test_failure_names_the_stop_string_that_ends_the_text() -> None:
    class Unstoppable(DrawingEngine):
        def ends_with(self, request: Any, stop: str) -> bool:  # noqa: ARG002
            return False

    wrong = reason(Unstoppable, served(STRING))
    assert "; alone it has ended by then, by its stop string '" in wrong


def test_failure_names_the_limit_and_the_token() -> None:
    class Endless(ToyAdapter):
        def is_finished(self, request: Any) -> bool:  # noqa: ARG002
            return False

        def tokens(self, request: Any) -> list[int]:
            return [*request.tokens, *[0] * request.ended]

    wrong = reason(Endless, mix(request_spec(1, 2)))
    assert wrong == "request 0, token 4: 0; alone it has ended by then, at its limit of 4 tokens"


def test_first_token_of_a_greedy_request_ends_it_by_another_prompt() -> None:
    class Greedy(ToyAdapter):
        sampling = SamplingTraits(greedy_only=True)
        eos_token = 5

    spec = RequestSpec((4, 2), Sampling(6), ends_first=True)
    settled, expected = settle(Greedy(), spec, mix(spec))
    assert expected == [5]
    assert settled.prompt == (4, 10)
    assert settled.sampling == Sampling(6)


def test_only_conditions_that_an_engine_can_meet_are_required() -> None:
    class Limited(ToyAdapter):
        unreachable = ("cancelled_later",)

    required = required_conditions(Limited)
    assert "ended_by_length_later" in required
    assert "cancelled_before_first_token" in required
    assert "cancelled_later" not in required
    assert not [each for each in required if "stop_string" in each or "stop_token" in each]
    assert {*required} <= mix_conditions(Limited).keys()
    assert "ended_by_stop_token_later" in required_conditions(Reasoning)
