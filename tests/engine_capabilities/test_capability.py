"""An engine capability defined by a user: one mixin, its fields and one object.

``logit_bias`` is such a capability, whole in this file: numbers that are added to logits.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pytest_roseinfer import (
    EngineAdapter,
    MixDivergence,
    RequestMix,
    RequestSpec,
    Sampling,
    run_mix,
)
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.capabilities.return_values import are_tokens, returns
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixObserver,
    RequestCore,
    SamplingCore,
    change,
    for_adapter,
)
from pytest_roseinfer.engines.strategies import request_mixes
from pytest_roseinfer.plugin import reference
from pytest_roseinfer.search.shrink import Shrinker, passes_of_mixes
from tests.engine_capabilities.engines.drawing_engine import DrawingEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hypothesis.strategies import DrawFn

    from pytest_roseinfer.engine_capabilities.capability import Floats, ServedRequest


# Biases: two fields, a method, a draw, a description, their effect on logits, and an observer.


@dataclass(frozen=True)
class BiasFields(SamplingCore):
    """The biases of a request."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and a number that is added to its logit."""


@dataclass(frozen=True, kw_only=True)
class BanFields(RequestCore):
    """The token that a request must never get."""

    banned: int | None = None
    """Token whose logit is as low as a bias makes it; None for no such token."""


class BiasMethods:
    """The method that shows biases."""

    max_biases: ClassVar[int] = 2
    """Most biases of a request."""

    @optional
    @returns(are_tokens, "a list of tokens")
    def biased_tokens(self, request: Any) -> Sequence[int]:
        """Return the tokens of a request that have a bias."""


def draw_biases(draw: DrawFn, adapter: type[Any], spec: Any) -> Any:
    tokens = st.integers(0, adapter.vocabulary - 1)
    biases = st.lists(st.tuples(tokens, st.sampled_from((-4.0, 4.0))), max_size=adapter.max_biases)
    return change(spec, logit_bias=tuple(draw(biases)), banned=draw(st.one_of(st.none(), tokens)))


def describe(spec: Any) -> Iterator[str]:
    for token, bias in spec.sampling.logit_bias:
        yield f"bias {bias} of token {token}"
    if spec.banned is not None:
        yield f"never token {spec.banned}"


def settle_ban(adapter: Any, spec: Any, expected: list[int], mix: Any) -> tuple[Any, list[int]]:
    if spec.banned is not None:
        biases = (*spec.sampling.logit_bias, (spec.banned, -100.0))
        spec = change(spec, logit_bias=biases, banned=None)
        expected = adapter.generate_alone(spec.prompt, spec.sampling, mix)
    return spec, expected


def add_biases(logits: Floats, sampling: Any, tokens: Sequence[int], prompt_length: int) -> Floats:  # noqa: ARG001
    logits = logits.copy()
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    return logits


class BiasedTokens(MixObserver):
    any_of = ("biased_tokens",)

    def judge(self, served: ServedRequest) -> str:
        biased = [*self.run.adapter.biased_tokens(served.request)]
        expected = [token for token, _ in served.spec.sampling.logit_bias]
        return (
            "" if biased == expected else f"{served.name} has biases of {biased}, not of {expected}"
        )


BIASES = EngineCapability(
    methods=BiasMethods,
    renamed={"biased": "biased_tokens(request)"},
    needs={"biased_tokens": ("logits",)},
    fields=(BiasFields, BanFields),
    draw=draw_biases,
    describe=describe,
    settle=settle_ban,
    adjust=add_biases,
    observers=(BiasedTokens,),
)


class BiasedEngine(BiasMethods, DrawingEngine):
    """An engine that adds biases."""

    def adjust(self, logits: list[float], sampling: Any) -> list[float]:
        return [*add_biases(np.array(logits), sampling, (), 0)]

    def biased_tokens(self, request: Any) -> list[int]:
        return [token for token, _ in request.sampling.logit_bias]


class AppliesOneBias(BiasedEngine):
    def step(self) -> None:
        for request in self.requests:
            biases = request.sampling.logit_bias[:1]
            request.sampling = replace(request.sampling, logit_bias=biases)
        super().step()

    def biased_tokens(self, request: Any) -> list[int]:
        return [token for token, _ in self.biases_of[request]]

    def submit(self, prompt: Sequence[int], sampling: Any) -> Any:
        request = super().submit(prompt, sampling)
        self.biases_of[request] = sampling.logit_bias
        return request

    def make(self, mix: RequestMix) -> None:
        super().make(mix)
        self.biases_of: dict[Any, Any] = {}


