"""Choice of tokens: logprobs, penalties and seeds of requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import EnginePath, SamplingParams
from tests.engine.continuations import (
    TEXTS,
    greedy,
    one,
    original,
    small_llm,
    transformers_continuation,
)

if TYPE_CHECKING:
    from roseinfer import RequestOutput


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_match_the_models_logits(device: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=40, seed=3, logprobs=True)
    with_logprobs, without_logprobs = small_llm(device).generate(
        [TEXTS[0], TEXTS[1]], [params, greedy()], progress=False
    )
    prompt = original(device).tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        row = torch.tensor([prompt + with_logprobs.token_ids], device=device)
        logits = original(device).model(row).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
    assert with_logprobs.logprobs is not None
    torch.testing.assert_close(
        torch.tensor(with_logprobs.logprobs, device=device), expected, atol=1e-3, rtol=1e-3
    )
    assert len(with_logprobs.logprobs) == len(with_logprobs.token_ids)
    assert without_logprobs.logprobs is None


@pytest.mark.parametrize("resident", [False, True])
def test_logprobs_survive_preemption(device: str, resident: bool) -> None:
    params = greedy(20, ignore_eos=True, top_logprobs=2, prompt_logprobs=True)
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    scarce = small_llm(device, kv_cache_tokens=48, resident_decode=resident)
    actual = scarce.generate(prompts, params, progress=False)
    expected = small_llm(device).generate(prompts, params, progress=False)
    assert scarce.engine.path_counts[EnginePath.RECOMPUTED] > 0
    for output, reference in zip(actual, expected, strict=True):
        assert output.logprobs == pytest.approx(reference.logprobs, abs=1e-3)
        assert ids_of(output) == ids_of(reference)
        assert_close(output.prompt_logprobs, reference.prompt_logprobs)


def ids_of(output: RequestOutput) -> list[list[int]]:
    return [[token for token, _ in top] for top in output.top_logprobs or ()]


def assert_close(
    logprobs: list[float | None] | None, expected_logprobs: list[float | None] | None
) -> None:
    assert logprobs is not None
    assert expected_logprobs is not None
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(expected_logprobs[1:], abs=1e-3)


CONFIGS: list[dict[str, Any]] = [
    {"resident_decode": False},
    {"resident_decode": True},
    {"resident_decode": True, "run_ahead": 3},
    {"resident_decode": True, "run_ahead": 3, "paged_attention": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_top_logprobs_match_the_models_logits(device: str, config: dict[str, Any]) -> None:
    """Each request gets as many as it requested, whatever the others request."""
    with_logprobs = [0, 5, 20, 1]
    params = [greedy(6, ignore_eos=True, top_logprobs=num_top) for num_top in with_logprobs]
    params += [
        greedy(6, ignore_eos=True, logprobs=True),
        replace(sampled_params(3), max_new_tokens=6),
    ]
    llm = small_llm(device, **config)
    outputs = llm.generate([TEXTS[0]] * 6, params, progress=False)
    assert bool(llm.engine.path_counts[EnginePath.LOGPROBS]) == config["resident_decode"]
    prompt = original(device).tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        row = torch.tensor([prompt + outputs[0].token_ids], device=device)
        expected_logprobs_rows = (
            original(device).model(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        )
    values, ids = expected_logprobs_rows.sort(descending=True, stable=True)
    for num_top, output in zip(with_logprobs[1:], outputs[1:4], strict=True):
        assert ids_of(output) == ids[:, :num_top].tolist()
        scored = [[value for _, value in top] for top in output.top_logprobs or ()]
        torch.testing.assert_close(
            torch.tensor(scored, device=device), values[:, :num_top], atol=1e-3, rtol=1e-3
        )
        assert output.logprobs == [top[0][1] for top in output.top_logprobs or ()]
    assert outputs[0].logprobs is None
    assert outputs[4].logprobs == pytest.approx(outputs[1].logprobs)
    assert [output.top_logprobs for output in (outputs[0], *outputs[4:])] == [None] * 3


@pytest.mark.parametrize("resident", [False, True])
def test_updates_have_logprobs(device: str, resident: bool) -> None:
    params = greedy(5, ignore_eos=True, top_logprobs=2)
    updates = [*small_llm(device, resident_decode=resident).stream(TEXTS[0], params)]
    request = updates[-1].request
    assert [update.logprob for update in updates] == request.logprobs
    assert [update.top_logprobs for update in updates] == request.top_logprobs
    (plain,) = small_llm(device).stream(TEXTS[0], greedy(1))
    assert (plain.logprob, plain.top_logprobs) == (None, None)


def model_logprobs(device: str, text: str) -> list[float | None]:
    """Return the logprob of each token of a prompt by transformers' own model."""
    row = torch.tensor([original(device).tokenizer.encode(text)], device=device)
    with torch.no_grad():
        expected_logprobs_rows = original(device).model(row).logits[0].log_softmax(-1)
    return [None, *expected_logprobs_rows[:-1].gather(-1, row[0, 1:, None])[:, 0].tolist()]


