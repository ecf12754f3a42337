"""Trial of an engine's model: a model whose tokens show little is reported, or shows logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    EngineAdapter,
    MixDivergence,
    RequestMix,
    conformance,
    run_mix,
    settings,
)
from pytest_roseinfer.engines.sensitivity import describe_blindness, is_blind, sensitivity
from pytest_roseinfer.engines.strategies import request_mixes
from pytest_roseinfer.report.verdict import TargetVerdict
from pytest_roseinfer.run import coverage
from tests.engine_capabilities.engines import drawing_engine
from tests.engine_capabilities.engines.drawing_engine import DrawingEngine
from tests.engine_capabilities.engines.toy_engine import ToyAdapter
from tests.fresh_run import fresh_run

if TYPE_CHECKING:
    from collections.abc import Sequence

logits_after = drawing_engine.logits_after


class Insensitive(ToyAdapter):
    """Ends every text at once, whatever its context."""

    cancel = EngineAdapter.cancel

    def generate_alone(self, prompt: Sequence[int], sampling: Any, mix: RequestMix) -> list[int]:  # noqa: ARG002
        return [5]


def test_shipped_toys_are_sensitive() -> None:
    for adapter in (ToyAdapter, DrawingEngine):
        assert (sensitivity(adapter) or 0) > 0.5
        assert describe_blindness(adapter) == ""


def test_insensitive_model_without_logprobs_is_reported() -> None:
    assert sensitivity(Insensitive) == 0
    assert describe_blindness(Insensitive).startswith(
        "the model's next token changed in 0% of 24 contexts"
    )


def test_server_and_failing_model_are_not_tried() -> None:
    class Server(Insensitive):
        replays = 2

    class Failing(Insensitive):
        def make(self, mix: RequestMix) -> None:  # noqa: ARG002
            raise RuntimeError("no model")

    assert sensitivity(Server) is None
    assert sensitivity(Failing) is None
    assert not is_blind(Failing)


def flat(tokens: Sequence[int]) -> list[float]:
    """Return logits whose argmax is always the first token."""
    return [5.0 * (at == 0) + 0.01 * value for at, value in enumerate(logits_after(tokens))]


class Flat(DrawingEngine):
    """Has a model with tiny weights."""

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> list[float]:  # noqa: ARG002
        return flat(tokens)

    def logprob(self, logits: Sequence[float], token: int, sampling: Any) -> float:
        return super().logprob(logits, token, sampling)


class DropsAToken(Flat):
    """Loses the first token of a text, from its third new token on."""

    def take(self, request: Any, token: int) -> None:
        super().take(request, token)
        before = [*request.prompt, *request.tokens[:-1]]
        if len(request.tokens) > 2:
            request.logprobs[-1] = self.logprob(flat(before[1:]), token, request.sampling)


def test_each_request_of_an_insensitive_model_has_logprobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drawing_engine, "logits_after", flat)
    assert is_blind(Flat)
    assert describe_blindness(Flat) == ""

    @seed(1)
    @hypothesis_settings(max_examples=20, deadline=None, database=None, phases=[Phase.generate])
    @given(request_mixes(Flat))
    def check(mix: RequestMix) -> None:
        assert all(each.sampling.logprobs for each in mix.requests)
        run_mix(Flat, mix)

    check()

    @seed(1)
    @hypothesis_settings(max_examples=20, deadline=None, database=None, phases=[Phase.generate])
    @given(request_mixes(DropsAToken))
    def find(mix: RequestMix) -> None:
        run_mix(DropsAToken, mix)

    with pytest.raises(MixDivergence, match="log-probability"):
        find()


def test_insensitive_model_is_a_warning_of_the_run() -> None:
    class Blind(ToyAdapter):
        def generate_alone(
            self, prompt: Sequence[int], sampling: Any, mix: RequestMix
        ) -> list[int]:
            if len(prompt) == 12 or len(prompt) == 11:
                return [0]  # contexts of the trial
            return super().generate_alone(prompt, sampling, mix)

        def is_near_tie(self, tokens: Sequence[int], sampling: Any, mix: RequestMix) -> bool:  # noqa: ARG002
            return True

    with fresh_run(settings.Settings(examples=5, steps=4, seed=1)):
        tests: Any = conformance(Blind)()
        tests.test_requests_get_what_they_get_alone()
        warnings = TargetVerdict(coverage.current().of(Blind)).warnings()
    assert warnings[0].startswith("the model's next token changed in 0% of 24 contexts")
