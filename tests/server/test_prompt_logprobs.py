"""Logprobs of prompts: equal to those of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import SamplingParams
from roseinfer.server import service
from roseinfer.server.schemas.choices import TokenTexts
from tests.server.clients import Call, both_clients
from tests.server.served import MODEL

if TYPE_CHECKING:
    from roseinfer import LLM
    from tests.server.served import Server

PROMPT = "Once upon a time"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [None, 0, 2])
def test_prompt_is_scored_without_generation(
    server: Server, alone: LLM, num_top: int | None, stream: bool
) -> None:
    """Evaluations of models do this."""
    prompts: list[Any] = [PROMPT, "A rose is a rose"]
    options: dict[str, Any] = {"prompt": prompts, "max_tokens": 0, "echo": True, "stream": stream}
    if stream:
        options["stream_options"] = {"include_usage": True}
    answer = server.post("completions", **options, logprobs=num_top)
    assert answer.status == 200, answer.data
    events = answer.events if stream else [answer.json]
    choices = sorted((each for e in events for each in e["choices"]), key=lambda c: c["index"])
    assert [choice["text"] for choice in choices] == prompts
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert events[-1]["usage"]["completion_tokens"] == 0
    assert server.line_of(answer)["completion_tokens"] == 0
    if num_top is None:
        assert [choice["logprobs"] for choice in choices] == [None, None]
        return
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    for choice, output in zip(choices, alone.generate(prompts, params), strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert output.prompt_logprobs is not None
        assert logprobs["token_logprobs"][1:] == pytest.approx(output.prompt_logprobs[1:], abs=1e-4)
        assert logprobs["tokens"] == [*choice["text"]]
        assert logprobs["text_offset"] == [*range(len(choice["text"]))]
        if num_top:
            assert len(logprobs["top_logprobs"]) == len(logprobs["tokens"])


@pytest.mark.parametrize("stream", [False, True])
@both_clients
def test_echo_has_the_logprobs_of_the_prompt(
    server: Server, alone: LLM, call_api: Call, stream: bool
) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=12, logprobs=True, prompt_logprobs=True)
    output: Any = alone.generate([PROMPT], params)[0]
    options = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "n": 2}
    parts = call_api(server, "completions.create", **options, logprobs=1, echo=True, stream=stream)
    values: list[list[float | None]] = [[], []]
    tokens: list[list[str]] = [[], []]
    offsets: list[list[int]] = [[], []]
    tops: list[list[Any]] = [[], []]
    texts = ["", ""]
    for choice in (choice for part in parts for choice in part.choices):
        at, logprobs = choice.index, choice.logprobs
        texts[at] += choice.text
        values[at] += logprobs.token_logprobs
        tokens[at] += logprobs.tokens
        offsets[at] += logprobs.text_offset
        tops[at] += logprobs.top_logprobs
    for at in range(2):
        assert texts[at] == PROMPT + output.text
        expected = [*output.prompt_logprobs, *output.logprobs]
        assert values[at][0] is tops[at][0] is None
        assert values[at][1:] == pytest.approx(expected[1:], abs=1e-4)
        assert "".join(tokens[at][: len(PROMPT)]) == PROMPT
        assert offsets[at][: len(PROMPT) + 1] == [*range(len(PROMPT) + 1)]
        assert len(tops[at]) == len(PROMPT) + 12


@pytest.mark.parametrize("stream", [False, True])
def test_too_large_response_is_rejected(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(service, "MAX_LOGPROBS", 3 * (16 + 4) * 2)
    options = {"prompt": "x" * 16, "max_tokens": 4, "echo": True, "logprobs": 1, "stream": stream}
    assert server.post("completions", **options, n=3).status == 200
    before = server.service.admission.num_open
    response = server.post("completions", **options, n=4)
    assert (response.status, response.error["param"]) == (400, "logprobs")
    assert "4 choices of 20 tokens with 2 logprobs each make 160" in response.error["message"]
    assert server.service.admission.num_open == before
    assert server.post("completions", **options | {"echo": False}, n=15).status == 200
    assert server.post("completions", **options | {"logprobs": None}, n=20).status == 200


def test_each_token_is_decoded_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TokenTexts(server.service.token_texts._tokenizer)
    assert [texts.special(256), texts.special(65)] == ["<|endoftext|>", ""]
    monkeypatch.setattr(texts, "_tokenizer", None)
    assert [texts.special(256), texts.special(65)] == ["<|endoftext|>", ""]
