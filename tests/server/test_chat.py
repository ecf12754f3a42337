"""``/v1/chat/completions`` and ``/v1/responses`` by OpenAI's own client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.errors import ConfigError
from roseinfer.server import prompts as reading
from tests.server.served import MODEL, running

if TYPE_CHECKING:
    from tests.server.served import Server

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": t} for t in ("Who", "am I?")]},
    {"role": "assistant", "content": "You."},
    {"role": "user", "content": "Sure?"},
]
PROMPT = "system: Be brief.\nuser: Who\nam I?\nassistant: You.\nuser: Sure?\nassistant:"
"""The prompt that the tiny model's template makes of the messages."""


def completion_of(server: Server, prompt: str = PROMPT, **options: Any) -> str:
    """Return the completion of a prompt by the completions endpoint."""
    options = {"prompt": prompt, "seed": 3, "max_tokens": 24} | options
    text: str = server.post("completions", **options).json["choices"][0]["text"]
    return text


# ----------------------------------------------------------------------------- chat completions


def test_chat_completes_the_prompt_of_its_template(server: Server) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=3, max_completion_tokens=24
        )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", completion_of(server))
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.total_tokens == len(PROMPT) + 24


def test_chat_stream_equals_the_whole_response(server: Server) -> None:
    with server.client() as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                seed=3,
                max_tokens=24,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == completion_of(server)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_async_client_and_its_stream_helper(server: Server) -> None:
    async def run_client() -> tuple[str | None, str | None]:
        async with server.async_client() as client:
            options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 3}
            whole = await client.chat.completions.create(**options, max_tokens=24)
            async with client.chat.completions.stream(**options, max_tokens=24) as stream:
                with pytest.raises(Exception, match="length limit"):  # raised by the helper
                    await stream.get_final_completion()
                parts = stream.current_completion_snapshot.choices[0].message.content
            return whole.choices[0].message.content, parts

    text = completion_of(server)
    assert asyncio.run(run_client()) == (text, text)


def test_developer_role_equals_the_system_role(server: Server) -> None:
    messages = [{**MESSAGES[0], "role": "developer"}, *MESSAGES[1:]]
    answer = server.post("chat/completions", messages=messages, seed=3, max_tokens=24).json
    assert answer["choices"][0]["message"]["content"] == completion_of(server)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_the_bytes_of_tokens(server: Server, stream: bool) -> None:
    options: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, **options, logprobs=True, top_logprobs=1, stream=stream
        )
        tokens = [
            token
            for each in (answer if stream else [answer])
            for token in each.choices[0].logprobs.content
        ]
    data = b"".join(bytes(token.bytes) for token in tokens)
    assert data.decode(errors="replace") == completion_of(server, temperature=0)
    for token in tokens:
        (top,) = token.top_logprobs
        assert (top.token, top.bytes) == (token.token, token.bytes)


def test_chat_choices_are_streamed_interleaved(server: Server) -> None:
    options = {"messages": MESSAGES, "seed": 3, "n": 3, "max_tokens": 24, "stop": ["q", "z"]}
    texts, roles = [""] * 3, [0] * 3
    for chunk in server.post("chat/completions", **options, stream=True).events:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles[choice["index"]] += "role" in choice["delta"]
    assert roles == [1, 1, 1]
    assert texts == [completion_of(server, seed=3 + at, stop=["q", "z"]) for at in range(3)]


def test_chat_without_max_tokens_uses_the_whole_cache() -> None:
    with running(kv_cache_tokens=160) as server:
        answer = server.post(
            "chat/completions", messages=MESSAGES, ignore_eos=True, temperature=0
        ).json
        assert answer["usage"]["total_tokens"] == 161


def test_model_without_a_chat_template_is_reported(server: Server) -> None:
    prompts = server.service.prompts
    template, prompts._chat_template = prompts._chat_template, None
    try:
        options: dict[str, Any] = {"chat/completions": {"messages": MESSAGES}}
        for path, body in (options | {"responses": {"input": "x"}}).items():
            response = server.post(path, **body)
            assert response.status == 400
            assert response.error["code"] == "no_chat_template"
            assert "--chat-template" in response.error["message"]
    finally:
        prompts._chat_template = template


def test_custom_chat_template_is_used() -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    with running(chat_template=template) as server:
        answer = server.post("chat/completions", messages=MESSAGES, seed=3, max_tokens=24).json
        assert answer["choices"][0]["message"]["content"] == completion_of(
            server, "[Be brief.][Who\nam I?][You.][Sure?]"
        )


