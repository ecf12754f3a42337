"""Sampling: tokens are drawn from exactly the distribution that the parameters describe."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from roseinfer import ConfigError
from roseinfer import sampling as noise_module
from roseinfer.errors import short_repr
from roseinfer.sampling import (
    IN_PROMPT,
    SamplingBatch,
    apply_token_bitmask,
    count_prompt_and_output,
    gumbel_noise,
    log_probabilities,
    pack_logprobs,
    rows_without_a_distribution,
    top_token_ids,
    unpack_logprobs,
)
from roseinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 50


def batch(device: str, *params: SamplingParams, seeds: list[int] | None = None) -> SamplingBatch:
    return SamplingBatch.of(params, seeds or list(range(len(params))), device)


def some_logits(device: str, rows: int = 1, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, VOCABULARY, device=device) * 3


def at(device: str, *positions: int) -> torch.Tensor:
    return torch.tensor(positions, device=device)


def transformers_distribution(
    logits: torch.Tensor, params: SamplingParams, previous_tokens: list[int]
) -> torch.Tensor:
    """Return the distribution after transformers' own processors, in their order."""
    steps: list[Any] = []
    if params.repetition_penalty != 1:
        steps.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(transformers.MinPLogitsWarper(params.min_p))
    ids = torch.tensor([previous_tokens], device=logits.device)
    for step in steps:
        logits = step(ids, logits)
    return logits.softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1.0),
        SamplingParams(temperature=0.3),
        SamplingParams(1.0, top_k=1),
        SamplingParams(1.0, top_k=7),
        SamplingParams(1.0, top_p=0.5),
        SamplingParams(1.0, top_p=0.01),
        SamplingParams(1.0, min_p=0.2),
        SamplingParams(1.0, repetition_penalty=1.7),
        SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    ],
    ids=str,
)
def test_distribution_matches_transformers(device: str, params: SamplingParams) -> None:
    prompt_ids = [3, 4, 4, 9]
    counts = torch.zeros(1, VOCABULARY, dtype=torch.int32, device=device)
    counts[0, prompt_ids] = IN_PROMPT
    for seed in range(20):
        logits = some_logits(device, seed=seed)
        actual = batch(device, params).probabilities(logits, counts)
        expected = transformers_distribution(logits.clone(), params, prompt_ids)
        assert torch.equal(actual > 0, expected > 0)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


def test_greedy_is_the_default(device: str) -> None:
    logits = some_logits(device, rows=4)
    chosen = batch(device, *[SamplingParams(top_k=5)] * 4).sample_tokens(
        logits, at(device, *range(4))
    )
    assert torch.equal(chosen, logits.argmax(-1))


def test_draws_follow_the_distribution(device: str) -> None:
    """For 20,000 positions of one request, each frequency is within five standard deviations."""
    draws = 20_000
    params = SamplingParams(temperature=0.9, top_k=12, top_p=0.95)
    logits = some_logits(device)
    probabilities = batch(device, params).probabilities(logits)[0]
    many = batch(device, *[params] * draws, seeds=[5] * draws)
    tokens = many.sample_tokens(logits.expand(draws, -1), torch.arange(draws, device=device))
    counts = torch.bincount(tokens, minlength=VOCABULARY).float()
    spread = (draws * probabilities * (1 - probabilities)).sqrt()
    assert ((counts - draws * probabilities).abs() <= 5 * spread + 1e-3).all()
    assert counts[probabilities == 0].sum() == 0


