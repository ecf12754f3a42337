"""Tokens are held to what their parameters allow, and texts to what the tokens say."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given
from hypothesis import seed as hypothesis_seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import (
    EngineAdapter,
    MixDivergence,
    RequestMix,
    RequestSpec,
    Sampling,
    SamplingTraits,
    conformance,
    run_mix,
)
from pytest_roseinfer.engine_capabilities.sampling import distribution, may_be_chosen
from pytest_roseinfer.engine_capabilities.text import cut_text, cut_tokens, find_stop, stop_strings
from pytest_roseinfer.engines.run import settle, timeline_of
from pytest_roseinfer.engines.strategies import request_mixes
from pytest_roseinfer.targets.engine_models import tokenizer
from roseinfer import SamplingBatch, SamplingParams
from tests.engine_capabilities.engines.drawing_engine import (
    CountsThePrompt,
    DrawingEngine,
    GoesOnBehindItsStopString,
    IgnoresTopK,
    LeavesTheSecondLikeliestOut,
    LosesWhatItHeldBack,
    ShowsHowAStopStringBegins,
    ShowsPartsOfCharacters,
    TakesMinPOfAll,
    TakesTextBack,
    TellsLogprobsOfItsDraws,
    TellsOfPromptsATokenLate,
    TellsOfTheLikeliestInItsDraws,
    TellsOneOfTheLikeliestTwice,
)

RULED_OUT = r"request \d, token \d+: \d, which its parameters rule out: they allow \[.*\]"
ENDED_BY_THEN = r"request \d, token \d+: \d; alone it has ended by then"
WRONG_TEXT = r"request \d shows '.*'; its tokens decode to '.*'"
WRONG_TOP = r"request \d, token \d+: top logprobs are of .*; by the model .*"
MANY_TOP = r"request \d, token \d+: top logprobs are of .*; they must be of \d+ different tokens"
REASONS: dict[type[EngineAdapter], str] = {
    IgnoresTopK: RULED_OUT,
    TakesMinPOfAll: RULED_OUT,
    CountsThePrompt: RULED_OUT,
    TellsLogprobsOfItsDraws: r"request \d, token \d+: log-probability -.*; by the model it is -.*"
    r"|request \d: token \d+ of its prompt: log-probability .*",
    TellsOneOfTheLikeliestTwice: MANY_TOP,
    LeavesTheSecondLikeliestOut: WRONG_TOP + "|" + MANY_TOP,
    TellsOfTheLikeliestInItsDraws: r"request \d, token \d+: top log-probability of \d -.*; by .*",
    TellsOfPromptsATokenLate: r"request \d: token \d+ of its prompt: log-probability -.*",
    LosesWhatItHeldBack: WRONG_TEXT,
    ShowsHowAStopStringBegins: WRONG_TEXT,
    ShowsPartsOfCharacters: WRONG_TEXT,
    GoesOnBehindItsStopString: ENDED_BY_THEN + "|" + WRONG_TEXT,
    TakesTextBack: r"request \d had shown the pieces \[.*\], and now \[.*\]",
}


def search(adapter: type[EngineAdapter], seed: int = 1) -> None:
    """Serve mixes until one fails, as a search does, which would make it smaller then."""

    @hypothesis_seed(seed)
    @hypothesis_settings(
        max_examples=80,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(request_mixes(adapter))
    def serve(drawn: RequestMix) -> None:
        run_mix(adapter, drawn)

    serve()


def test_an_engine_that_draws_and_writes_right_passes() -> None:
    search(DrawingEngine)


@pytest.mark.many_alike
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("adapter", REASONS, ids=lambda adapter: adapter.__name__)
def test_one_that_does_not_is_found(adapter: type[EngineAdapter], seed: int) -> None:
    with pytest.raises(MixDivergence) as caught:
        search(adapter, seed)
    assert re.fullmatch(REASONS[adapter], caught.value.what)


# ------------------------------------------------------------------------- the twin of sampling


LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625]))


def allowed(sampling: Sampling, *tokens: int, prompted: int = 0) -> list[int]:
    return np.flatnonzero(may_be_chosen(LOGITS, sampling, tokens, prompted, 1e-6)).tolist()


@pytest.mark.parametrize(
    ("sampling", "right"),
    [
        (Sampling(), [0]),
        (Sampling(temperature=1.0), [0, 1, 2, 3, 4]),
        (Sampling(temperature=1.0, top_k=2), [0, 1]),
        (Sampling(temperature=1.0, top_k=4), [0, 1, 2, 3, 4]),  # the last two tie
        (Sampling(temperature=1.0, top_k=99), [0, 1, 2, 3, 4]),
        (Sampling(temperature=1.0, top_p=0.4), [0]),
        (Sampling(temperature=1.0, top_p=0.7), [0, 1]),
        (Sampling(temperature=1.0, top_p=0.75), [0, 1, 2]),  # the sum is on the edge
        (Sampling(temperature=1.0, top_k=2, top_p=0.7), [0, 1]),
        (Sampling(temperature=1.0, top_k=2, top_p=0.6), [0]),
        (Sampling(temperature=1.0, min_p=0.3), [0, 1]),
        (Sampling(temperature=0.5, min_p=0.3), [0]),
        (Sampling(temperature=1.0, min_p=1.0), [0]),
    ],
    ids=str,
)
def test_which_tokens_may_come_next(sampling: Sampling, right: list[int]) -> None:
    assert allowed(sampling) == right


def test_a_penalty_is_for_all_tokens_before() -> None:
    assert allowed(Sampling(repetition_penalty=3.0), 0) == [1]


def test_presence_and_frequency_are_those_of_the_text_alone() -> None:
    """The prompt's tokens are as likely as ever, and a token counts as often as it stands there."""
    apart = float(LOGITS[0] - LOGITS[1])
    presence = Sampling(presence_penalty=1.5 * apart)
    assert [allowed(presence, 0, 0, prompted=own) for own in (2, 1)] == [[0], [1]]
    frequency = Sampling(frequency_penalty=0.6 * apart)
    assert [allowed(frequency, 0, 0, prompted=own) for own in (2, 1, 0)] == [[0], [0], [1]]


