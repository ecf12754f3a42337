"""Log-probabilities of prompts, which are the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import SamplingParams
from roseinfer.server import service
from roseinfer.server.schemas.choices import TokenTexts
from tests.server.clients import Asking, by_both_clients
from tests.server.served import MODEL

if TYPE_CHECKING:
    from roseinfer import LLM
    from tests.server.served import Server

PROMPT = "Once upon a time"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("likeliest", [None, 0, 2])
def test_a_prompt_may_be_scored_alone(
    server: Server, alone: LLM, likeliest: int | None, stream: bool
) -> None:
    """As evaluations of models do it."""
    prompts: list[Any] = [PROMPT, "A rose is a rose"]
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": 0, "echo": True, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    answer = server.post("completions", **asked, logprobs=likeliest)
    assert answer.status == 200, answer.data
    events = answer.events if stream else [answer.json]
    choices = sorted((each for e in events for each in e["choices"]), key=lambda c: c["index"])
    assert [choice["text"] for choice in choices] == prompts
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert events[-1]["usage"]["completion_tokens"] == 0
    assert server.line_of(answer)["completion_tokens"] == 0
    if likeliest is None:
        assert [choice["logprobs"] for choice in choices] == [None, None]
        return
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    for choice, output in zip(choices, alone.generate(prompts, params), strict=True):
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None
        assert output.prompt_logprobs is not None
        assert told["token_logprobs"][1:] == pytest.approx(output.prompt_logprobs[1:], abs=1e-4)
        assert told["tokens"] == [*choice["text"]]
        assert told["text_offset"] == [*range(len(choice["text"]))]
        if likeliest:
            assert len(told["top_logprobs"]) == len(told["tokens"])


@pytest.mark.parametrize("stream", [False, True])
@by_both_clients
def test_an_echo_has_the_prompts_log_probabilities(
    server: Server, alone: LLM, asking: Asking, stream: bool
) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=12, logprobs=True, prompt_logprobs=True)
    wanted: Any = alone.generate([PROMPT], params)[0]
    asked = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "n": 2}
    parts = asking(server, "completions.create", **asked, logprobs=1, echo=True, stream=stream)
    values: list[list[float | None]] = [[], []]
    tokens: list[list[str]] = [[], []]
    offsets: list[list[int]] = [[], []]
    tops: list[list[Any]] = [[], []]
    texts = ["", ""]
    for choice in (choice for part in parts for choice in part.choices):
        at, told = choice.index, choice.logprobs
        texts[at] += choice.text
        values[at] += told.token_logprobs
        tokens[at] += told.tokens
        offsets[at] += told.text_offset
        tops[at] += told.top_logprobs
    for at in range(2):
        assert texts[at] == PROMPT + wanted.text
        expected = [*wanted.prompt_logprobs, *wanted.logprobs]
        assert values[at][0] is tops[at][0] is None
        assert values[at][1:] == pytest.approx(expected[1:], abs=1e-4)
        assert "".join(tokens[at][: len(PROMPT)]) == PROMPT
        assert offsets[at][: len(PROMPT) + 1] == [*range(len(PROMPT) + 1)]
        assert len(tops[at]) == len(PROMPT) + 12


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_may_get_too_large_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(service, "MAX_LOGPROBS", 3 * (16 + 4) * 2)
    asked = {"prompt": "x" * 16, "max_tokens": 4, "echo": True, "logprobs": 1, "stream": stream}
    assert server.post("completions", **asked, n=3).status == 200
    before = server.service.admission.num_open
    refused = server.post("completions", **asked, n=4)
    assert (refused.status, refused.error["param"]) == (400, "logprobs")
    assert "4 choices of 20 tokens with 2 logprobs each make 160" in refused.error["message"]
    assert server.service.admission.num_open == before
    assert server.post("completions", **asked | {"echo": False}, n=15).status == 200
    assert server.post("completions", **asked | {"logprobs": None}, n=20).status == 200


def test_a_token_is_decoded_once_however_often_it_is_written(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = TokenTexts(server.service.token_texts._tokenizer)
    assert [texts.special(256), texts.special(65)] == ["<|endoftext|>", ""]
    monkeypatch.setattr(texts, "_tokenizer", None)
    assert [texts.special(256), texts.special(65)] == ["<|endoftext|>", ""]
