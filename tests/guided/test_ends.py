"""Where texts with guides end, and what is told of their tokens."""

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

either = pytest.mark.parametrize("setting", ["without slots", "far ahead"])
near = partial(pytest.approx, abs=1e-5)
DIGITS = Guide(regex="[0-9]{4,}")
PROMPT = "Once upon a time"


def ask(llm: LLM, guide: Guide, prompt: str = PROMPT, **params: Any) -> RequestOutput:
    given: dict[str, Any] = {"max_new_tokens": 30, "guide": guide} | params
    return one(llm, prompt, SamplingParams(**given))


def by_hand(device: str, words: tuple[str, ...]) -> tuple[list[int], list[list[float]]]:
    """Return the likeliest text among a few, and each step's log-probabilities.

    It knows no grammar: what may come next is what begins one of them.
    """
    model, written = original(device).model, [word.encode() for word in words]
    tokens: list[int] = []
    told: list[list[float]] = []
    ids = original(device).tokenizer.encode(PROMPT)
    while True:
        after = [word for word in written if word[: len(tokens)] == bytes(tokens)]
        may = {word[len(tokens)] if len(word) > len(tokens) else END for word in after}
        if may == {END}:
            return tokens, told
        logits = model(torch.tensor([ids + tokens], device=device)).logits[0, -1]
        only = torch.full_like(logits, -math.inf)
        only[list(may)] = logits[list(may)]
        told.append(only.log_softmax(-1).tolist())
        tokens.append(int(only.argmax()))
        if tokens[-1] == END:
            return tokens, told


@either
@pytest.mark.parametrize("words", [WORDS, ("aé", "ab", "abc"), ("zero", "zebra", "z")], ids=str)
def test_the_likeliest_of_a_few_texts(device: str, setting: str, words: tuple[str, ...]) -> None:
    """Token by token, with log-probabilities among the tokens that may come."""
    llm = engine(device, **SETTINGS[setting])
    output = ask(llm, Guide(choice=words), top_logprobs=4)
    tokens, told = by_hand(device, words)
    assert (output.token_ids, output.finish_reason) == (tokens, "stop")
    assert output.logprobs == near([row[t] for t, row in zip(tokens, told, strict=True)])
    assert output.top_logprobs is not None
    for found, row in zip(output.top_logprobs, told, strict=True):
        best = sorted((-x, token) for token, x in enumerate(row) if x > -math.inf)[:4]
        assert [token for token, _ in found] == [token for _, token in best]
        assert [own for _, own in found] == near([-x for x, _ in best])


@either
def test_a_text_that_cannot_go_on_ends_at_once(device: str, setting: str) -> None:
    llm = engine(device, **SETTINGS[setting])
    for more in ({}, {"ignore_eos": True}, {"max_new_tokens": 3}):
        output = ask(llm, Guide(choice=("yes",)), **more)
        assert (output.text, output.finish_reason) == ("yes", "stop")
        assert output.token_ids == list(b"yes")


@either
def test_a_text_ends_where_it_may(device: str, setting: str) -> None:
    """The token for that comes only there, and by no other name than that of the model."""
    llm = engine(device, **SETTINGS[setting])
    ends = set()
    for seed in range(12):
        output = ask(llm, Guide(regex="[a-z]{3,}"), temperature=1.5, seed=seed)
        assert re.fullmatch("[a-z]{3,}", str(output.text))
        if output.finish_reason == "stop":
            assert output.token_ids == [*str(output.text).encode(), END]
            ends.add(len(output.token_ids))
    assert len(ends) > 3
    assert min(ends) >= 4


@either
def test_who_ignores_ends_goes_on(device: str, setting: str) -> None:
    llm = engine(device, **SETTINGS[setting])
    output = ask(llm, DIGITS, temperature=1.5, seed=1, ignore_eos=True, max_new_tokens=300)
    assert output.finish_reason == "length"
    assert str(output.text).isdigit()
    assert len(output.token_ids) == 300


@either
def test_limits_and_stop_strings_end_a_text_early(device: str, setting: str) -> None:
    llm = engine(device, **SETTINGS[setting])
    cut = ask(llm, Guide(choice=("undecided",)), max_new_tokens=4)
    assert (cut.text, cut.finish_reason) == ("unde", "length")
    stopped = ask(llm, Guide(choice=("undecided",)), stop=("ci",))
    assert (stopped.text, stopped.finish_reason) == ("unde", "stop")
    last = ask(llm, Guide(choice=("undecided",)), stop=("ed",))
    assert (last.text, last.finish_reason) == ("undecid", "stop")


@either
def test_tokens_that_end_texts_and_are_text_too(device: str, setting: str) -> None:
    """A model may end its texts by several tokens. None of them comes before the form is there."""
    tiny = tiny_gpt2(device)
    ends = [END, *b"0246"]
    tiny.model.generation_config.eos_token_id = ends
    config: dict[str, Any] = {"dtype": "float32", "kv_cache_tokens": 600} | SETTINGS[setting]
    llm = LLM(tiny.model, tokenizer=tiny.tokenizer, device=device, **config)
    last = set()
    for seed in range(12):
        output = ask(llm, DIGITS, temperature=3.0, seed=seed, max_new_tokens=200)
        assert output.finish_reason == "stop"
        *text, end = output.token_ids
        assert end in ends
        assert bytes(text).decode() == output.text
        assert len(text) >= 4
        assert set(text) <= set(b"135798")
        last.add(end)
    assert len(last) > 2
    forced = ask(llm, Guide(regex="[0-9]02468[0-9]"), temperature=3.0)
    assert re.fullmatch("[0-9]02468[0-9]", str(forced.text))  # there is no other text
    ignoring = ask(llm, DIGITS, temperature=3.0, seed=1, ignore_eos=True)
    assert set(ignoring.token_ids) & set(b"0246")
    assert END not in ignoring.token_ids
