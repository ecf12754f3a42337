"""Ends of completions with guides, and their logprobs."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, Guide, SamplingParams, tiny_gpt2
from tests.engine.continuations import END, one, original
from tests.guided.constraints import SETTINGS, WORDS, engine

if TYPE_CHECKING:
    from roseinfer import RequestOutput

both_settings = pytest.mark.parametrize("setting", ["no slots", "far ahead"])
close_to = partial(pytest.approx, abs=1e-5)
DIGITS = Guide(regex="[0-9]{4,}")
PROMPT = "Once upon a time"


def generate_with_guide(
    llm: LLM, guide: Guide, prompt: str = PROMPT, **params: Any
) -> RequestOutput:
    all_params: dict[str, Any] = {"max_new_tokens": 30, "guide": guide} | params
    return one(llm, prompt, SamplingParams(**all_params))


def reference_completion(
    device: str, words: tuple[str, ...]
) -> tuple[list[int], list[list[float]]]:
    """Return the most likely completion among a few words, and each step's logprobs.

    It uses no grammar: a token may follow if it continues one of the words.
    """
    model, encoded_words = original(device).model, [word.encode() for word in words]
    tokens: list[int] = []
    logprobs_by_step: list[list[float]] = []
    ids = original(device).tokenizer.encode(PROMPT)
    while True:
        possible_words = [word for word in encoded_words if word[: len(tokens)] == bytes(tokens)]
        allowed = {word[len(tokens)] if len(word) > len(tokens) else END for word in possible_words}
        if allowed == {END}:
            return tokens, logprobs_by_step
        logits = model(torch.tensor([ids + tokens], device=device)).logits[0, -1]
        masked_logits = torch.full_like(logits, -math.inf)
        masked_logits[list(allowed)] = logits[list(allowed)]
        logprobs_by_step.append(masked_logits.log_softmax(-1).tolist())
        tokens.append(int(masked_logits.argmax()))
        if tokens[-1] == END:
            return tokens, logprobs_by_step


@pytest.mark.sampled_cases
@both_settings
@pytest.mark.parametrize("words", [WORDS, ("aé", "ab", "abc"), ("zero", "zebra", "z")], ids=str)
def test_greedy_choice_of_words_matches_the_reference(
    device: str, setting: str, words: tuple[str, ...]
) -> None:
    """Tokens are greedy, with logprobs among the allowed tokens."""
    llm = engine(device, **SETTINGS[setting])
    output = generate_with_guide(llm, Guide(choice=words), top_logprobs=4)
    tokens, logprobs_by_step = reference_completion(device, words)
    assert (output.token_ids, output.finish_reason) == (tokens, "stop")
    assert output.logprobs == close_to(
        [row[t] for t, row in zip(tokens, logprobs_by_step, strict=True)]
    )
    assert output.top_logprobs is not None
    for top, row in zip(output.top_logprobs, logprobs_by_step, strict=True):
        best = sorted((-x, token) for token, x in enumerate(row) if x > -math.inf)[:4]
        assert [token for token, _ in top] == [token for _, token in best]
        assert [value for _, value in top] == close_to([-x for x, _ in best])


@both_settings
def test_completion_that_cannot_continue_ends_at_once(device: str, setting: str) -> None:
    llm = engine(device, **SETTINGS[setting])
    for more in ({}, {"ignore_eos": True}, {"max_new_tokens": 3}):
        output = generate_with_guide(llm, Guide(choice=("yes",)), **more)
        assert (output.text, output.finish_reason) == ("yes", "stop")
        assert output.token_ids == list(b"yes")


@both_settings
def test_completion_ends_only_where_the_guide_allows(device: str, setting: str) -> None:
    """EOS is allowed only there, and only as the token that the model uses for it."""
    llm = engine(device, **SETTINGS[setting])
    ends = set()
    for seed in range(12):
        output = generate_with_guide(llm, Guide(regex="[a-z]{3,}"), temperature=1.5, seed=seed)
        assert re.fullmatch("[a-z]{3,}", str(output.text))
        if output.finish_reason == "stop":
            assert output.token_ids == [*str(output.text).encode(), END]
            ends.add(len(output.token_ids))
    assert len(ends) > 3
    assert min(ends) >= 4


@both_settings
def test_ignore_eos_continues_to_the_limit(device: str, setting: str) -> None:
    llm = engine(device, **SETTINGS[setting])
    output = generate_with_guide(
        llm, DIGITS, temperature=1.5, seed=1, ignore_eos=True, max_new_tokens=300
    )
    assert output.finish_reason == "length"
    assert str(output.text).isdigit()
    assert len(output.token_ids) == 300


@both_settings
def test_limits_and_stop_strings_end_a_completion_early(device: str, setting: str) -> None:
    llm = engine(device, **SETTINGS[setting])
    limited = generate_with_guide(llm, Guide(choice=("undecided",)), max_new_tokens=4)
    assert (limited.text, limited.finish_reason) == ("unde", "length")
    stopped = generate_with_guide(llm, Guide(choice=("undecided",)), stop=("ci",))
    assert (stopped.text, stopped.finish_reason) == ("unde", "stop")
    stopped_at_end = generate_with_guide(llm, Guide(choice=("undecided",)), stop=("ed",))
    assert (stopped_at_end.text, stopped_at_end.finish_reason) == ("undecid", "stop")


@both_settings
def test_eos_tokens_that_are_also_text(device: str, setting: str) -> None:
    """A model may have several EOS tokens. None of them occurs before the guide is satisfied."""
    tiny = tiny_gpt2(device)
    ends = [END, *b"0246"]
    tiny.model.generation_config.eos_token_id = ends
    config: dict[str, Any] = {"dtype": "float32", "kv_cache_tokens": 600} | SETTINGS[setting]
    llm = LLM(tiny.model, tokenizer=tiny.tokenizer, device=device, **config)
    last_tokens = set()
    for seed in range(12):
        output = generate_with_guide(llm, DIGITS, temperature=3.0, seed=seed, max_new_tokens=200)
        assert output.finish_reason == "stop"
        *text, end = output.token_ids
        assert end in ends
        assert bytes(text).decode() == output.text
        assert len(text) >= 4
        assert set(text) <= set(b"135798")
        last_tokens.add(end)
    assert len(last_tokens) > 2
    forced = generate_with_guide(llm, Guide(regex="[0-9]02468[0-9]"), temperature=3.0)
    assert re.fullmatch("[0-9]02468[0-9]", str(forced.text))  # no other text matches
    ignoring = generate_with_guide(llm, DIGITS, temperature=3.0, seed=1, ignore_eos=True)
    assert set(ignoring.token_ids) & set(b"0246")
    assert END not in ignoring.token_ids
