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
"""What the tiny model's template makes of them."""


def continued(server: Server, prompt: str = PROMPT, **options: Any) -> str:
    """Return what follows a prompt, as completions have it."""
    asked = {"prompt": prompt, "seed": 3, "max_tokens": 24} | options
    text: str = server.post("completions", **asked).json["choices"][0]["text"]
    return text


# ----------------------------------------------------------------------------- chat completions


def test_a_chat_continues_what_the_template_makes_of_it(server: Server) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, seed=3, max_completion_tokens=24
        )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", continued(server))
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.total_tokens == len(PROMPT) + 24


def test_a_stream_says_the_same_in_parts(server: Server) -> None:
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
    assert "".join(delta.content or "" for delta in deltas) == continued(server)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_async_client_and_its_helper_for_streams(server: Server) -> None:
    async def ask() -> tuple[str | None, str | None]:
        async with server.async_client() as client:
            asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 3}
            whole = await client.chat.completions.create(**asked, max_tokens=24)
            async with client.chat.completions.stream(**asked, max_tokens=24) as stream:
                with pytest.raises(Exception, match="length limit"):  # the helper's own opinion
                    await stream.get_final_completion()
                parts = stream.current_completion_snapshot.choices[0].message.content
            return whole.choices[0].message.content, parts

    text = continued(server)
    assert asyncio.run(ask()) == (text, text)


def test_a_developer_is_the_system(server: Server) -> None:
    messages = [{**MESSAGES[0], "role": "developer"}, *MESSAGES[1:]]
    answer = server.post("chat/completions", messages=messages, seed=3, max_tokens=24).json
    assert answer["choices"][0]["message"]["content"] == continued(server)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat_say_which_bytes_a_token_has(
    server: Server, stream: bool
) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, **asked, logprobs=True, top_logprobs=1, stream=stream
        )
        found = [
            token
            for each in (answer if stream else [answer])
            for token in each.choices[0].logprobs.content
        ]
    data = b"".join(bytes(token.bytes) for token in found)
    assert data.decode(errors="replace") == continued(server, temperature=0)
    for token in found:
        (likeliest,) = token.top_logprobs
        assert (likeliest.token, likeliest.bytes) == (token.token, token.bytes)


def test_choices_of_a_chat_stream_side_by_side(server: Server) -> None:
    asked = {"messages": MESSAGES, "seed": 3, "n": 3, "max_tokens": 24, "stop": ["q", "z"]}
    texts, roles = [""] * 3, [0] * 3
    for chunk in server.post("chat/completions", **asked, stream=True).events:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles[choice["index"]] += "role" in choice["delta"]
    assert roles == [1, 1, 1]
    assert texts == [continued(server, seed=3 + at, stop=["q", "z"]) for at in range(3)]


def test_without_a_limit_a_chat_has_all_the_room_there_is() -> None:
    with running(kv_cache_tokens=160) as server:
        answer = server.post(
            "chat/completions", messages=MESSAGES, ignore_eos=True, temperature=0
        ).json
        assert answer["usage"]["total_tokens"] == 161


def test_a_model_without_a_template_says_so(server: Server) -> None:
    prompts = server.service.prompts
    template, prompts._chat_template = prompts._chat_template, None
    try:
        asked: dict[str, Any] = {"chat/completions": {"messages": MESSAGES}}
        for path, said in (asked | {"responses": {"input": "x"}}).items():
            refused = server.post(path, **said)
            assert refused.status == 400
            assert refused.error["code"] == "no_chat_template"
            assert "--chat-template" in refused.error["message"]
    finally:
        prompts._chat_template = template


def test_a_template_of_ones_own() -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    with running(chat_template=template) as server:
        answer = server.post("chat/completions", messages=MESSAGES, seed=3, max_tokens=24).json
        assert answer["choices"][0]["message"]["content"] == continued(
            server, "[Be brief.][Who\nam I?][You.][Sure?]"
        )


def test_a_template_that_cannot_be_read_is_refused_before_anybody_asks() -> None:
    said = r"chat template: line 1: .*; use another one with --chat-template FILE"
    with pytest.raises(ConfigError, match=said), running(chat_template="{% for %}"):
        pass


def test_a_template_that_refuses_messages_is_quoted() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with running(chat_template=template) as server:
        refused = server.post("chat/completions", messages=MESSAGES)
        assert (refused.status, refused.error["param"]) == (400, "messages")
        assert "roles must alternate" in refused.error["message"]


FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_loops_is_refused_before_anybody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "_TEMPLATE_TIMEOUT_S", 0.5)
    said = r"chat template: timed out after 0.5 s for one short message; use another one"
    with pytest.raises(ConfigError, match=said), running(chat_template=FOR_EVER):
        pass


def test_a_template_that_loops_for_some_messages_does_not_hold_up_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = "{% if messages[0].content == 'loop' %}" + FOR_EVER + "{% endif %}Hello"
    with running(chat_template=template) as server:
        monkeypatch.setattr(reading, "_TEMPLATE_TIMEOUT_S", 0.5)
        looping = [{"role": "user", "content": "loop"}]
        refused = server.post("chat/completions", messages=looping, max_tokens=2)
        assert (refused.status, refused.error["param"]) == (400, "messages")
        assert "timed out after 0.5 s" in refused.error["message"]
        monkeypatch.setattr(reading, "_TEMPLATE_TIMEOUT_S", 60)
        assert server.post("chat/completions", messages=MESSAGES, max_tokens=2).status == 200


# ------------------------------------------------------------------------------------ responses


def test_a_response_says_what_a_chat_says(server: Server) -> None:
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
    assert answer.output_text == continued(server)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.total_tokens == len(PROMPT) + 24


def test_a_response_as_a_stream_is_numbered_and_ends_whole(server: Server) -> None:
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
    text = continued(server, "user: Hi\nassistant:", max_tokens=20)
    assert "".join(event.delta for event in events if hasattr(event, "delta")) == text
    last: Any = events[-1]
    assert last.response.output_text == text


def test_the_helper_for_streams_of_responses(server: Server) -> None:
    async def ask() -> str:
        async with (
            server.async_client() as client,
            client.responses.stream(model=MODEL, input="Hi", temperature=0) as stream,
        ):
            events = [event async for event in stream]
            return "".join(e.delta for e in events if e.type == "response.output_text.delta")

    assert asyncio.run(ask())


def test_a_response_may_be_sent_back(server: Server) -> None:
    """As clients do that go on with a conversation."""
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
    assert second.output_text == continued(server, prompt)


def test_a_response_that_the_model_ends_is_completed(server: Server) -> None:
    """The likeliest token after some prompts is the one that ends a text."""
    for at in range(60):
        asked = {"input": f"{at}", "temperature": 0, "max_output_tokens": 200}
        answer = server.post("responses", **asked).json
        if answer["status"] == "completed":
            assert answer["incomplete_details"] is None
            assert answer["usage"]["output_tokens"] < 200
            return
    pytest.skip("no prompt of these has such a text")