def test_of_tokens_that_tie_each_may_be_chosen() -> None:
    tied = np.array([1.0, 2.0, 2.0, 1.99999])
    assert may_be_chosen(tied, Sampling(), [0], 1, 1e-9).tolist() == [False, True, True, False]
    assert may_be_chosen(tied, Sampling(), [0], 1, 1e-5).tolist() == [False, True, True, True]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
@pytest.mark.parametrize("penalties", [(1.0, 0.0, 0.0), (1.5, 0.0, 0.0), (1.5, -1.0, 0.5)])
def test_the_engine_draws_from_the_distribution_of_its_twin(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalties: tuple[float, float, float],
) -> None:
    repetition, presence, frequency = penalties
    given: dict[str, Any] = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "min_p": min_p,
    }
    sampling = Sampling(1, temperature, top_k, top_p, repetition, **given)
    params = SamplingParams(temperature, top_k, top_p, repetition_penalty=repetition, **given)
    batch = SamplingBatch.of([params], [0], "cpu")
    tally = torch.zeros(1, 20, dtype=torch.int32)
    tally[0, [3, 4]] = torch.tensor([1 << 30, (1 << 30) + 2], dtype=torch.int32)
    for seed in range(5):
        logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(seed)) * 3
        ours = batch.probabilities(logits, tally)[0].double().numpy()
        twins = distribution(logits[0].double().numpy(), sampling, [3, 4, 4, 4], 2)
        np.testing.assert_allclose(np.exp(twins), ours, atol=1e-6)


# ------------------------------------------------------------------------------- the twin of text


@pytest.mark.parametrize(
    ("text", "stops", "right"),
    [
        ("abc", [], "abc"),
        ("abcabc", ["ca"], "ab"),
        ("abcabc", ["bca", "ab"], ""),
        ("abcd", ["c", "bc"], "a"),  # both are complete at once: the longest counts
        ("abcd", ["abcd", "b"], "a"),  # b is complete first
        ("aab", ["ab"], "a"),
        ("abc", ["abcd"], "abc"),
    ],
)
def test_what_is_shown_of_a_text(text: str, stops: list[str], right: str) -> None:
    assert cut_text(text, stops) == right
    assert (find_stop(text, stops) is None) == (right == text)


def test_a_stop_string_is_a_part_of_the_text_or_begins_like_it() -> None:
    asked = RequestSpec((1,), stop_spans=((1, 2), (4, 2), (3, 5), (0, 9)))
    assert stop_strings(asked, "abcd") == ("bc", "ab", "d\0", "abcd\0")
    assert stop_strings(asked, "ab\N{REPLACEMENT CHARACTER}d")[0] == "ab"


def test_tokens_go_up_to_the_one_that_completes_a_stop_string() -> None:
    texts = ("a", "bc", "d", "e")

    def decoded(tokens: Any) -> str:
        return "".join(texts[token] for token in tokens)

    assert cut_tokens([0, 1, 2, 3], ["cd"], decoded) == [0, 1, 2]
    assert cut_tokens([0, 1, 2, 3], ["x"], decoded) == [0, 1, 2, 3]
    assert cut_tokens([0, 1, 2, 3], [], decoded) == [0, 1, 2, 3]


@pytest.mark.parametrize("byte_level", [True, False])
def test_every_token_of_the_models_has_its_own_text(byte_level: bool) -> None:
    made = tokenizer(byte_level=byte_level)
    written = made.convert_ids_to_tokens(list(range(len(made))))
    assert len({*written}) == len(written) == 32


# --------------------------------------------------------------------------------- what is asked