IN_PROMPT = greedy(4, ignore_eos=True, prompt_logprobs=True)


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"prefill_max_tokens": 3},
        {"prefill_max_tokens": 1},
        {"prefill_max_tokens": 5, "resident_decode": True, "run_ahead": 2},
        {"prefill_max_batch_size": 2, "chunked_prefill": False},
        {"kv_cache_tokens": 64, "prefill_max_tokens": 7},
    ],
    ids=str,
)
def test_prompt_logprobs_match_the_model(device: str, config: dict[str, Any]) -> None:
    """Prompts of one token to many, in chunks or whole, mixed with some without logprobs."""
    texts = [text * times for text in TEXTS for times in (1, 3)] + ["q"]
    llm = small_llm(device, **config)
    params = [IN_PROMPT, greedy(4, ignore_eos=True)] * len(texts)
    outputs = llm.generate([text for text in texts for _ in range(2)], params, progress=False)
    for text, scored, plain in zip(texts, outputs[::2], outputs[1::2], strict=True):
        assert_close(scored.prompt_logprobs, model_logprobs(device, text))
        assert plain.prompt_logprobs is None
        assert scored.token_ids == plain.token_ids


def test_prompts_with_logprobs_skip_the_prefix_cache_and_fill_it(device: str) -> None:
    llm = small_llm(device)
    hits = llm.engine.path_counts
    one(llm, TEXTS[0], IN_PROMPT)
    for text in (TEXTS[0], TEXTS[0] + " there"):
        scored = one(llm, text, IN_PROMPT)
        assert_close(scored.prompt_logprobs, model_logprobs(device, text))
        assert not hits[EnginePath.PREFIX_HIT]
    one(llm, TEXTS[0] + " there", greedy(2))
    assert hits[EnginePath.PREFIX_HIT] == 1


def test_prompt_logprobs_are_recomputed_after_a_failed_step(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with logprobs in flight is computed again, without a prefix hit."""
    llm = small_llm(device, prefill_max_tokens=4, run_ahead=2, resident_decode=True)
    request = llm.engine.submit(TEXTS[0], IN_PROMPT)
    llm.engine.step()
    llm.engine.step()
    forward = llm.engine.sequence_runner.forward
    monkeypatch.setattr(llm.engine.sequence_runner, "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.engine.step()
    monkeypatch.setattr(llm.engine.sequence_runner, "forward", forward)
    while request.finish_reason is None:
        llm.engine.step()
    assert_close(request.prompt_logprobs, model_logprobs(device, TEXTS[0]))


def test_repetition_penalty_matches_transformers(device: str) -> None:
    """The prompt's tokens count, too. Requests without a penalty are unaffected."""
    llm = small_llm(device)
    penalties = [1.5, 1.0, 3.0]
    prompts = ["abcabcabc"] * 3
    outputs = llm.generate(
        prompts,
        [greedy(repetition_penalty=penalty, ignore_eos=True) for penalty in penalties],
        progress=False,
    )
    for penalty, output in zip(penalties, outputs, strict=True):
        expected = transformers_continuation(device, prompts[0], 16, repetition_penalty=penalty)
        assert output.token_ids == expected
    assert outputs[0].token_ids != outputs[1].token_ids


def sampled_params(seed: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=1.2, top_k=50, top_p=0.98, seed=seed, max_new_tokens=20, ignore_eos=True
    )


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kv_cache_tokens": 48},
        {"kv_cache_tokens": 48, "prefix_cache": False},
        {"max_batch_size": 1},
        {"prefill_max_tokens": 3},
        {"prefill_admission_policy": "pack", "prefill_max_tokens": 20},
    ],
    ids=str,
)
def test_seeded_completion_is_independent_of_the_batch(device: str, config: dict[str, Any]) -> None:
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    alone = [
        one(small_llm(device), prompt, sampled_params(seed)).token_ids
        for seed, prompt in enumerate(prompts)
    ]
    llm = small_llm(device, **config)
    params = [sampled_params(seed) for seed in range(len(prompts))]
    together = llm.generate(prompts, params, progress=False)
    assert [output.token_ids for output in together] == alone
    backwards = llm.generate(prompts[::-1], params[::-1], progress=False)
    assert [output.token_ids for output in backwards] == alone[::-1]


def test_completions_differ_by_seed_and_without_one(device: str) -> None:
    llm = small_llm(device)
    hot = [
        SamplingParams(temperature=5.0, seed=seed, ignore_eos=True) for seed in (1, 2, None, None)
    ]
    outputs = llm.generate(["Once"] * 4, hot, progress=False)
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_tokens_are_drawn_independently(device: str) -> None:
    """At this temperature all tokens are about as likely, whatever precedes them."""
    hot = SamplingParams(temperature=1000.0, seed=5, max_new_tokens=30, ignore_eos=True)
    assert len(set(one(small_llm(device), "Once", hot).token_ids)) > 20