def test_sampled_tokens_are_the_same_alone_and_in_a_batch(device: str) -> None:
    params = [
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0),
        SamplingParams(1.0, top_p=0.7),
        SamplingParams(1.0, top_k=3, min_p=0.1),
    ]
    logits = some_logits(device, rows=4)
    seeds = [11, 12, 13, 14]
    for step in range(30):
        together = batch(device, *params, seeds=seeds).sample_tokens(
            logits, at(device, *[step] * 4)
        )
        for row in range(4):
            alone = batch(device, params[row], seeds=seeds[row : row + 1])
            assert alone.sample_tokens(logits[row : row + 1], at(device, step)) == together[row]
        backwards = batch(device, *params[::-1], seeds=seeds[::-1])
        reordered = backwards.sample_tokens(logits.flip(0), at(device, *[step] * 4))
        assert torch.equal(reordered.flip(0), together)


def cumsum_of_strips(width: int) -> Callable[..., torch.Tensor]:
    """Return a ``cumsum`` that adds strips first, as GPUs do.

    They choose the width of strips by the number of rows.
    """

    def cumsum(numbers: torch.Tensor, dim: int) -> torch.Tensor:
        strips = [REAL_CUMSUM(strip, dim) for strip in torch.split(numbers, width, dim)]
        for before, strip in pairwise(strips):
            strip += before[:, -1:]
        return torch.cat(strips, dim)

    return cumsum


REAL_CUMSUM = torch.Tensor.cumsum


def test_nucleus_is_independent_of_the_summation_order(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's nucleus ends at one of the sums, which any rounding could move."""
    rows, vocabulary = 64, 3000
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)).to(device)
    cumulative = logits.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    params = [SamplingParams(1.0, top_p=float(cumulative[row, 9 * row + 5])) for row in range(rows)]
    allowed_tokens = batch(device, *params)
    results = []
    for width in (vocabulary, 512, 64, 7):
        monkeypatch.setattr(torch.Tensor, "cumsum", cumsum_of_strips(width))
        results.append(allowed_tokens.probabilities(logits) > 0)
    for other in results[1:]:
        assert torch.equal(results[0], other)
    wide = range(5, 9 * rows + 5, 9)
    assert all(abs(int(n) - at) <= 3 for n, at in zip(results[0].sum(-1), wide, strict=True))


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "neighbour", [{}, {"repetition_penalty": 1.7}, {"presence_penalty": 0.3}], ids=str
)
def test_sampled_token_is_independent_of_other_rows(device: str, neighbour: dict[str, Any]) -> None:
    """At the edges of nuclei, with each number of rows and in each of them."""
    vocabulary = 2048
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(33, vocabulary, generator=generator) * 2).to(device)
    counts = torch.ones(33, vocabulary, dtype=torch.int32, device=device)
    params = SamplingParams(1.0, top_p=0.6, min_p=1e-3)
    alone = batch(device, params, seeds=[4])
    for row in range(0, 33, 4):
        (expected,) = alone.sample_tokens(logits[row : row + 1], at(device, 9)).tolist()
        others = [SamplingParams(0.9, top_p=0.8, **neighbour)] * 32
        for rows in (1, 2, 16, 32):
            with_others = batch(device, params, *others[:rows], seeds=[4, *range(rows)])
            reordered = logits.roll(-row, 0)[: rows + 1]
            positions = at(device, *[9] * (rows + 1))
            assert (
                with_others.sample_tokens(reordered, positions, counts[: rows + 1])[0] == expected
            )
            nucleus = with_others.probabilities(reordered, counts[: rows + 1])[0] > 0
            assert torch.equal(nucleus, alone.probabilities(logits[row : row + 1])[0] > 0)


def test_seeds_and_positions_change_the_token(device: str) -> None:
    logits = torch.zeros(64, VOCABULARY, device=device)
    same = [SamplingParams(1.0)] * 64
    by_seed = batch(device, *same, seeds=list(range(64))).sample_tokens(
        logits, at(device, *[3] * 64)
    )
    by_position = batch(device, *same, seeds=[1] * 64).sample_tokens(logits, at(device, *range(64)))
    assert len(set(by_seed.tolist())) > 20
    assert len(set(by_position.tolist())) > 20


