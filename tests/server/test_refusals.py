"""Rejected requests: status, param and code in OpenAI's error format."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.server.served import MODEL, REQUIRED, running

if TYPE_CHECKING:
    from tests.server.served import Server

CHAT: list[Any] = [{"role": "user", "content": "x"}]
UNKNOWN = "unknown_parameter"
INVALID = "invalid_value"
MISSING = "missing_required_parameter"
EVERYWHERE: list[tuple[dict[str, Any], str, str]] = [
    ({"no_such_option": 1}, "no_such_option", UNKNOWN),
    ({"tempature": 1}, "tempature", UNKNOWN),
    ({"temperature": "hot"}, "temperature", INVALID),
    ({"temperature": -0.1}, "temperature", INVALID),
    ({"temperature": 2.1}, "temperature", INVALID),
    ({"top_p": 1.1}, "top_p", INVALID),
    ({"top_k": -2}, "top_k", INVALID),
    ({"min_p": 2}, "min_p", INVALID),
    ({"repetition_penalty": 0}, "repetition_penalty", INVALID),
    ({"seed": 1.5}, "seed", INVALID),
    ({"seed": 1 << 70}, "seed", INVALID),
    ({"stream": "yes"}, "stream", INVALID),
    ({"ignore_eos": 1}, "ignore_eos", INVALID),
    ({"model": None}, "model", INVALID),
    ({"user": 5}, "user", INVALID),
    ({"store": True}, "store", INVALID),
    ({"store": 0}, "store", INVALID),
    ({"metadata": {"x": 1}}, "metadata.x", INVALID),
    ({"service_tier": "flex"}, "service_tier", INVALID),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention", INVALID),
]
CHOICES: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 0}, "n", INVALID),
    ({"n": 129}, "n", INVALID),
    ({"stop": [""]}, "stop.0", INVALID),
    ({"stop": "x" * 257}, "stop", INVALID),
    ({"stop": ["x"] * 33}, "stop", INVALID),
    ({"stop": 5}, "stop", INVALID),
    ({"stream_options": {"include_usage": True}}, "stream_options", INVALID),
    ({"stream": True, "stream_options": {"include": 1}}, "stream_options.include", UNKNOWN),
    ({"logit_bias": {"5": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {"5": 0, "6": False}}, "logit_bias", INVALID),
    ({"max_tokens": 0}, "max_tokens", INVALID),
    ({"presence_penalty": 2.5}, "presence_penalty", INVALID),
    ({"frequency_penalty": -2.5}, "frequency_penalty", INVALID),
]
COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", INVALID),
    ({"prompt": []}, "prompt", INVALID),
    ({"prompt": [""]}, "prompt", INVALID),
    ({"prompt": [1, "x"]}, "prompt", INVALID),
    ({"prompt": [True]}, "prompt", INVALID),
    ({"prompt": [[]]}, "prompt", INVALID),
    ({"prompt": ["x"] * 129}, "prompt", INVALID),
    ({"prompt": {"text": "x"}}, "prompt", INVALID),
    ({"prompt": [257]}, "prompt", INVALID),
    ({"prompt": [-1]}, "prompt", INVALID),
    ({"prompt": "x" * 1024}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * 5000}, "prompt", "context_length_exceeded"),
    ({"logprobs": 6}, "logprobs", INVALID),
    ({"logprobs": True}, "logprobs", INVALID),
    ({"best_of": 2}, "best_of", INVALID),
    ({"suffix": "end"}, "suffix", INVALID),
    ({"messages": CHAT}, "messages", UNKNOWN),
]


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def schema(name: str, json_schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": json_schema}}


TOOL, NAMED = tool(), tool()
TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "[]"}}
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", INVALID),
    ({"messages": "x"}, "messages", INVALID),
    ({"messages": [{"role": "user"}]}, "messages.0.content", MISSING),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", MISSING),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", INVALID),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content", MISSING),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages.0.content", MISSING),
    (
        {"messages": [{"role": "assistant", "tool_calls": [TOOL_CALL | {"type": "x"}]}]},
        "messages.0.tool_calls.0.type",
        INVALID,
    ),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", INVALID),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
        "messages.0.content.0.type",
        INVALID,
    ),
    ({"messages": CHAT * 500}, "messages", "context_length_exceeded"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", MISSING),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type", INVALID),
    ({"tools": [TOOL | {"type": "x"}]}, "tools.0.type", INVALID),
    ({"tools": [TOOL, TOOL]}, "tools", INVALID),
    ({"tools": [tool(name="f g")]}, "tools.0.function.name", INVALID),
    ({"tools": [tool(x=1)]}, "tools.0.function.x", UNKNOWN),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters", INVALID),
    ({"tools": [tool(parameters={"minProperties": "x"})]}, "tools", INVALID),
    ({"tools": [tool(parameters={"not": {}})]}, "tools", INVALID),
    ({"tools": [tool(parameters={"x": "y" * 70_000})]}, "tools", INVALID),
    ({"tools": [TOOL] * 129}, "tools", INVALID),
    ({"tool_choice": "required"}, "tool_choice", INVALID),
    ({"tool_choice": "any"}, "tool_choice", INVALID),
    ({"tool_choice": NAMED}, "tool_choice", INVALID),
    ({"tool_choice": NAMED, "tools": [tool(name="g")]}, "tool_choice", INVALID),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice.type", INVALID),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "tool_choice", INVALID),
    ({"response_format": {"type": "grammar"}}, "response_format", INVALID),
    ({"response_format": "json_object"}, "response_format", INVALID),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", MISSING),
    ({"response_format": schema("f g", {})}, "response_format.json_schema.name", INVALID),
    ({"response_format": schema("f", True)}, "response_format.json_schema.schema", INVALID),
    ({"response_format": schema("f", {"type": "strin"})}, "response_format", INVALID),
    ({"response_format": schema("f", {"uniqueItems": True})}, "response_format", INVALID),
    ({"response_format": schema("f", {"x": "y" * 70_000})}, "response_format", INVALID),
    ({"modalities": ["audio"]}, "modalities.0", INVALID),
    ({"functions": [{"name": "f"}]}, "functions", INVALID),
    ({"function_call": {"name": "f"}}, "function_call", INVALID),
    ({"reasoning_effort": "low"}, "reasoning_effort", INVALID),
    ({"verbosity": "high"}, "verbosity", INVALID),
    ({"audio": {"voice": "alloy"}}, "audio", INVALID),
    ({"web_search_options": {}}, "web_search_options", INVALID),
    ({"logprobs": 1}, "logprobs", INVALID),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", INVALID),
    ({"prompt": "x"}, "prompt", UNKNOWN),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", INVALID),
]
RESPONSES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", INVALID),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0", INVALID),
    ({"previous_response_id": "resp_1"}, "previous_response_id", INVALID),
    ({"conversation": "conv_1"}, "conversation", INVALID),
    ({"background": True}, "background", INVALID),
    ({"tools": [{"type": "web_search"}]}, "tools", INVALID),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", MISSING),
    ({"text": {"format": {"type": "grammar"}}}, "text.format", INVALID),
    (
        {"text": {"format": {"type": "json_schema", "name": "f", "schema": {"type": "x"}}}},
        "text.format",
        INVALID,
    ),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", INVALID),
    ({"text": {"verbosity": "low"}}, "text.verbosity", INVALID),
    ({"truncation": "auto"}, "truncation", INVALID),
    ({"include": ["file_search_call.results"]}, "include", INVALID),
    ({"max_output_tokens": 0}, "max_output_tokens", INVALID),
    ({"max_tokens": 5}, "max_tokens", UNKNOWN),
]
INVALID_BODIES = [
    *((path, *case) for path in REQUIRED for case in EVERYWHERE),
    *((path, *case) for path in ("completions", "chat/completions") for case in CHOICES),
    *(("completions", *case) for case in COMPLETIONS),
    *(("chat/completions", *case) for case in CHATS),
    *(("responses", *case) for case in RESPONSES),
]


INTERNAL_WORDS = ("guide", "Guide", "Input", "validation", "BEGIN_0")
"""Words of the engine, of pydantic and of the generated grammar."""


def test_every_invalid_value_is_reported_with_its_field(server: Server) -> None:
    for path, fields, param, code in INVALID_BODIES:
        response = server.post(path, **REQUIRED[path] | fields)
        status_and_code = response.status, response.error["code"]
        assert status_and_code == (400, code), (path, fields, response.json)
        assert (response.error["param"] or "").startswith(param), (path, fields, response.json)
        assert response.error["type"] == "invalid_request_error"
        message = response.error["message"]
        assert message.startswith(response.error["param"]), message
        assert not any(word in message for word in INTERNAL_WORDS), message


OTHERS = ": other values are not supported by this server"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,"}
NO_IMAGES = "images, audio and files are not supported by this server"
MESSAGES = [
    ("completions", {"stop": 5}, "stop must be a string or an array"),
    ("completions", {"max_tokens": 0}, "max_tokens must be at least 1, or 0 if echo is true"),
    ("completions", {"max_tokens": -1, "echo": True}, "max_tokens must be at least 0"),
    ("completions", {"stop": [""]}, "stop.0 must be a string that is not empty"),
    ("completions", {"stop": ["x"] * 33}, "stop must be an array of at most 32 items"),
    ("completions", {"prompt": ""}, "prompt must not be empty"),
    ("completions", {"prompt": ["x"] * 129}, "prompt must have at most 128 prompts"),
    ("completions", {"temperature": 2.5}, "temperature must be at most 2"),
    ("completions", {"repetition_penalty": 0}, "repetition_penalty must be at least 0.001"),
    ("completions", {"seed": 1.5}, "seed must be a whole number"),
    ("completions", {"stream": "yes"}, "stream must be true or false"),
    ("completions", {"logit_bias": {"5": 1}}, f"logit_bias must have only values of 0{OTHERS}"),
    ("completions", {"logit_bias": [1]}, "logit_bias must be an object"),
    ("completions", {"suffix": "end"}, f"suffix must be null or empty{OTHERS}"),
    ("completions", {"store": True}, f"store must be false{OTHERS}"),
    ("responses", {"tools": [{}]}, f"tools must be null or empty{OTHERS}"),
    ("responses", {"conversation": "x"}, f"conversation must be null{OTHERS}"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": 5}]},
        "messages.0.content must be a string or an array",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        f"messages.0.content.0.type must be 'text': {NO_IMAGES}",
    ),
    (
        "responses",
        {"input": [{"role": "user", "content": [INPUT_IMAGE]}]},
        f"input.0.content.0.type must be 'input_text' or 'output_text': {NO_IMAGES}",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "robot", "content": "x"}]},
        "messages.0.role must be 'system', 'developer', 'user', 'assistant' or 'tool'",
    ),
    (
        "chat/completions",
        {"response_format": schema("f", {"type": "strin"})},
        "response_format: the constraint cannot be compiled: Invalid type: strin",
    ),
]


@pytest.mark.parametrize(("path", "fields", "message"), MESSAGES)
def test_message_lists_the_valid_values(
    server: Server, path: str, fields: dict[str, Any], message: str
) -> None:
    assert server.post(path, **REQUIRED[path] | fields).error["message"] == message


def test_missing_field_is_reported(server: Server) -> None:
    for path, required in REQUIRED.items():
        for name in ("model", *required):
            body = {"model": MODEL, **required}
            del body[name]
            response = server.request("POST", f"/v1/{path}", body)
            assert (response.status, response.error["code"]) == (400, MISSING)
            assert response.error["param"] == name


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"5", b"\xff", b'{"model": "\\ud800"}', b"[" * 9999]
)
def test_body_that_is_not_a_json_object_is_rejected(server: Server, data: bytes) -> None:
    response = server.request("POST", "/v1/completions", data)
    assert response.status == 400
    assert response.error["type"] == "invalid_request_error"


def test_error_does_not_repeat_the_prompt(server: Server) -> None:
    for fields in ({"n": 0}, {"prompt": ["secret", 5]}, {"prompt": "secret" * 500}):
        body: dict[str, Any] = {"prompt": "secret"} | fields
        assert b"secret" not in server.post("completions", **body).data


def test_json_without_its_content_type_is_rejected(server: Server) -> None:
    """Only such bodies can be sent by a page of another site."""
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = server.request("POST", "/v1/completions", body, headers={"content-type": kind})
        assert (response.status, response.error["code"]) == (415, "unsupported_media_type")


def test_unknown_model_is_rejected(server: Server) -> None:
    for path, required in REQUIRED.items():
        response = server.post(path, **required | {"model": "gpt-4o"})
        assert (response.status, response.error["code"]) == (404, "model_not_found")
        assert response.error["param"] == "model"
    assert server.request("GET", "/v1/models/gpt-4o").status == 404


def test_unknown_paths_and_methods_have_the_same_error_format(server: Server) -> None:
    nowhere = server.request("GET", "/v1/embeddings")
    assert (nowhere.status, nowhere.error["type"]) == (404, "invalid_request_error")
    fields = server.request("GET", "/v1/completions")
    assert (fields.status, fields.headers["allow"]) == (405, "POST")
    assert fields.error["message"]


def test_client_raises_the_usual_errors(server: Server) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError) as response:
            client.completions.create(model=MODEL, prompt="x", suffix="y")
        assert (response.value.param, response.value.code) == ("suffix", INVALID)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")


def test_more_choices_than_the_queue_fits_are_rejected() -> None:
    with running(config={"max_queue": 4}, max_batch_size=4) as server:
        response = server.post("completions", prompt=["x"] * 3, n=3)
        assert (response.status, response.error["code"]) == (400, INVALID)
        assert server.post("completions", prompt=["x"] * 2, n=4).status == 200
