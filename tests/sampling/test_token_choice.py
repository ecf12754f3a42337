"""How tokens are chosen: logprobs, penalties and seeds, as a user sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import EnginePath, SamplingParams
from tests.engine.continuations import TEXTS, by_transformers, greedy, one, original, small_llm

if TYPE_CHECKING:
    from roseinfer import RequestOutput


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_those_of_the_models_logits(device: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_k=40, seed=3, logprobs=True)
    asked, unasked = small_llm(device).generate(
        [TEXTS[0], TEXTS[1]], [params, greedy()], progress=False
    )
    prompt = original(device).tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        row = torch.tensor([prompt + asked.token_ids], device=device)
        logits = original(device).model(row).logits[0, len(prompt) - 1 : -1]
    want = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
    assert asked.logprobs is not None
    torch.testing.assert_close(
        torch.tensor(asked.logprobs, device=device), want, atol=1e-3, rtol=1e-3
    )
    assert len(asked.logprobs) == len(asked.token_ids)
    assert unasked.logprobs is None


@pytest.mark.parametrize("resident", [False, True])
def test_logprobs_survive_preemption(device: str, resident: bool) -> None:
    params = greedy(20, ignore_eos=True, top_logprobs=2, prompt_logprobs=True)
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    scarce = small_llm(device, kv_cache_tokens=48, resident_decode=resident)
    got = scarce.generate(prompts, params, progress=False)
    want = small_llm(device).generate(prompts, params, progress=False)
    assert scarce.engine.path_counts[EnginePath.RECOMPUTED] > 0
    for ours, theirs in zip(got, want, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
        assert ids_of(ours) == ids_of(theirs)
        assert_close(ours.prompt_logprobs, theirs.prompt_logprobs)


def ids_of(output: RequestOutput) -> list[list[int]]:
    return [[token for token, _ in top] for top in output.top_logprobs or ()]


def assert_close(found: list[float | None] | None, right: list[float | None] | None) -> None:
    assert found is not None
    assert right is not None
    assert found[0] is None
    assert found[1:] == pytest.approx(right[1:], abs=1e-3)


AHEAD: list[dict[str, Any]] = [
    {"resident_decode": False},
    {"resident_decode": True},
    {"resident_decode": True, "run_ahead": 3},
    {"resident_decode": True, "run_ahead": 3, "paged_attention": True},
]


@pytest.mark.parametrize("config", AHEAD, ids=str)
def test_the_likeliest_tokens_are_told_beside_the_chosen(
    device: str, config: dict[str, Any]
) -> None:
    """Each request gets as many as it asked for, whatever its neighbours asked for."""
    asked = [0, 5, 20, 1]
    params = [greedy(6, ignore_eos=True, top_logprobs=most) for most in asked]
    params += [greedy(6, ignore_eos=True, logprobs=True), replace(sampled(3), max_new_tokens=6)]
    llm = small_llm(device, **config)
    outputs = llm.generate([TEXTS[0]] * 6, params, progress=False)
    assert bool(llm.engine.path_counts[EnginePath.LOGPROBS]) == config["resident_decode"]
    prompt = original(device).tokenizer.encode(TEXTS[0])
    with torch.no_grad():
        row = torch.tensor([prompt + outputs[0].token_ids], device=device)
        likely = original(device).model(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    values, ids = likely.sort(descending=True, stable=True)
    for most, output in zip(asked[1:], outputs[1:4], strict=True):
        assert ids_of(output) == ids[:, :most].tolist()
        told = [[value for _, value in top] for top in output.top_logprobs or ()]
        torch.testing.assert_close(
            torch.tensor(told, device=device), values[:, :most], atol=1e-3, rtol=1e-3
        )
        assert output.logprobs == [top[0][1] for top in output.top_logprobs or ()]
    assert outputs[0].logprobs is None
    assert outputs[4].logprobs == pytest.approx(outputs[1].logprobs)
    assert [output.top_logprobs for output in (outputs[0], *outputs[4:])] == [None] * 3


@pytest.mark.parametrize("resident", [False, True])
def test_updates_tell_of_their_tokens(device: str, resident: bool) -> None:
    params = greedy(5, ignore_eos=True, top_logprobs=2)
    updates = [*small_llm(device, resident_decode=resident).stream(TEXTS[0], params)]
    request = updates[-1].request
    assert [update.logprob for update in updates] == request.logprobs
    assert [update.top_logprobs for update in updates] == request.top_logprobs
    (plain,) = small_llm(device).stream(TEXTS[0], greedy(1))
    assert (plain.logprob, plain.top_logprobs) == (None, None)


def by_the_model(device: str, text: str) -> list[float | None]:
    """Return the log-probability of each token of a prompt by transformers' own model."""
    row = torch.tensor([original(device).tokenizer.encode(text)], device=device)
    with torch.no_grad():
        likely = original(device).model(row).logits[0].log_softmax(-1)
    return [None, *likely[:-1].gather(-1, row[0, 1:, None])[:, 0].tolist()]