def test_temperature_zero_is_greedy(device: str) -> None:
    logits = some_logits(device, rows=2)
    greedy = batch(device, *[SamplingParams(temperature=0)] * 2)
    assert torch.equal(greedy.sample_tokens(logits, at(device, 0, 0)), logits.argmax(-1))
    mixed = batch(device, SamplingParams(temperature=0), SamplingParams(1.0))
    assert mixed.sample_tokens(logits, at(device, 0, 0))[0] == logits[0].argmax()
    assert mixed.probabilities(logits)[0].max() == 1


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 2e-38, 1e-30, 1e-6])
@pytest.mark.parametrize("penalty", [1.0, 1.3, 1e-38, 3.4e38])
def test_tiny_temperature_is_greedy(device: str, temperature: float, penalty: float) -> None:
    """Neither a division by it nor one by the smallest penalty overflows."""
    logits = some_logits(device, rows=8)
    previous_tokens = torch.arange(VOCABULARY, device=device).expand(8, -1) % 3 == 0
    counts = previous_tokens.int() * IN_PROMPT
    cold, greedy = (
        batch(device, *[SamplingParams(each, repetition_penalty=penalty)] * 8)
        for each in (temperature, 0)
    )
    positions = at(device, *range(8))
    chosen = cold.sample_tokens(logits, positions, counts)
    assert torch.equal(chosen, greedy.sample_tokens(logits, positions, counts))
    assert torch.equal(cold.probabilities(logits, counts).argmax(-1), chosen)


def test_large_temperature_keeps_the_order(device: str) -> None:
    """However flat a distribution is, ``top_k`` keeps the top tokens."""
    logits = some_logits(device)
    hot = batch(device, SamplingParams(3.4e38, top_k=5)).probabilities(logits)
    assert set(hot[0].nonzero()[:, 0].tolist()) == set(logits[0].topk(5).indices.tolist())


def test_infinite_logit_is_sampled(device: str) -> None:
    logits = some_logits(device, rows=2)
    logits[:, 7] = float("inf")
    assert batch(device, *[SamplingParams(1.0)] * 2).sample_tokens(
        logits, at(device, 0, 1)
    ).tolist() == [
        7,
        7,
    ]


def test_penalty_of_another_row_changes_no_distribution(device: str) -> None:
    params = [SamplingParams(1.1, top_p=0.9), SamplingParams(0.7, repetition_penalty=1.4)]
    counts = torch.zeros(2, VOCABULARY, dtype=torch.int32, device=device)
    counts[1, ::2] = IN_PROMPT
    for seed in range(30):
        logits = some_logits(device, rows=2, seed=seed)
        with_others = batch(device, *params).probabilities(logits, counts)[0]
        assert torch.equal(batch(device, params[0]).probabilities(logits[:1])[0], with_others)


def test_penalty_applies_to_greedy_sampling(device: str) -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0]], device=device)
    counts = torch.tensor([[1, 0, 0]], dtype=torch.int32, device=device)
    with_penalty = batch(device, SamplingParams(temperature=0, repetition_penalty=2.0))
    assert with_penalty.sample_tokens(logits, at(device, 0), counts).tolist() == [1]


PENALISED_LOGITS: list[tuple[dict[str, Any], list[float]]] = [
    ({}, [1.0, -1.0, 2.0, -2.0, 0.5]),
    ({"presence_penalty": 0.5}, [1.0, -1.5, 1.5, -2.0, 0.5]),
    ({"frequency_penalty": 0.25}, [1.0, -1.25, 1.25, -2.0, 0.5]),
    ({"frequency_penalty": -2, "presence_penalty": 2}, [1.0, -1.0, 6.0, -2.0, 0.5]),
    ({"repetition_penalty": 2.0}, [0.5, -2.0, 1.0, -2.0, 0.5]),
    ({"repetition_penalty": 2.0, "presence_penalty": 1}, [0.5, -3.0, 0.0, -2.0, 0.5]),
]


