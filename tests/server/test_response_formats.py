"""Structured outputs, requested with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.server.clients import Call, both_clients
from tests.server.served import MODEL

if TYPE_CHECKING:
    from tests.server.served import Server

MESSAGES: list[Any] = [{"role": "user", "content": "Who?"}]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Literal["Ann", "Bé"]
    old: bool
    tags: list[Literal["x", "y"]]


FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": Person.model_json_schema(), "strict": True},
}


def test_chat_follows_a_schema(server: Server) -> None:
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format=FORMAT, max_tokens=300, n=4, seed=1
        )
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    texts = [str(choice.message.content) for choice in answer.choices]
    assert len(set(texts)) > 1
    for text in texts:
        Person.model_validate_json(text)


def test_structured_stream_equals_the_whole_response(server: Server) -> None:
    options = {"messages": MESSAGES, "response_format": FORMAT, "max_tokens": 300, "seed": 5}
    whole = server.post("chat/completions", **options).json["choices"][0]["message"]["content"]
    events = server.post("chat/completions", **options, stream=True).events
    parts = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(parts) == whole
    assert len(parts) > 10
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@both_clients
def test_parser_of_the_client(server: Server, call_api: Call) -> None:
    chats: dict[str, Any] = {"messages": MESSAGES, "response_format": Person, "max_tokens": 300}
    (chat,) = call_api(server, "chat.completions.parse", model=MODEL, **chats, seed=2)
    responses = {"input": "Who?", "text_format": Person, "max_output_tokens": 300}
    (response,) = call_api(server, "responses.parse", model=MODEL, **responses)
    assert isinstance(chat.choices[0].message.parsed, Person)
    assert isinstance(response.output_parsed, Person)


def test_async_client_parses_a_structured_stream(server: Server) -> None:
    async def run_client() -> Any:
        async with (
            server.async_client() as client,
            client.chat.completions.stream(
                model=MODEL, messages=MESSAGES, response_format=Person, max_tokens=300
            ) as stream,
        ):
            return (await stream.get_final_completion()).choices[0].message.parsed

    assert isinstance(asyncio.run(run_client()), Person)


def test_json_object_format(server: Server) -> None:
    options = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "n": 12, "seed": 1}
    answer = server.post("chat/completions", **options, max_tokens=200).json
    texts: dict[str, list[str]] = {choice["finish_reason"]: [] for choice in answer["choices"]}
    for choice in answer["choices"]:
        texts[choice["finish_reason"]].append(choice["message"]["content"])
        assert choice["message"]["content"].startswith("{")
    assert all(isinstance(json.loads(text), dict) for text in texts.get("stop", []))


@pytest.mark.parametrize("stream", [False, True])
def test_response_reports_its_format(server: Server, stream: bool) -> None:
    schema_format = {"type": "json_schema", "name": "person", "schema": Person.model_json_schema()}
    answer = server.post(
        "responses",
        input="Who?",
        text={"format": schema_format},
        max_output_tokens=300,
        stream=stream,
    )
    body = answer.events[-1]["response"] if stream else answer.json
    assert body["status"] == "completed"
    assert body["text"]["format"] == schema_format | {"strict": None, "description": None}
    Person.model_validate_json(body["output"][0]["content"][0]["text"])
    plain = server.post("responses", input="Who?", max_output_tokens=2).json
    assert plain["text"] == {"format": {"type": "text"}}


def test_logprobs_are_among_allowed_tokens(server: Server) -> None:
    """A forced token has probability 1, and no other token is reported."""
    options = {"messages": MESSAGES, "response_format": FORMAT, "max_tokens": 300}
    answer = server.post("chat/completions", **options, logprobs=True, top_logprobs=3).json
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "{"
    assert content[0]["logprob"] == 0
    assert [each["token"] for each in content[0]["top_logprobs"]] == ["{"]
    assert any(len(each["top_logprobs"]) == 3 for each in content)
    for each in content:
        tops = [top["logprob"] for top in each["top_logprobs"]]
        assert all(math.isfinite(own) for own in [each["logprob"], *tops])