IN_PROMPT = greedy(4, ignore_eos=True, prompt_logprobs=True)


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
def test_what_is_told_of_prompts_is_the_models(device: str, config: dict[str, Any]) -> None:
    """Prompts of one token to many, in chunks or whole, beside some that nothing is told of."""
    texts = [text * times for text in TEXTS for times in (1, 3)] + ["q"]
    llm = small_llm(device, **config)
    params = [IN_PROMPT, greedy(4, ignore_eos=True)] * len(texts)
    outputs = llm.generate([text for text in texts for _ in range(2)], params, progress=False)
    for text, told, plain in zip(texts, outputs[::2], outputs[1::2], strict=True):
        assert_close(told.prompt_logprobs, by_the_model(device, text))
        assert plain.prompt_logprobs is None
        assert told.token_ids == plain.token_ids


def test_prompts_that_are_told_of_are_computed_whole_and_found_by_others(device: str) -> None:
    llm = small_llm(device)
    hits = llm.engine.path_counts
    one(llm, TEXTS[0], IN_PROMPT)
    for text in (TEXTS[0], TEXTS[0] + " there"):
        told = one(llm, text, IN_PROMPT)
        assert_close(told.prompt_logprobs, by_the_model(device, text))
        assert not hits[EnginePath.PREFIX_HIT]
    one(llm, TEXTS[0] + " there", greedy(2))
    assert hits[EnginePath.PREFIX_HIT] == 1


def test_what_was_told_before_a_step_failed_is_told_again(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt whose log-probabilities were on their way is computed anew, and not found."""
    llm = small_llm(device, prefill_max_tokens=4, run_ahead=2, resident_decode=True)
    request = llm.engine.submit(TEXTS[0], IN_PROMPT)
    llm.engine.step()
    llm.engine.step()
    extend = llm.engine.sequence_runner.extend
    monkeypatch.setattr(llm.engine.sequence_runner, "extend", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.engine.step()
    monkeypatch.setattr(llm.engine.sequence_runner, "extend", extend)
    while request.finish_reason is None:
        llm.engine.step()
    assert_close(request.prompt_logprobs, by_the_model(device, TEXTS[0]))


def test_a_repetition_penalty_is_transformers(device: str) -> None:
    """The prompt's tokens count too. Neighbours without one are left alone."""
    llm = small_llm(device)
    penalties = [1.5, 1.0, 3.0]
    prompts = ["abcabcabc"] * 3
    outputs = llm.generate(
        prompts,
        [greedy(repetition_penalty=penalty, ignore_eos=True) for penalty in penalties],
        progress=False,
    )
    for penalty, output in zip(penalties, outputs, strict=True):
        want = by_transformers(device, prompts[0], 16, repetition_penalty=penalty)
        assert output.token_ids == want
    assert outputs[0].token_ids != outputs[1].token_ids


def sampled(seed: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=1.2, top_k=50, top_p=0.98, seed=seed, max_new_tokens=20, ignore_eos=True
    )


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
def test_a_seed_draws_the_same_whatever_it_is_batched_with(
    device: str, config: dict[str, Any]
) -> None:
    prompts = [TEXTS[0] + letter for letter in "abcdef"]
    alone = [
        one(small_llm(device), prompt, sampled(seed)).token_ids
        for seed, prompt in enumerate(prompts)
    ]
    llm = small_llm(device, **config)
    params = [sampled(seed) for seed in range(len(prompts))]
    together = llm.generate(prompts, params, progress=False)
    assert [output.token_ids for output in together] == alone
    backwards = llm.generate(prompts[::-1], params[::-1], progress=False)
    assert [output.token_ids for output in backwards] == alone[::-1]


def test_seeds_differ_and_so_do_requests_without_one(device: str) -> None:
    llm = small_llm(device)
    hot = [
        SamplingParams(temperature=5.0, seed=seed, ignore_eos=True) for seed in (1, 2, None, None)
    ]
    outputs = llm.generate(["Once"] * 4, hot, progress=False)
    assert len({tuple(output.token_ids) for output in outputs}) == 4


def test_every_token_is_drawn_anew(device: str) -> None:
    """At this temperature all tokens are about as likely, whatever stands before them."""
    hot = SamplingParams(temperature=1000.0, seed=5, max_new_tokens=30, ignore_eos=True)
    assert len(set(one(small_llm(device), "Once", hot).token_ids)) > 20