def test_invalid_template_is_rejected_at_startup() -> None:
    body = r"chat template: line 1: .*; use another one with --chat-template FILE"
    with pytest.raises(ConfigError, match=body), running(chat_template="{% for %}"):
        pass


def test_error_raised_by_a_template_is_quoted() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with running(chat_template=template) as server:
        response = server.post("chat/completions", messages=MESSAGES)
        assert (response.status, response.error["param"]) == (400, "messages")
        assert "roles must alternate" in response.error["message"]


ENDLESS_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_endless_template_is_rejected_at_startup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_TEMPLATE_TIMEOUT_S", 0.5)
    body = r"chat template: timed out after 0.5 s for one short message; use another one"
    with pytest.raises(ConfigError, match=body), running(chat_template=ENDLESS_LOOP):
        pass


def test_endless_template_of_one_request_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = "{% if messages[0].content == 'loop' %}" + ENDLESS_LOOP + "{% endif %}Hello"
    with running(chat_template=template) as server:
        monkeypatch.setattr(reading, "_TEMPLATE_TIMEOUT_S", 0.5)
        looping = [{"role": "user", "content": "loop"}]
        response = server.post("chat/completions", messages=looping, max_tokens=2)
        assert (response.status, response.error["param"]) == (400, "messages")
        assert "timed out after 0.5 s" in response.error["message"]
        monkeypatch.setattr(reading, "_TEMPLATE_TIMEOUT_S", 60)
        assert server.post("chat/completions", messages=MESSAGES, max_tokens=2).status == 200


# ------------------------------------------------------------------------------------ responses


def test_response_equals_the_chat_completion(server: Server) -> None:
    with server.client() as client:
        answer = client.responses.create(
            model=MODEL,
            instructions="Be brief.",
            input=[
                {"role": "user", "content": [{"type": "input_text", "text": "Who\nam I?"}]},
                {"role": "assistant", "content": "You."},
                {"role": "user", "content": "Sure?"},
            ],
            max_output_tokens=24,
            extra_body={"seed": 3},
        )
    assert answer.output_text == completion_of(server)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.total_tokens == len(PROMPT) + 24


def test_response_stream_is_numbered_and_ends_with_the_response(server: Server) -> None:
    with server.client() as client:
        events = list(
            client.responses.create(
                model=MODEL, input="Hi", max_output_tokens=20, stream=True, extra_body={"seed": 3}
            )
        )
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert {*kinds[4:-4]} == {"response.output_text.delta"}
    text = completion_of(server, "user: Hi\nassistant:", max_tokens=20)
    assert "".join(event.delta for event in events if hasattr(event, "delta")) == text
    last: Any = events[-1]
    assert last.response.output_text == text


def test_stream_helper_of_responses(server: Server) -> None:
    async def run_client() -> str:
        async with (
            server.async_client() as client,
            client.responses.stream(model=MODEL, input="Hi", temperature=0) as stream,
        ):
            events = [event async for event in stream]
            return "".join(e.delta for e in events if e.type == "response.output_text.delta")

    assert asyncio.run(run_client())


def test_response_can_be_sent_back_as_input(server: Server) -> None:
    """Clients that continue a conversation do this."""
    with server.client() as client:
        first = client.responses.create(model=MODEL, input="Hi", max_output_tokens=9)
        items: list[Any] = [
            {"role": "user", "content": "Hi"},
            *(item.to_dict() for item in first.output),
            {"role": "user", "content": "Go on"},
        ]
        second = client.responses.create(
            model=MODEL, input=items, max_output_tokens=24, extra_body={"seed": 3}
        )
    prompt = f"user: Hi\nassistant: {first.output_text}\nuser: Go on\nassistant:"
    assert second.output_text == completion_of(server, prompt)


def test_response_ended_by_eos_is_completed(server: Server) -> None:
    """After some prompts the argmax is EOS."""
    for at in range(60):
        options = {"input": f"{at}", "temperature": 0, "max_output_tokens": 200}
        answer = server.post("responses", **options).json
        if answer["status"] == "completed":
            assert answer["incomplete_details"] is None
            assert answer["usage"]["output_tokens"] < 200
            return
    pytest.skip("no prompt of these ends with EOS")
