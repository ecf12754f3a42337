"""Ignored fields: values that change nothing are accepted, since clients send them unasked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.server.served import MODEL, REQUIRED

if TYPE_CHECKING:
    from tests.server.served import Server

EVERYWHERE: list[dict[str, Any]] = [
    {"metadata": {"for": "nobody"}},
    {"metadata": {}},
    {"prompt_cache_key": "mine"},
    {"prompt_cache_options": {}},
    {"prompt_cache_retention": "in_memory"},
    {"safety_identifier": "somebody"},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"store": False},
    {"stream": False},
    {"temperature": 1},
    {"top_k": -1},
    {"top_p": 1},
    {"user": "somebody"},
]
CHOICES: list[dict[str, Any]] = [
    {"frequency_penalty": 0},
    {"logit_bias": {}},
    {"logit_bias": {"5": 0, "6": 0.0}},
    {"n": 1},
    {"presence_penalty": 0},
    {"stop": []},
    {"stream_options": {}},
    {"stream_options": {"include_usage": False, "include_obfuscation": False}},
]
COMPLETIONS: list[dict[str, Any]] = [{"best_of": 1}, {"echo": False}, {"suffix": ""}]
CHATS: list[dict[str, Any]] = [
    {"function_call": "none"},
    {"functions": []},
    {"logprobs": False, "top_logprobs": 0},
    {"modalities": ["text"]},
    {"parallel_tool_calls": True},
    {"reasoning_effort": "none"},
    {"response_format": {"type": "text"}},
    {"tools": [], "tool_choice": "none"},
    {"tool_choice": "auto"},
    {"verbosity": "medium"},
]
RESPONSES: list[dict[str, Any]] = [
    {"background": False},
    {"context_management": []},
    {"include": []},
    {"parallel_tool_calls": True},
    {"reasoning": {}},
    {"reasoning": {"effort": None, "summary": None}},
    {"reasoning": {"effort": "none"}},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
    {"tools": [], "tool_choice": "auto"},
    {"top_logprobs": 0},
    {"truncation": "disabled"},
]
NULL = {
    "completions": "best_of echo frequency_penalty logit_bias logprobs max_tokens n "
    "presence_penalty seed stop stream stream_options suffix temperature top_p user",
    "chat/completions": "audio frequency_penalty function_call functions logit_bias logprobs "
    "max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls "
    "prediction presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention "
    "reasoning_effort response_format safety_identifier seed service_tier stop store stream "
    "stream_options temperature tool_choice tools top_logprobs top_p user verbosity "
    "web_search_options",
    "responses": "background context_management conversation include instructions "
    "max_output_tokens max_tool_calls metadata moderation parallel_tool_calls "
    "previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention "
    "reasoning safety_identifier service_tier store stream stream_options temperature text "
    "tool_choice tools top_logprobs top_p truncation user",
}
"""All optional fields of the client for each endpoint."""


def text_of(server: Server, path: str, **options: Any) -> str:
    limit = {"max_output_tokens" if path == "responses" else "max_tokens": 6}
    answer = server.post(path, **REQUIRED[path] | {"seed": 1} | limit | options)
    assert answer.status == 200, (options, answer.json)
    if path == "responses":
        return str(answer.json["output"][0]["content"][0]["text"])
    (choice,) = answer.json["choices"]
    return str(choice["text"] if path == "completions" else choice["message"]["content"])


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("completions", EVERYWHERE + CHOICES + COMPLETIONS),
        ("chat/completions", EVERYWHERE + CHOICES + CHATS),
        ("responses", EVERYWHERE + RESPONSES),
    ],
)
def test_neutral_value_is_accepted(server: Server, path: str, values: list[dict[str, Any]]) -> None:
    text = text_of(server, path)
    for neutral in values:
        assert text_of(server, path, **neutral) == text, neutral


@pytest.mark.sampled_cases
@pytest.mark.parametrize("path", NULL)
def test_every_optional_field_may_be_null(server: Server, path: str) -> None:
    for name in NULL[path].split():
        text_of(server, path, **{name: None})


def test_message_of_a_response_can_be_sent_back_whole(server: Server) -> None:
    neutral: dict[str, Any] = {"tool_calls": [], "refusal": None, "annotations": [], "audio": None}
    message = {"role": "assistant", "content": "You."}
    options = REQUIRED["chat/completions"]["messages"]
    plain, full = (
        text_of(server, "chat/completions", messages=[*options, each, *options])
        for each in (message, message | neutral | {"function_call": None})
    )
    assert plain == full


def test_client_sends_ignored_fields(server: Server) -> None:
    with server.client() as client:
        answer = client.completions.create(
            model=MODEL, prompt="x", suffix="", max_tokens=2, extra_body={"store": False}
        )
    assert answer.choices[0].text
