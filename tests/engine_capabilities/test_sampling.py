"""Sampling and text: tokens must be allowed by their parameters, and text must match the tokens."""

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
from roseinfer import SamplingParams
from roseinfer.sampling import SamplingBatch
from tests.engine_capabilities.engines.drawing_engine import (
    AppliesMinPWithoutTemperature,
    CountsThePrompt,
    DrawingEngine,
    IgnoresLongStopStrings,
    IgnoresTopK,
    LosesPendingText,
    OmitsTheSecondTopToken,
    RepeatsATopToken,
    ReplacesStreamedText,
    ReturnsLogprobsOfScaledLogits,
    ShiftsPromptLogprobsByAToken,
    ShiftsTopLogprobsOfDraws,
    StreamsPartsOfCharacters,
    StreamsTheStartOfAStopString,
)

NOT_ALLOWED = r"request \d, token \d+: \d, which its parameters rule out: they allow \[.*\]"
AFTER_THE_END = r"request \d, token \d+: \d; alone it has ended by then, by its stop string '.*'"
WRONG_TEXT = r"request \d shows '.*'; its tokens decode to '.*'"
WRONG_TOP = r"request \d, token \d+: top logprobs are of .*; by the model .*"
MANY_TOP = r"request \d, token \d+: top logprobs are of .*; they must be of \d+ different tokens"
REASONS: dict[type[EngineAdapter], str] = {
    IgnoresTopK: NOT_ALLOWED,
    AppliesMinPWithoutTemperature: NOT_ALLOWED,
    CountsThePrompt: NOT_ALLOWED,
    ReturnsLogprobsOfScaledLogits: r"request \d, token \d+: log-probability -.*; by the model it "
    r"is -.*"
    r"|request \d: token \d+ of its prompt: log-probability .*",
    RepeatsATopToken: MANY_TOP,
    OmitsTheSecondTopToken: WRONG_TOP + "|" + MANY_TOP,
    ShiftsTopLogprobsOfDraws: r"request \d, token \d+: top log-probability of \d -.*; by .*",
    ShiftsPromptLogprobsByAToken: r"request \d: token \d+ of its prompt: log-probability -.*",
    LosesPendingText: WRONG_TEXT,
    StreamsTheStartOfAStopString: WRONG_TEXT,
    StreamsPartsOfCharacters: WRONG_TEXT,
    IgnoresLongStopStrings: AFTER_THE_END + "|" + WRONG_TEXT,
    ReplacesStreamedText: r"request \d had shown the pieces \[.*\], and now \[.*\]",
}


def search(adapter: type[EngineAdapter], seed: int = 1) -> None:
    """Serve drawn mixes until one fails, without shrinking it."""

    @hypothesis_seed(seed)
    @hypothesis_settings(
        max_examples=160,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(request_mixes(adapter))
    def serve(mix: RequestMix) -> None:
        run_mix(adapter, mix)

    serve()


def test_right_drawing_engine_passes() -> None:
    search(DrawingEngine)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("adapter", REASONS, ids=lambda adapter: adapter.__name__)
def test_broken_drawing_engine_fails(adapter: type[EngineAdapter], seed: int) -> None:
    with pytest.raises(MixDivergence) as caught:
        search(adapter, seed)
    assert re.fullmatch(REASONS[adapter], caught.value.summary)


# ------------------------------------------------------------------------- the twin of sampling


LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625]))


def allowed_tokens(sampling: Sampling, *tokens: int, prompt_length: int = 0) -> list[int]:
    return np.flatnonzero(may_be_chosen(LOGITS, sampling, tokens, prompt_length, 1e-6)).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
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
def test_sampling_parameters_limit_the_next_token(sampling: Sampling, expected: list[int]) -> None:
    assert allowed_tokens(sampling) == expected


def test_repetition_penalty_covers_all_tokens_before() -> None:
    assert allowed_tokens(Sampling(repetition_penalty=3.0), 0) == [1]


def test_presence_and_frequency_penalties_exclude_the_prompt() -> None:
    """The penalties do not count the prompt's tokens, and frequency counts each occurrence."""
    logit_gap = float(LOGITS[0] - LOGITS[1])
    presence = Sampling(presence_penalty=1.5 * logit_gap)
    assert [allowed_tokens(presence, 0, 0, prompt_length=own) for own in (2, 1)] == [[0], [1]]
    frequency = Sampling(frequency_penalty=0.6 * logit_gap)
    assert [allowed_tokens(frequency, 0, 0, prompt_length=own) for own in (2, 1, 0)] == [
        [0],
        [0],
        [1],
    ]


