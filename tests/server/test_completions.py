"""``/v1/completions`` by OpenAI's own client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from openai import NOT_GIVEN

from roseinfer import SamplingParams
from tests.server.clients import Call, both_clients
from tests.server.served import MODEL

if TYPE_CHECKING:
    from roseinfer import LLM
    from tests.server.served import Server

PROMPT = "Once upon a time"


def completion_of(llm: LLM, prompt: str, seed: int = 7) -> str:
    """Return the completion of a prompt without a server."""
    params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=16)
    return llm.generate([prompt], params)[0].text or ""


@pytest.mark.slow
def test_several_prompts_with_several_choices(server: Server, alone: LLM) -> None:
    """Choice ``i`` of a prompt uses the seed plus ``i``."""
    prompts = [PROMPT, "A rose is"]
    expected = [completion_of(alone, prompt, 7 + at) for prompt in prompts for at in range(3)]
    assert len(set(expected)) == len(expected)
    with server.client() as client:
        options: dict[str, Any] = {"model": MODEL, "prompt": prompts, "n": 3, "seed": 7}
        answer = client.completions.create(**options)
        assert [choice.index for choice in answer.choices] == [*range(6)]
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(PROMPT) + len("A rose is")
        assert answer.usage.completion_tokens == 6 * 16
        texts = [""] * 6
        for chunk in client.completions.create(**options, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_choices_differ_without_a_seed(server: Server) -> None:
    answer = server.post("completions", prompt=PROMPT, n=4).json
    assert len({choice["text"] for choice in answer["choices"]}) == 4


def test_choices_share_the_blocks_of_their_prompt(server: Server) -> None:
    prompt = "A prompt of its own, of several blocks, that is computed once: " * 3
    before = server.llm.engine.prefix_hits
    server.post("completions", prompt=prompt, n=3, max_tokens=4)
    blocks = len(prompt) // 16
    assert server.llm.engine.prefix_hits - before >= 2 * 16 * (blocks - 1)


@pytest.mark.parametrize(
    "prompt", [list(PROMPT.encode()), [list(PROMPT.encode())], [PROMPT]], ids=["ids", "lists", "1"]
)
def test_token_ids_are_accepted_as_prompts(server: Server, alone: LLM, prompt: Any) -> None:
    with server.client() as client:
        answer = client.completions.create(model=MODEL, prompt=prompt, seed=7, echo=True)
    assert answer.choices[0].text == PROMPT + completion_of(alone, PROMPT)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_precedes_each_completion(server: Server, stream: bool) -> None:
    options: dict[str, Any] = {"prompt": ["one", "two"], "n": 2, "echo": True, "stream": stream}
    answer = server.post("completions", **options)
    texts = [""] * 4
    for each in answer.events if stream else [answer.json]:
        for choice in each["choices"]:
            texts[choice["index"]] += choice["text"]
    assert [text[:3] for text in texts] == ["one", "one", "two", "two"]
    assert all("one" not in text[3:] and "two" not in text[3:] for text in texts)


def test_top_p_0_is_greedy(server: Server) -> None:
    greedy, nucleus = (
        server.post("completions", prompt=PROMPT, **only).json["choices"][0]["text"]
        for only in ({"temperature": 0}, {"top_p": 0})
    )
    assert greedy == nucleus


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_the_bytes_and_offsets_of_tokens(server: Server, stream: bool) -> None:
    text = ""
    tokens: list[str] = []
    offsets: list[int] = []
    with server.client() as client:
        options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0}
        answer = client.completions.create(**options, max_tokens=12, logprobs=0, stream=stream)
        for each in answer if stream else [answer]:
            text += each.choices[0].text
            tokens += each.choices[0].logprobs.tokens
            offsets += each.choices[0].logprobs.text_offset
    data = b"".join(
        bytes.fromhex(token[6:].replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
    )
    assert data.decode(errors="replace") == text
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


def test_usage_is_the_last_chunk_if_requested(server: Server) -> None:
    with server.client() as client:
        for options, expected_counts in (
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
            usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
            assert [usage.completion_tokens for usage in usages] == expected_counts
            if expected_counts:
                assert chunks[-1].choices == []


@pytest.mark.parametrize(
    ("method", "prompt"),
    [
        ("completions.create", {"prompt": "x"}),
        ("chat.completions.create", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
@both_clients
def test_continuous_usage_is_in_every_chunk_if_requested(
    server: Server, call_api: Call, method: str, prompt: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "max_tokens": 9, "temperature": 0, "stream_options": options}
    parts = call_api(server, method, **body | prompt, stream=True)
    counts = [part.usage.completion_tokens for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_cached_tokens_are_reported(server: Server) -> None:
    options = {"prompt": "These words are asked for twice, and found the second time.", "seed": 1}
    cached = [
        server.post("completions", **options).json["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for _ in range(2)
    ]
    assert cached == [0, 48]


def test_completion_ends_at_the_last_position_of_the_model(server: Server) -> None:
    answer = server.post(
        "completions", prompt="x" * 1000, max_tokens=5000, ignore_eos=True, temperature=0
    ).json
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["finish_reason"] == "length"
