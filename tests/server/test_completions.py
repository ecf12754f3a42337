"""``/v1/completions`` by OpenAI's own client, and beside what the engine generates alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from openai import NOT_GIVEN

from roseinfer import LLM, SamplingParams
from tests.server.served import MODEL

if TYPE_CHECKING:
    from tests.server.served import Server

PROMPT = "Once upon a time"
EXTENSIONS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_k": -1},
    {"min_p": 0.2},
    {"repetition_penalty": 1.3},
    {"ignore_eos": True},
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.5},
    {"top_p": 0.5},
    {"max_tokens": 40},
    {"stop": "a"},
    {"stop": ["b", "\n", "the"]},
    {"seed": -5},
    {"user": "somebody"},
    {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1},
    *({"extra_body": each} for each in EXTENSIONS),
]


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM("tiny", device="cpu", dtype="float32", kv_cache_tokens=8192, prefix_cache=False)


def expected(llm: LLM, prompt: Any, options: dict[str, Any]) -> tuple[str | None, str]:
    """Generate without a server what these options ask one for."""
    given = {"temperature": 1.0, "seed": 7, "max_tokens": 16} | options
    given |= given.pop("extra_body", {})
    for unused in ("user", "presence_penalty", "frequency_penalty", "logit_bias", "best_of"):
        given.pop(unused, None)
    if given.get("top_k") == -1:
        del given["top_k"]
    stop = given.pop("stop", ())
    params = SamplingParams(
        max_new_tokens=given.pop("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        **given,
    )
    (output,) = llm.generate([prompt], params)
    return output.text, output.finish_reason


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("stream", [False, True])
def test_every_option_means_what_the_engine_means_by_it(
    server: Server, alone: LLM, options: dict[str, Any], stream: bool
) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "seed": 7, "stream": stream} | options
    with server.client() as client:
        answer = client.completions.create(**asked)
        if stream:
            choices = [chunk.choices[0] for chunk in answer]
            got = "".join(each.text for each in choices), choices[-1].finish_reason
            assert all(each.finish_reason is None for each in choices[:-1])
        else:
            (choice,) = answer.choices
            got = choice.text, choice.finish_reason
    assert got == expected(alone, PROMPT, options)


def test_the_async_client_gets_the_same(server: Server, alone: LLM) -> None:
    async def ask() -> tuple[str, str]:
        async with server.async_client() as client:
            asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "seed": 7}
            whole = await client.completions.create(**asked)
            stream = await client.completions.create(**asked, stream=True)
            parts = [chunk.choices[0].text async for chunk in stream]
            return whole.choices[0].text, "".join(parts)

    text, _ = expected(alone, PROMPT, {})
    assert asyncio.run(ask()) == (text, text)


def test_many_choices_for_many_prompts(server: Server, alone: LLM) -> None:
    """Choice ``i`` of a prompt has the seed plus ``i``."""
    prompts: list[Any] = [PROMPT, "A rose is"]
    wanted = [expected(alone, prompt, {"seed": 7 + at})[0] for prompt in prompts for at in range(3)]
    assert len(set(wanted)) == len(wanted)
    with server.client() as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": prompts, "n": 3, "seed": 7}
        answer = client.completions.create(**asked)
        assert [choice.index for choice in answer.choices] == [*range(6)]
        assert [choice.text for choice in answer.choices] == wanted
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(PROMPT) + len("A rose is")
        assert answer.usage.completion_tokens == 6 * 16
        texts = [""] * 6
        for chunk in client.completions.create(**asked, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted


def test_choices_without_a_seed_differ(server: Server) -> None:
    answer = server.post("completions", prompt=PROMPT, n=4).json
    assert len({choice["text"] for choice in answer["choices"]}) == 4


def test_choices_share_what_is_stored_of_their_prompt(server: Server) -> None:
    prompt = "A prompt of its own, of several blocks, that is computed once: " * 3
    before = server.llm.engine.prefix_hits
    server.post("completions", prompt=prompt, n=3, max_tokens=4)
    blocks = len(prompt) // 16
    assert server.llm.engine.prefix_hits - before >= 2 * 16 * (blocks - 1)


@pytest.mark.parametrize(
    "prompt", [list(PROMPT.encode()), [list(PROMPT.encode())], [PROMPT]], ids=["ids", "lists", "1"]
)
def test_token_ids_are_prompts_too(server: Server, alone: LLM, prompt: Any) -> None:
    with server.client() as client:
        answer = client.completions.create(model=MODEL, prompt=prompt, seed=7, echo=True)
    assert answer.choices[0].text == PROMPT + (expected(alone, PROMPT, {})[0] or "")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_comes_before_each_text(server: Server, stream: bool) -> None:
    asked: dict[str, Any] = {"prompt": ["one", "two"], "n": 2, "echo": True, "stream": stream}
    answer = server.post("completions", **asked)
    texts = [""] * 4
    for each in answer.events if stream else [answer.json]:
        for choice in each["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [text[:3] for text in texts] == ["one", "one", "two", "two"]
    assert all("one" not in text[3:] and "two" not in text[3:] for text in texts)


def test_top_p_0_leaves_the_likeliest_token(server: Server) -> None:
    likeliest, narrowed = (
        server.post("completions", prompt=PROMPT, **only).json["choices"][0]["text"]
        for only in ({"temperature": 0}, {"top_p": 0})
    )
    assert likeliest == narrowed


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_openais_shape(server: Server, alone: LLM, stream: bool) -> None:
    params = SamplingParams(temperature=0, max_new_tokens=12, logprobs=True)
    (output,) = alone.generate([PROMPT], params)
    tokens: list[str] = []
    logprobs: list[float] = []
    offsets: list[int] = []
    with server.client() as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0}
        answer = client.completions.create(**asked, max_tokens=12, logprobs=0, stream=stream)
        for each in answer if stream else [answer]:
            found = each.choices[0].logprobs
            assert found is not None
            tokens += found.tokens or []
            logprobs += found.token_logprobs or []
            offsets += found.text_offset or []
    assert logprobs == pytest.approx(output.logprobs, abs=1e-4)
    data = b"".join(
        bytes.fromhex(token[6:].replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
    )
    assert data.decode(errors="replace") == output.text
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


def test_usage_comes_last_and_only_if_it_is_asked_for(server: Server) -> None:
    with server.client() as client:
        for options, counted in (
            (NOT_GIVEN, []),
            ({"include_usage": False}, []),
            ({"include_usage": True}, [9]),
        ):
            chunks = list(
                client.completions.create(
                    model=MODEL,
                    prompt="x",
                    max_tokens=9,
                    temperature=0,
                    stream=True,
                    stream_options=options,
                )
            )
            found = [chunk.usage for chunk in chunks if chunk.usage is not None]
            assert [usage.completion_tokens for usage in found] == counted
            if counted:
                assert chunks[-1].choices == []


def test_usage_so_far_is_in_every_chunk_if_it_is_asked_for(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": "x", "max_tokens": 9, "temperature": 0, "stream": True}
    answer = server.post("completions", **asked, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in answer.events]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    assert answer.data.endswith(b"data: [DONE]\n\n")


def test_tokens_found_in_the_prefix_cache_are_said(server: Server) -> None:
    asked = {"prompt": "These words are asked for twice, and found the second time.", "seed": 1}
    cached = [
        server.post("completions", **asked).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert cached == [0, 48]


def test_a_text_ends_where_the_model_has_no_more_positions(server: Server) -> None:
    answer = server.post(
        "completions", prompt="x" * 1000, max_tokens=5000, ignore_eos=True, temperature=0
    ).json
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["finish_reason"] == "length"