def test_tied_tokens_are_all_allowed() -> None:
    logits = np.array([1.0, 2.0, 2.0, 1.99999])
    assert may_be_chosen(logits, Sampling(), [0], 1, 1e-9).tolist() == [False, True, True, False]
    assert may_be_chosen(logits, Sampling(), [0], 1, 1e-5).tolist() == [False, True, True, True]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
@pytest.mark.parametrize("penalties", [(1.0, 0.0, 0.0), (1.5, 0.0, 0.0), (1.5, -1.0, 0.5)])
def test_engine_distribution_equals_that_of_the_twin(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalties: tuple[float, float, float],
) -> None:
    repetition, presence, frequency = penalties
    penalties_and_min_p: dict[str, Any] = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "min_p": min_p,
    }
    sampling = Sampling(1, temperature, top_k, top_p, repetition, **penalties_and_min_p)
    params = SamplingParams(
        temperature, top_k, top_p, repetition_penalty=repetition, **penalties_and_min_p
    )
    batch = SamplingBatch.of([params], [0], "cpu")
    tally = torch.zeros(1, 20, dtype=torch.int32)
    tally[0, [3, 4]] = torch.tensor([1 << 30, (1 << 30) + 2], dtype=torch.int32)
    for seed in range(5):
        logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(seed)) * 3
        engine_probabilities = batch.probabilities(logits, tally)[0].double().numpy()
        twin_logprobs = distribution(logits[0].double().numpy(), sampling, [3, 4, 4, 4], 2)
        np.testing.assert_allclose(np.exp(twin_logprobs), engine_probabilities, atol=1e-6)


# ------------------------------------------------------------------------------- the twin of text


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
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
def test_text_ends_before_its_stop_string(text: str, stops: list[str], expected: str) -> None:
    assert cut_text(text, stops) == expected
    assert (find_stop(text, stops) is None) == (expected == text)


def test_stop_spans_become_stop_strings_of_the_text() -> None:
    spec = RequestSpec((1,), stop_spans=((1, 2), (4, 2), (3, 5), (0, 9)))
    assert stop_strings(spec, "abcd") == ("bc", "ab", "d\0", "abcd\0")
    assert stop_strings(spec, "ab\N{REPLACEMENT CHARACTER}d")[0] == "ab"


def test_tokens_end_with_the_one_that_completes_a_stop_string() -> None:
    texts = ("a", "bc", "d", "e")

    def decoded(tokens: Any) -> str:
        return "".join(texts[token] for token in tokens)

    assert cut_tokens([0, 1, 2, 3], ["cd"], decoded) == [0, 1, 2]
    assert cut_tokens([0, 1, 2, 3], ["x"], decoded) == [0, 1, 2, 3]
    assert cut_tokens([0, 1, 2, 3], [], decoded) == [0, 1, 2, 3]


@pytest.mark.parametrize("byte_level", [True, False])
def test_tokens_of_the_tiny_models_have_distinct_texts(byte_level: bool) -> None:
    model_tokenizer = tokenizer(byte_level=byte_level)
    texts = model_tokenizer.convert_ids_to_tokens(list(range(len(model_tokenizer))))
    assert len({*texts}) == len(texts) == 32


# --------------------------------------------------------------------------------- request specs


def test_early_end_is_settled_by_the_next_suitable_seed() -> None:
    adapter = DrawingEngine()
    spec = RequestSpec((1, 2), Sampling(12, temperature=3.0), ends_early=True)
    settled, expected = settle(adapter, spec, RequestMix((spec,)))
    sampling = settled.sampling
    assert 1 < len(expected) < 12
    assert expected == adapter.generate_alone((1, 2), sampling, RequestMix((spec,)))
    for seed in range(sampling.seed):
        before = adapter.generate_alone((1, 2), replace(sampling, seed=seed), RequestMix((spec,)))
        assert len(before) in (1, 12)