@pytest.mark.parametrize(("penalties", "expected_logits"), PENALISED_LOGITS, ids=str)
def test_penalties_match_openai(
    device: str, penalties: dict[str, Any], expected_logits: list[float]
) -> None:
    """Two of them count only the output, once or by count; the third counts prompt and output."""
    prompt, text = [0, 0, 2], [1, 2, 2, 2]
    counts = torch.zeros(1, 5, dtype=torch.int32, device=device)
    for token, count in count_prompt_and_output([*prompt, *text], len(prompt)).items():
        counts[0, token] = count
    logits = torch.tensor([[1.0, -1.0, 2.0, -2.0, 0.5]], device=device)
    results = batch(device, SamplingParams(1.0, **penalties)).probabilities(logits, counts)
    torch.testing.assert_close(results, torch.tensor([expected_logits], device=device).softmax(-1))


def bitmask(rows: list[set[int]], vocabulary: int) -> torch.Tensor:
    """Return a mask of allowed tokens, in words of 32 bits."""
    words = [[0] * -(-vocabulary // 32) for _ in rows]
    for row, allowed in zip(words, rows, strict=True):
        for token in allowed:
            row[token // 32] |= 1 << token % 32
    return torch.tensor(words).to(torch.int32)


def test_only_allowed_tokens_are_sampled(device: str) -> None:
    """This holds for greedy and sampled tokens, whatever penalties favour the others."""
    vocabulary, rows = 70, 24
    allowed_tokens = [{row, 31, 32, 63, 64, 69} for row in range(rows)]
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)).to(device)
    params = [
        SamplingParams(3.0 * (row % 3 > 0), top_k=row % 2 * 5, frequency_penalty=-2)
        for row in range(rows)
    ]
    counts = torch.arange(vocabulary, device=device).expand(rows, -1).int() % 7
    several = batch(device, *params)
    mask = bitmask(allowed_tokens, vocabulary).to(device)
    previous_tokens: list[set[int]] = [set() for _ in allowed_tokens]
    for position in range(60):
        masked_logits = apply_token_bitmask(logits, mask)
        chosen = several.sample_tokens(
            masked_logits, at(device, *[position] * rows), counts
        ).tolist()
        for row, token in enumerate(chosen):
            previous_tokens[row].add(token)
    for row, allowed in enumerate(allowed_tokens):
        assert previous_tokens[row] <= allowed
        assert len(previous_tokens[row]) > 1 or not row % 3
    allowed_logits = (logits - 2 * -counts).masked_fill(
        ~boolean_mask(allowed_tokens, vocabulary, device), -1e9
    )
    assert all(
        previous_tokens[row] == {int(allowed_logits[row].argmax())} for row in range(0, rows, 3)
    )


def boolean_mask(rows: list[set[int]], vocabulary: int, device: str) -> torch.Tensor:
    results = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
    for row, allowed in enumerate(rows):
        results[row, list(allowed)] = True
    return results


def test_tokens_beyond_the_mask_are_not_allowed(device: str) -> None:
    logits = some_logits(device, rows=3)
    every = bitmask([{*range(VOCABULARY)}] * 3, VOCABULARY).to(device)
    assert torch.equal(apply_token_bitmask(logits, every), logits)
    wide = torch.cat([logits, logits + 9], -1)
    masked_logits = apply_token_bitmask(wide, every)
    assert masked_logits[:, 64:].eq(float("-inf")).all()
    none = apply_token_bitmask(logits, torch.zeros_like(every))
    assert rows_without_a_distribution(none).all()


@pytest.mark.parametrize("bits", [0, -1])
def test_noise_is_finite(device: str, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """With infinite noise a token would be drawn, or ruled out, however unlikely it is."""
    monkeypatch.setattr(noise_module, "_mix", lambda _: torch.tensor([bits], device=device))
    number = torch.zeros(1, dtype=torch.int64, device=device)
    assert gumbel_noise(number, number, number).isfinite().all()


def test_noise_has_a_gumbel_distribution(device: str) -> None:
    seed = torch.tensor([[-7]], device=device)
    noise = gumbel_noise(seed, at(device, 4)[:, None], torch.arange(100_000, device=device)[None])
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - 1.6449) < 0.05
    assert noise.isfinite().all()


def test_rows_without_a_distribution_are_detected(device: str) -> None:
    logits = some_logits(device, rows=4)
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    logits[3, :-1] = float("-inf")
    assert rows_without_a_distribution(logits).tolist() == [False, True, True, False]


def test_log_probabilities_match_log_softmax(device: str) -> None:
    logits = some_logits(device, rows=2)
    expected = logits.log_softmax(-1)[[0, 1], [5, 6]]
    tokens = at(device, 5, 6)
    torch.testing.assert_close(log_probabilities(logits, tokens[:, None])[:, 0], expected)
    torch.testing.assert_close(pack_logprobs(logits, tokens, 0)[:, 0].float(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 20, 60])
def test_top_tokens_are_ordered_by_logit_then_id(
    device: str, dtype: torch.dtype, count: int
) -> None:
    """Zeros of both signs are equal, and some tokens have probability 0."""
    logits = (some_logits(device, rows=30) * 2).round().to(dtype) / 4
    logits[:, ::7] = float("-inf")
    logits[:, 3::5] = logits[:, 3::5].where(logits[:, 3::5] != 0, -0.0)
    order = logits.float().cpu().sort(descending=True, stable=True).indices[:, :count].to(device)
    assert torch.equal(top_token_ids(logits, count), order)
    unpacked = [
        unpack_logprobs(row)
        for row in pack_logprobs(logits, at(device, *range(30)), count).tolist()
    ]
    cumulative = logits.float().log_softmax(-1)
    for row, each in enumerate(unpacked):
        assert [token for token, _ in each.top_logprobs] == order[row].tolist()
        assert [value for _, value in each.top_logprobs] == cumulative[row][order[row]].tolist()
        assert each.logprob == float(cumulative[row, row])


NUMBERS = [field.name for field in fields(SamplingParams) if field.type in ("int", "float")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be at least 0"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be at least 1e-38"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it must be between -2 and 2"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3; it must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"stop": "END"}, "stop is 'END'; it must be a list of strings"),
        ({"stop": ("END", 1)}, "stop is .*; it must be a list of strings"),
        ({"stop": None}, "stop is None; it must be a list of strings"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False"),
        ({"logprobs": 1}, "logprobs is 1; it must be True or False"),
        ({"top_logprobs": 21}, "top_logprobs is 21; it must be at least 0 and at most 20"),
        ({"temperature": "1"}, "temperature is '1' of type str; it must be at least 0"),
        ({"top_logprobs": None}, "top_logprobs is None"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is 1; it must be True or False"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e39}, "temperature is 1e[+]39; .* at most 3.4e[+]38"),
        ({"temperature": float("inf")}, "temperature"),
        ({"repetition_penalty": 10**400}, "repetition_penalty .* at most 3.4e[+]38"),
        *(({name: True}, f"{name} is True of type bool") for name in NUMBERS),
        *(({name: 10**5000}, f"{name} is a whole number of 16610 bits") for name in NUMBERS),
        *(({name: -(10**5000)}, f"{name} is a whole number of") for name in NUMBERS),
        (
            {"stop": [10**5000]},
            "stop is a list that cannot be written; it must be a list of strings",
        ),
        ({"seed": True}, "seed is True of type bool"),
        ({"seed": 10**5000}, "seed is a whole number of 16610 bits; .* at most 64 bits, or None"),
        ({"top_k": 1 << 63}, r"top_k is 9223372036854775808; .* below 2\*\*63"),
    ],
    ids=short_repr,
)
def test_invalid_parameters_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**arguments)
