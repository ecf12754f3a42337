"""Tool calls, by OpenAI's own client."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import SamplingParams
from roseinfer.server.schemas.tools import FunctionCall, Tool, call_guide
from tests.server.clients import CLIENTS, Call, both_clients
from tests.server.served import MODEL, running

if TYPE_CHECKING:
    from roseinfer import LLM
    from tests.server.served import Server

MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "now": {"type": "boolean"}},
            "required": ["city", "now"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Rome", "Orléans"]}},
        },
        "strict": True,
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def is_weather(arguments: str) -> bool:
    body = json.loads(arguments)
    return (
        body.keys() == {"city", "now"}
        and body["city"] in ("Rome", "Orléans")
        and type(body["now"]) is bool
    )


def chat_with_tools(server: Server, **more: Any) -> dict[str, Any]:
    options = {"messages": MESSAGES, "tools": [WEATHER, NOW], "max_tokens": 300, "seed": 1} | more
    answer = server.post("chat/completions", **options)
    assert answer.status == 200, answer.json
    body: dict[str, Any] = answer.json
    return body


@pytest.mark.sampled_cases
@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
@both_clients
def test_required_function_is_called(server: Server, call_api: Call, choice: Any) -> None:
    options = {"messages": MESSAGES, "tools": [NOW, WEATHER], "tool_choice": choice}
    (answer,) = call_api(
        server, "chat.completions.create", model=MODEL, **options, max_tokens=300, n=8, seed=1
    )
    names, ids = set(), set()
    for each in answer.choices:
        assert each.finish_reason == "tool_calls"
        assert each.message.content is None
        (call,) = each.message.tool_calls
        assert call.type == "function"
        names.add(call.function.name)
        ids.add(call.id)
        if call.function.name == "weather":
            assert is_weather(call.function.arguments)
        else:
            assert json.loads(call.function.arguments) == {}
    assert len(ids) == 8
    assert names == ({"weather"} if choice is NAMED else {"weather", "now"})


@pytest.mark.slow
def test_call_matches_the_completion_of_the_engine(server: Server, alone: LLM) -> None:
    tools = [WEATHER, NOW]
    guide = call_guide([Tool(**tool).function for tool in tools], required=True)
    params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=300, guide=guide)
    prompt = f"tools: {json.dumps(tools, ensure_ascii=False)}\nuser: Weather?\nassistant:"
    (output,) = alone.generate([prompt], params)
    assert output.text is not None
    options = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 300}
    options |= {"model": MODEL, "seed": 1}
    for call_api, stream in product(CLIENTS, (False, True)):
        name, arguments = "", ""
        for part in call_api(server, "chat.completions.create", **options, stream=stream):
            (choice,) = part.choices
            for call in (choice.delta if stream else choice.message).tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments
        expected_call = [*json.loads(output.text).values()]
        assert expected_call == [name, json.loads(arguments)], (call_api, stream)


def test_streamed_call_equals_the_whole_response(server: Server) -> None:
    whole = chat_with_tools(server, tool_choice=NAMED)["choices"][0]["message"]["tool_calls"][0]
    answer = server.post(
        "chat/completions", messages=MESSAGES, tools=[WEATHER, NOW], tool_choice=NAMED,
        max_tokens=300, seed=1, stream=True,
    )  # fmt: skip
    choices = [event["choices"][0] for event in answer.events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    calls = [each["delta"]["tool_calls"][0] for each in choices if "tool_calls" in each["delta"]]
    assert calls[0].keys() == {"index", "id", "type", "function"}
    assert calls[0]["function"]["name"] == "weather"
    assert all(each.keys() == {"index", "function"} for each in calls[1:])
    assert (
        "".join(each["function"]["arguments"] for each in calls) == whole["function"]["arguments"]
    )
    assert len(calls) > 10
    assert not any(each["delta"].get("content") for each in choices)
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["tool_calls"]


def test_stream_helper_of_the_client_parses_calls(server: Server) -> None:
    with (
        server.client() as client,
        client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=300
        ) as stream,
    ):
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls
    assert final.finish_reason == "tool_calls"
    assert is_weather(call.function.arguments)
    assert call.function.parsed_arguments == json.loads(call.function.arguments)


def test_optional_function_may_be_left_uncalled(server: Server) -> None:
    """The tiny model then generates plain text."""
    (choice,) = chat_with_tools(server, max_tokens=30)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("pattern", ["{}", "Well. <tool_call>\n{}\n</tool_call>"], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_optional_function_may_be_called(
    server: Server, monkeypatch: pytest.MonkeyPatch, pattern: str, stream: bool
) -> None:
    """A guide that allows only this text makes the model write a call."""
    from roseinfer.guided.guide import Guide
    from roseinfer.server.schemas import chat

    call = '{"name": "weather", "arguments": {"city": "Rome", "now": true}}'
    text = pattern.replace("{}", call)
    monkeypatch.setattr(chat, "call_guide", lambda *_, **__: Guide(choice=(text,)))
    answer = server.post(
        "chat/completions", messages=MESSAGES, tools=[WEATHER], max_tokens=200, stream=stream
    )
    received = {"content": "", "arguments": "", "name": ""}
    parts = [event["choices"][0]["delta"] for event in answer.events] if stream else []
    for part in parts or [answer.json["choices"][0]["message"]]:
        received["content"] += part.get("content") or ""
        for each in part.get("tool_calls", ()):
            received["name"] += each["function"].get("name", "")
            received["arguments"] += each["function"]["arguments"]
    assert received["content"] == ("Well. " if "Well" in pattern else "")
    assert received["name"] == "weather"
    assert json.loads(received["arguments"]) == {"city": "Rome", "now": True}
    last = answer.events[-1] if stream else answer.json
    assert last["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.slow
def test_tool_choice_none_hides_the_tools(server: Server) -> None:
    no_tools = chat_with_tools(server, tools=None, max_tokens=20)
    choice_none = chat_with_tools(server, tool_choice="none", max_tokens=20)
    assert choice_none["usage"] == no_tools["usage"] | {
        "prompt_tokens_details": choice_none["usage"]["prompt_tokens_details"]
    }
    assert choice_none["choices"] == no_tools["choices"]
    assert (
        chat_with_tools(server, max_tokens=20)["usage"]["prompt_tokens"]
        > choice_none["usage"]["prompt_tokens"] + 100
    )
    json_format = {"type": "json_object"}
    text = chat_with_tools(server, tool_choice="none", response_format=json_format)["choices"][0][
        "message"
    ]["content"]
    assert text.startswith("{")
    forced = chat_with_tools(server, tool_choice="required", response_format=json_format)[
        "choices"
    ][0]
    assert forced["finish_reason"] == "tool_calls"


@pytest.mark.slow
def test_call_ended_by_max_tokens_is_returned(server: Server) -> None:
    max_tokens = chat_with_tools(server, tool_choice=NAMED)["usage"]["completion_tokens"] - 5
    (choice,) = chat_with_tools(server, tool_choice=NAMED, max_tokens=max_tokens)["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert call["function"]["arguments"].startswith("{")


def test_calls_and_results_are_passed_to_the_template(server: Server) -> None:
    with server.client() as client:
        options: dict[str, Any] = {"model": MODEL, "tools": [NOW], "max_tokens": 100, "seed": 1}
        first = client.chat.completions.create(
            messages=MESSAGES, tool_choice="required", **options
        ).choices[0]
        call = first.message.tool_calls[0]
        conversation = [
            *MESSAGES,
            first.message,
            {"role": "tool", "tool_call_id": call.id, "content": "noon"},
        ]
        answer = client.chat.completions.create(messages=conversation, **options)
    received = json.dumps(
        [{"id": call.id, "type": "function", "function": {"name": "now", "arguments": {}}}]
    )
    prompt = (
        f"tools: {json.dumps([NOW])}\nuser: Weather?\nassistant: {received}\ntool: noon\nassistant:"
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "", "[1]", '{"x": NaN', "{" * 9999])
def test_arguments_that_are_not_an_object_are_passed_unchanged(arguments: str) -> None:
    assert FunctionCall(name="f", arguments=arguments).arguments_for_template == arguments
    assert FunctionCall(name="f", arguments='{"x": [1]}').arguments_for_template == {"x": [1]}


def test_incomplete_call_can_be_sent_back(server: Server) -> None:
    whole = chat_with_tools(server, tool_choice=NAMED)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    max_tokens = whole["usage"]["completion_tokens"] - len(call["function"]["arguments"]) // 2
    (choice,) = chat_with_tools(server, tool_choice=NAMED, max_tokens=max_tokens)["choices"]
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[*MESSAGES, choice["message"]], max_tokens=2
        )
    received = json.dumps([call], ensure_ascii=False)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(
        f"user: Weather?\nassistant: {received}\nassistant:".encode()
    )


@pytest.mark.slow
def test_template_without_tools_rejects_them() -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with running(chat_template=template) as server:
        response = server.post("chat/completions", messages=MESSAGES, tools=[NOW])
        assert (response.status, response.error["param"]) == (400, "tools")
        assert "does not support them" in response.error["message"]
        accepted = server.post(
            "chat/completions", messages=MESSAGES, tools=[NOW], tool_choice="none"
        )
        assert accepted.status == 200
