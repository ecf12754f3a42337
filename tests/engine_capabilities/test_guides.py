"""Guides: each token is the argmax among those allowed, and the completion ends with its guide."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import EngineAdapter, RequestMix, RequestSpec, Sampling, conformance, run_mix
from pytest_roseinfer.engine_capabilities.capability import required_conditions
from pytest_roseinfer.engine_capabilities.guides import restrict_to_guide
from pytest_roseinfer.engines.run import settle
from pytest_roseinfer.engines.strategies import request_mixes
from tests.engine_capabilities.engines.drawing_engine import (
    DrawingEngine,
    DrawnRequest,
    logits_after,
)
from tests.engine_capabilities.engines.small_mixes import reason

if TYPE_CHECKING:
    from collections.abc import Sequence

ODD, EVEN, SHORT = "135 135 135 135", "024 024 024 024", "6"


class GuidedEngine(DrawingEngine):
    """Masks the logits of guided requests; a pause drops nothing."""

    guides: ClassVar[Sequence[str]] = (ODD, EVEN, SHORT)

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        self.places: Counter[int] = Counter()
        """Place in its guide of each request, by its index."""
        self.paused: set[int] = set()

    def step(self) -> None:
        unfinished = [at for at, each in enumerate(self.requests) if not each.ended]
        for at in [each for each in unfinished if each not in self.paused][: self.batch]:
            self.step_request(at, self.requests[at])

    def step_request(self, at: int, request: DrawnRequest) -> None:
        guide = request.sampling.guide
        before = [*request.prompt, *request.tokens]
        if guide is None:
            self.take(request, self.choose(before, request.sampling, len(request.prompt)))
            return
        allowed = self.allowed_by(at, guide)
        logits = logits_after(before)
        self.take(request, max(allowed, key=logits.__getitem__))
        self.places[at] += 1
        request.ended |= not self.allowed_tokens(guide, request.tokens)

    def allowed_by(self, at: int, guide: str) -> Sequence[int]:
        return self.allowed_tokens(guide, [0] * self.places[at])

    def allowed_tokens(self, guide: str, tokens: Sequence[int]) -> Sequence[int]:
        places = guide.split()
        return [*map(int, places[len(tokens)])] if len(tokens) < len(places) else []

    def pause(self, request: DrawnRequest) -> None:
        self.paused.add(self.requests.index(request))

    def resume(self, request: DrawnRequest) -> None:
        self.paused.remove(self.requests.index(request))

    def stage(self, request: DrawnRequest) -> str:
        return "preempted" if self.requests.index(request) in self.paused else "decoding"


class AdvancesAgain(GuidedEngine):
    """Advances the guide of a paused request, which then allows what comes a place later."""

    guides = ("135 024 135 024 135",)

    def pause(self, request: DrawnRequest) -> None:
        super().pause(request)
        self.places[self.requests.index(request)] += len(request.tokens) > 0


class MasksByAnotherGuide(GuidedEngine):
    def allowed_by(self, at: int, guide: str) -> Sequence[int]:
        guides = [each.sampling.guide or guide for each in self.requests if not each.ended]
        return super().allowed_by(at, guides[-1])


class IgnoresGuides(GuidedEngine):
    def allowed_by(self, at: int, guide: str) -> Sequence[int]:  # noqa: ARG002
        return range(7)


class GoesOn(GuidedEngine):
    def allowed_by(self, at: int, guide: str) -> Sequence[int]:
        return super().allowed_by(at, guide) or range(7)

    def step_request(self, at: int, request: DrawnRequest) -> None:
        super().step_request(at, request)
        request.ended = len(request.tokens) == request.sampling.max_new_tokens


def spec(guide: str | None, tokens: int = 3, **fields: Any) -> RequestSpec:
    return RequestSpec((1, 3), Sampling(tokens, ignore_eos=True), guided_by=guide, **fields)


def mix(*specs: RequestSpec) -> RequestMix:
    return RequestMix(specs, options={"batch": 4})


def test_right_engine_passes() -> None:
    paused = spec("135 024 135 024 135", 5, pause_after=2, pause_steps=2)
    counts = run_mix(GuidedEngine, mix(spec(ODD), spec(EVEN), spec(None), spec(SHORT), paused))
    names = {"guided", "guided_differently", "ended_by_guide_at_first_token"}
    assert names <= {*counts}


def test_restart_within_a_guide_is_counted() -> None:
    counts = run_mix(GuidedEngine, mix(spec(ODD, 4, pause_after=2, pause_steps=2)))
    assert counts["guided_restarted"] == 1
    assert counts["ended_by_guide_later"] == 1


@pytest.mark.parametrize(
    ("adapter", "requests", "message"),
    [
        (IgnoresGuides, mix(spec(ODD), spec(EVEN)), "request "),
        (MasksByAnotherGuide, mix(spec(ODD), spec(EVEN)), "request 0, token 0: "),
        (
            AdvancesAgain,
            mix(spec(AdvancesAgain.guides[0], 4, pause_after=2, pause_steps=2)),
            "request 0, token 2: ",
        ),
        (GoesOn, mix(spec(SHORT)), "request 0, token 1: "),
    ],
)
def test_wrong_engine_fails(
    adapter: type[EngineAdapter], requests: RequestMix, message: str
) -> None:
    assert reason(adapter, requests).startswith(message)


def test_failure_names_a_token_that_the_guide_rules_out() -> None:
    requests = mix(spec(AdvancesAgain.guides[0], 4, pause_after=2, pause_steps=2))
    assert reason(AdvancesAgain, requests).endswith("; its guide rules out 4 there")
    assert "rules out" not in reason(GoesOn, mix(spec(SHORT)))


def test_expected_tokens_are_the_argmax_among_the_allowed() -> None:
    engine = GuidedEngine()
    settled, tokens = settle(engine, spec(ODD), mix(spec(ODD)))
    assert (settled.guided_by, settled.sampling.guide) == (None, ODD)
    text = [*settled.prompt]
    for token in tokens:
        logits = logits_after(text)
        assert token == max((1, 3, 5), key=logits.__getitem__)
        text.append(token)


def test_guided_request_ends_before_a_near_tie() -> None:
    class Ties(GuidedEngine):
        def logits(self, tokens: Sequence[int], mix: RequestMix) -> list[float]:
            tied = [1.0] * self.vocabulary
            return tied if len(tokens) > 3 else super().logits(tokens, mix)

    settled, tokens = settle(Ties(), spec(ODD), mix(spec(ODD)))
    assert (settled.sampling.max_new_tokens, len(tokens)) == (2, 2)


def test_guided_request_has_nothing_that_a_guide_excludes() -> None:
    sampled = Sampling(3, temperature=3.0, logprobs=True, top_logprobs=4)
    drawn = RequestSpec((1,), sampled, guided_by=ODD, ends_early=True, stop_spans=((0, 1),))
    guided = restrict_to_guide(GuidedEngine, drawn)
    assert guided == RequestSpec((1,), Sampling(3, ignore_eos=True), guided_by=ODD)
    assert restrict_to_guide(DrawingEngine, drawn).guided_by is None


def test_guides_are_described() -> None:
    assert spec(ODD).describe().endswith(f"guided by '{ODD}'")


def test_conditions_need_guides() -> None:
    assert "guided_restarted" in required_conditions(GuidedEngine)
    assert "guided" not in required_conditions(DrawingEngine)


@pytest.mark.parametrize(
    "wrong",
    [{"allowed_tokens": DrawingEngine.allowed_tokens}, {"guides": ()}],
)
def test_half_of_a_guide_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must define both guides and allowed_tokens, or neither"):
        conformance(type("Mine", (GuidedEngine,), wrong))


def test_some_mixes_are_guided() -> None:
    guided: list[bool] = []

    @hypothesis_settings(
        max_examples=150,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(request_mixes(GuidedEngine))
    def draw(mix: RequestMix) -> None:
        guided.append(any(each.guided_by for each in mix.requests))

    draw()
    assert 5 <= sum(guided) <= 50
