"""Penalties, and log-probabilities of the likeliest tokens and of prompts, by the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import LLM, SamplingParams
from tests.server.served import MODEL

if TYPE_CHECKING:
    from tests.server.served import Server

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM("tiny", device="cpu", dtype="float32", kv_cache_tokens=8192, prefix_cache=False)


def output(llm: LLM, **options: Any) -> Any:
    params = SamplingParams(temperature=0, max_new_tokens=12, **options)
    return llm.generate([PROMPT], params)[0]


@pytest.mark.parametrize("options", [{"presence_penalty": 2}, {"frequency_penalty": -1.5}])
def test_penalties_are_those_of_the_engine(
    server: Server, alone: LLM, options: dict[str, Any]
) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12, **options
        )
    assert answer.choices[0].text == output(alone, **options).text


@pytest.mark.parametrize("stream", [False, True])
def test_likeliest_tokens_of_a_completion(server: Server, alone: LLM, stream: bool) -> None:
    wanted = output(alone, top_logprobs=3)
    texts = server.service.token_texts
    found: list[dict[str, float]] = []
    with server.client() as client:
        asked = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
        answer = client.completions.create(**asked, logprobs=3, stream=stream)
        for each in answer if stream else [answer]:
            found += each.choices[0].logprobs.top_logprobs
    for top, own in zip(found, wanted.top_logprobs, strict=True):
        assert top == pytest.approx({texts[token][0]: value for token, value in own}, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_likeliest_tokens_of_a_chat(server: Server, stream: bool) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            logprobs=True,
            top_logprobs=4,
            max_tokens=9,
            temperature=0,
            stream=stream,
        )
        found = [
            token
            for each in (answer if stream else [answer])
            for token in each.choices[0].logprobs.content
        ]
    assert len(found) == 9
    for token in found:
        tops = token.top_logprobs
        assert len(tops) == 4
        assert (tops[0].token, tops[0].bytes) == (token.token, token.bytes)
        assert [top.logprob for top in tops] == sorted((t.logprob for t in tops), reverse=True)


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
def test_an_echo_has_the_prompts_log_probabilities(
    server: Server, alone: LLM, stream: bool
) -> None:
    wanted = output(alone, logprobs=True, prompt_logprobs=True)
    with server.client() as client:
        asked = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "n": 2}
        answer = client.completions.create(**asked, logprobs=1, echo=True, stream=stream)
        values: list[list[float | None]] = [[], []]
        tokens: list[list[str]] = [[], []]
        offsets: list[list[int]] = [[], []]
        tops: list[list[Any]] = [[], []]
        texts = ["", ""]
        for each in answer if stream else [answer]:
            for choice in each.choices:
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