def test_reference_completion_is_computed_without_stop_strings() -> None:
    stops: list[object] = []

    class RecordingStops(DrawingEngine):
        def generate_alone(self, prompt: Any, sampling: Any, mix: RequestMix) -> list[int]:
            stops.append(sampling.stop)
            return super().generate_alone(prompt, sampling, mix)

    spec = RequestSpec((1, 3), Sampling(6, temperature=3.0, seed=1), stop_spans=((0, 1),))
    settled, expected = settle(RecordingStops(), spec, RequestMix((spec,)))
    assert stops == [()]
    assert DrawingEngine().decode(expected).endswith(settled.sampling.stop)


def test_request_spec_is_saved_and_described() -> None:
    sampling = Sampling(3, 1.0, min_p=0.4, logprobs=True, presence_penalty=0.25)
    mix = RequestMix(
        (RequestSpec((1,), sampling, stop_spans=((1, 2),), ends_early=True), RequestSpec((1,)))
    )
    assert RequestMix.from_json(json.loads(json.dumps(mix.to_json()))) == mix
    for text in (
        "min_p 0.4",
        "with logprobs",
        "presence penalty 0.25",
        "stopped by 2 characters",
        "seed that ends",
    ):
        assert text in mix.describe()


@pytest.mark.parametrize("field", [each.name for each in fields(Sampling)])
def test_every_sampling_field_is_described(field: str) -> None:
    others: dict[str, Any] = {"stop": ("a\0",), "repetition_penalty": 1.5, "top_p": 0.25}
    plain = Sampling(3, temperature=1.0, top_logprobs=2)
    spec = replace(plain, **{field: others.get(field, 7)})
    assert RequestSpec((1,), spec).describe() != RequestSpec((1,), plain).describe()
    assert "\0" not in RequestSpec((1,), spec).describe()


class ChangesTheFirstToken(DrawingEngine):
    """Changes the first token of every request to its neighbour."""

    def take(self, request: Any, token: int) -> None:
        super().take(request, token ^ (not request.tokens))


def test_failure_names_the_settled_seed_and_stop_string() -> None:
    spec = RequestSpec(
        (1, 3), Sampling(12, temperature=3.0, top_k=5), stop_spans=((1, 2),), ends_early=True
    )
    later = replace(spec, arrival=9)
    requests_mix = RequestMix((spec, later), options={"batch": 1})
    sampling = settle(DrawingEngine(), spec, requests_mix)[0].sampling
    with pytest.raises(MixDivergence) as caught:
        run_mix(ChangesTheFirstToken, requests_mix)
    first, second = str(caught.value).splitlines()[3:5]
    assert f"temperature 3.0 from seed {sampling.seed}, top_k 5" in first
    assert sampling.seed > 0
    assert first.endswith(f"stopped by {sampling.stop[0]!r}")
    # The other request was not settled when the first failed.
    assert "with the next seed that ends the text early" in second
    assert caught.value.mix is requests_mix
    mix = timeline_of(ChangesTheFirstToken, requests_mix)["requests"]
    assert [f"  {at}. {line['description']}" for at, line in enumerate(mix)] == [first, second]


def test_saved_mix_without_later_fields_is_loaded() -> None:
    data = RequestMix((RequestSpec((1,), Sampling(3)),)).to_json()
    for field in ("stop_spans", "ends_early"):
        del data["requests"][0][field]
    assert RequestMix.from_json(data).requests == (RequestSpec((1,), Sampling(3)),)


def test_adapter_is_used_for_offered_methods_only() -> None:
    class WithoutExtras(DrawingEngine):
        sampling = SamplingTraits()
        logprobs = EngineAdapter.logprobs
        top_logprobs = EngineAdapter.top_logprobs
        prompt_logprobs = EngineAdapter.prompt_logprobs
        pieces = EngineAdapter.pieces

        def submit(self, prompt: Any, sampling: Sampling) -> Any:
            assert type(sampling) is Sampling
            return super().submit(prompt, sampling)

    assert run_mix(
        WithoutExtras,
        RequestMix((RequestSpec((1,), stop_spans=((0, 1),)),), options={"batch": 1}),
    ) == {"ended_by_length_at_first_token": 1}


def test_pieces_need_the_method_decode() -> None:
    class PiecesWithoutDecode(DrawingEngine):
        decode = EngineAdapter.decode

    with pytest.raises(
        TypeError, match="PiecesWithoutDecode defines pieces and must then define d"
    ):
        conformance(PiecesWithoutDecode)