def test_a_request_ends_early_by_the_next_seed_with_which_it_does() -> None:
    adapter = DrawingEngine()
    asked = RequestSpec((1, 2), Sampling(12, temperature=3.0), ends_early=True)
    settled, expected = settle(adapter, asked, RequestMix((asked,)))
    sampling = settled.sampling
    assert 1 < len(expected) < 12
    assert expected == adapter.generate_alone((1, 2), sampling, RequestMix((asked,)))
    for seed in range(sampling.seed):
        before = adapter.generate_alone((1, 2), replace(sampling, seed=seed), RequestMix((asked,)))
        assert len(before) in (1, 12)


def test_what_a_request_gets_alone_goes_on_behind_its_stop_string() -> None:
    stops: list[object] = []

    class Watched(DrawingEngine):
        def generate_alone(self, prompt: Any, sampling: Any, mix: RequestMix) -> list[int]:
            stops.append(sampling.stop)
            return super().generate_alone(prompt, sampling, mix)

    asked = RequestSpec((1, 3), Sampling(6, temperature=3.0, seed=1), stop_spans=((0, 1),))
    settled, expected = settle(Watched(), asked, RequestMix((asked,)))
    assert stops == [()]
    assert DrawingEngine().decode(expected).endswith(settled.sampling.stop)


def test_what_is_asked_survives_being_saved_and_is_told_in_words() -> None:
    sampling = Sampling(3, 1.0, min_p=0.4, logprobs=True, presence_penalty=0.25)
    mix = RequestMix(
        (RequestSpec((1,), sampling, stop_spans=((1, 2),), ends_early=True), RequestSpec((1,)))
    )
    assert RequestMix.from_json(json.loads(json.dumps(mix.to_json()))) == mix
    for words in (
        "min_p 0.4",
        "with logprobs",
        "presence penalty 0.25",
        "stopped by 2 characters",
        "seed that ends",
    ):
        assert words in mix.describe()


@pytest.mark.parametrize("field", [each.name for each in fields(Sampling)])
def test_whatever_a_request_asks_for_is_told(field: str) -> None:
    others: dict[str, Any] = {"stop": ("a\0",), "repetition_penalty": 1.5, "top_p": 0.25}
    plain = Sampling(3, temperature=1.0, top_logprobs=2)
    asked = replace(plain, **{field: others.get(field, 7)})
    assert RequestSpec((1,), asked).describe() != RequestSpec((1,), plain).describe()
    assert "\0" not in RequestSpec((1,), asked).describe()


class TakesAnotherFirst(DrawingEngine):
    """The first token of every request comes out as the one beside the right one."""

    def take(self, request: Any, token: int) -> None:
        super().take(request, token ^ (not request.tokens))


def test_a_failure_tells_the_seed_and_the_stop_string_that_were_used() -> None:
    asked = RequestSpec(
        (1, 3), Sampling(12, temperature=3.0, top_k=5), stop_spans=((1, 2),), ends_early=True
    )
    later = replace(asked, arrival=9)
    mix = RequestMix((asked, later), options={"batch": 1})
    sampling = settle(DrawingEngine(), asked, mix)[0].sampling
    with pytest.raises(MixDivergence) as caught:
        run_mix(TakesAnotherFirst, mix)
    first, second = str(caught.value).splitlines()[3:5]
    assert f"temperature 3.0 from seed {sampling.seed}, top_k 5" in first
    assert sampling.seed > 0
    assert first.endswith(f"stopped by {sampling.stop[0]!r}")
    # Of the other nothing was settled when the first had failed.
    assert "with the next seed that ends the text early" in second
    assert caught.value.mix is mix
    drawn = timeline_of(TakesAnotherFirst, mix)["requests"]
    assert [f"  {at}. {line['words']}" for at, line in enumerate(drawn)] == [first, second]


def test_a_trace_from_before_is_read() -> None:
    data = RequestMix((RequestSpec((1,), Sampling(3)),)).to_json()
    for field in ("stop_spans", "ends_early"):
        del data["requests"][0][field]
    assert RequestMix.from_json(data).requests == (RequestSpec((1,), Sampling(3)),)


def test_an_adapter_is_asked_for_no_more_than_it_offers() -> None:
    class Plain(DrawingEngine):
        sampling = SamplingTraits()
        logprobs = EngineAdapter.logprobs
        top_logprobs = EngineAdapter.top_logprobs
        prompt_logprobs = EngineAdapter.prompt_logprobs
        pieces = EngineAdapter.pieces

        def submit(self, prompt: Any, sampling: Sampling) -> Any:
            assert type(sampling) is Sampling
            return super().submit(prompt, sampling)

    assert (
        run_mix(Plain, RequestMix((RequestSpec((1,), stop_spans=((0, 1),)),), options={"batch": 1}))
        == {}
    )


def test_what_says_what_is_right_must_be_there() -> None:
    class Half(DrawingEngine):
        decode = EngineAdapter.decode

    with pytest.raises(TypeError, match="Half defines pieces and must then define decode too"):
        conformance(Half)