class ShowsOneBias(BiasedEngine):
    """Applies its biases, and does not show them all."""

    def biased_tokens(self, request: Any) -> list[int]:
        return super().biased_tokens(request)[:1]


def first_failure(adapter: type[BiasedEngine]) -> RequestMix:
    """Return the first drawn mix that fails."""
    failing: list[RequestMix] = []

    def record(mix: RequestMix) -> None:
        try:
            run_mix(adapter, mix)
        except MixDivergence:
            failing.append(mix)

    for_each_drawn(adapter, 60, record)
    return failing[0]


def for_each_drawn(
    adapter: type[EngineAdapter], examples: int, check: Callable[[RequestMix], object]
) -> None:
    @seed(1)
    @hypothesis_settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate]
    )
    @given(request_mixes(adapter))
    def attempt(mix: RequestMix) -> None:
        check(mix)

    attempt()


def test_requests_are_drawn_with_the_fields_of_a_capability() -> None:
    refuse_mistakes(BiasedEngine)
    requests: list[Any] = []

    def serve(mix: RequestMix) -> None:
        run_mix(BiasedEngine, mix)
        assert RequestMix.from_json(json.loads(json.dumps(mix.to_json()))) == mix
        requests.extend(mix.requests)

    for_each_drawn(BiasedEngine, 40, serve)
    assert any(each.sampling.logit_bias for each in requests)
    assert any(each.banned is not None for each in requests)
    banned = change(for_adapter(BiasedEngine, RequestSpec((1, 2), Sampling(8))), banned=3)
    assert ", never token 3" in banned.describe()


def test_other_adapters_have_no_fields_of_the_capability() -> None:
    def check(mix: RequestMix) -> None:
        assert all(type(each) is RequestSpec for each in mix.requests)
        assert all(type(each.sampling) is Sampling for each in mix.requests)

    for_each_drawn(DrawingEngine, 10, check)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        (AppliesOneBias, r"request 0, token 0: \d(; alone it gets \d|, which its .*)"),
        (ShowsOneBias, r"request 0 has biases of \[\d\], not of \[\d, \d\]"),
    ],
)
def test_broken_biases_fail_with_a_small_mix(adapter: type[BiasedEngine], problem: str) -> None:
    mix = first_failure(adapter)
    with pytest.raises(MixDivergence) as first:
        run_mix(adapter, mix)
    small = Shrinker(mix, first.value, partial(run_mix, adapter))
    small.shrink(passes_of_mixes(adapter))
    assert isinstance(small.failure, MixDivergence)
    assert re.fullmatch(problem, small.failure.summary)
    requests: tuple[Any, ...] = small.example.requests
    (spec,) = requests
    assert len(spec.sampling.logit_bias) + (spec.banned is not None) == 2
    # A bias that does not change the argmax needs a temperature, and perhaps a seed.
    assert replace(spec.sampling, logit_bias=(), temperature=0.0, seed=0) == type(spec.sampling)()
    assert str(small.failure).count(" of token ") == 2


def test_return_values_names_and_needs_of_a_capability_are_checked() -> None:
    class Wrong(BiasedEngine):
        def biased_tokens(self, request: Any) -> Any:  # noqa: ARG002
            return None

    mix = RequestMix((RequestSpec((1,)),), options={"batch": 1})
    with pytest.raises(MixDivergence, match=r"biased_tokens\(request\) returned None: return a"):
        run_mix(Wrong, mix)
    for attributes, problem in (
        ({"biased": None}, r"Mine.biased was renamed: write biased_tokens\(request\)"),
        ({"biased_token": describe}, "Mine has biased_token, .* did you mean biased_tokens"),
        (
            {"logits": EngineAdapter.logits},
            "defines logprobs and must then define logits",
        ),
    ):
        with pytest.raises(TypeError, match=problem):
            refuse_mistakes(type("Mine", (BiasMethods, DrawingEngine), attributes))


def test_reference_includes_the_capability() -> None:
    lists = reference.sections(BiasedEngine)
    assert "- `logit_bias` (default `()`): Pairs of a token and" in lists["engine parameters"]
    assert "- `banned` (default `None`): Token whose logit" in lists["engine requests"]
    assert "- `biased_tokens(request)` (needs `logits`): Return" in lists["engine methods"]
    assert "- `max_biases` (default `2`): Most biases" in lists["engine attributes"]
    assert "logit_bias" not in "".join(reference.sections(DrawingEngine).values())
