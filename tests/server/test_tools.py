"""Functions that a model calls, by OpenAI's own client."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import SamplingParams
from roseinfer.server.schemas.tools import FunctionCall, Tool, call_guide
from tests.server.clients import CLIENTS, Asking, by_both_clients
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
    found = json.loads(arguments)
    return (
        found.keys() == {"city", "now"}
        and found["city"] in ("Rome", "Orléans")
        and type(found["now"]) is bool
    )


def ask(server: Server, **given: Any) -> dict[str, Any]:
    asked = {"messages": MESSAGES, "tools": [WEATHER, NOW], "max_tokens": 300, "seed": 1} | given
    answer = server.post("chat/completions", **asked)
    assert answer.status == 200, answer.json
    found: dict[str, Any] = answer.json
    return found


@pytest.mark.parametrize("choice", ["required", NAMED], ids=str)
@by_both_clients
def test_a_function_that_must_be_called_is(server: Server, asking: Asking, choice: Any) -> None:
    asked = {"messages": MESSAGES, "tools": [NOW, WEATHER], "tool_choice": choice}
    (answer,) = asking(
        server, "chat.completions.create", model=MODEL, **asked, max_tokens=300, n=8, seed=1
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


def test_a_call_is_what_the_engine_writes_for_it(server: Server, alone: LLM) -> None:
    tools = [WEATHER, NOW]
    guide = call_guide([Tool(**tool).function for tool in tools], required=True)
    params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=300, guide=guide)
    prompt = f"tools: {json.dumps(tools, ensure_ascii=False)}\nuser: Weather?\nassistant:"
    (output,) = alone.generate([prompt], params)
    assert output.text is not None
    asked = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 300}
    asked |= {"model": MODEL, "seed": 1}
    for asking, stream in product(CLIENTS, (False, True)):
        name, arguments = "", ""
        for part in asking(server, "chat.completions.create", **asked, stream=stream):
            (choice,) = part.choices
            for call in (choice.delta if stream else choice.message).tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments
        called = [*json.loads(output.text).values()]
        assert called == [name, json.loads(arguments)], (asking, stream)


def test_a_stream_says_the_same_in_parts(server: Server) -> None:
    whole = ask(server, tool_choice=NAMED)["choices"][0]["message"]["tool_calls"][0]
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


def test_the_clients_own_helper_for_streams(server: Server) -> None:
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


def test_a_function_that_need_not_be_called_may_not_be(server: Server) -> None:
    """The tiny model then says what it says."""
    (choice,) = ask(server, max_tokens=30)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("written", ["{}", "Well. <tool_call>\n{}\n</tool_call>"], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_a_function_that_may_be_called(
    server: Server, monkeypatch: pytest.MonkeyPatch, written: str, stream: bool
) -> None:
    """The model is made to write a call, by a form that has no other text."""
    from roseinfer.guided.guide import Guide
    from roseinfer.server.schemas import chat

    call = '{"name": "weather", "arguments": {"city": "Rome", "now": true}}'
    text = written.replace("{}", call)
    monkeypatch.setattr(chat, "call_guide", lambda *_, **__: Guide(choice=(text,)))
    answer = server.post(
        "chat/completions", messages=MESSAGES, tools=[WEATHER], max_tokens=200, stream=stream
    )
    said = {"content": "", "arguments": "", "name": ""}
    parts = [event["choices"][0]["delta"] for event in answer.events] if stream else []
    for part in parts or [answer.json["choices"][0]["message"]]:
        said["content"] += part.get("content") or ""
        for each in part.get("tool_calls", ()):
            said["name"] += each["function"].get("name", "")
            said["arguments"] += each["function"]["arguments"]
    assert said["content"] == ("Well. " if "Well" in written else "")
    assert said["name"] == "weather"
    assert json.loads(said["arguments"]) == {"city": "Rome", "now": True}
    last = answer.events[-1] if stream else answer.json
    assert last["choices"][0]["finish_reason"] == "tool_calls"


def test_who_may_call_none_is_not_told_of_any(server: Server) -> None:
    without = ask(server, tools=None, max_tokens=20)
    none = ask(server, tool_choice="none", max_tokens=20)
    assert none["usage"] == without["usage"] | {
        "prompt_tokens_details": none["usage"]["prompt_tokens_details"]
    }
    assert none["choices"] == without["choices"]
    assert (
        ask(server, max_tokens=20)["usage"]["prompt_tokens"] > none["usage"]["prompt_tokens"] + 100
    )
    form = {"type": "json_object"}
    text = ask(server, tool_choice="none", response_format=form)["choices"][0]["message"]["content"]
    assert text.startswith("{")
    forced = ask(server, tool_choice="required", response_format=form)["choices"][0]
    assert forced["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_off(server: Server) -> None:
    most = ask(server, tool_choice=NAMED)["usage"]["completion_tokens"] - 5
    (choice,) = ask(server, tool_choice=NAMED, max_tokens=most)["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert call["function"]["arguments"].startswith("{")


def test_calls_and_what_they_returned_are_told_to_the_template(server: Server) -> None:
    with server.client() as client:
        asked: dict[str, Any] = {"model": MODEL, "tools": [NOW], "max_tokens": 100, "seed": 1}
        first = client.chat.completions.create(
            messages=MESSAGES, tool_choice="required", **asked
        ).choices[0]
        call = first.message.tool_calls[0]
        conversation = [
            *MESSAGES,
            first.message,
            {"role": "tool", "tool_call_id": call.id, "content": "noon"},
        ]
        answer = client.chat.completions.create(messages=conversation, **asked)
    said = json.dumps(
        [{"id": call.id, "type": "function", "function": {"name": "now", "arguments": {}}}]
    )
    prompt = (
        f"tools: {json.dumps([NOW])}\nuser: Weather?\nassistant: {said}\ntool: noon\nassistant:"
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "", "[1]", '{"x": NaN', "{" * 9999])
def test_arguments_that_are_no_object_are_told_as_they_came(arguments: str) -> None:
    assert FunctionCall(name="f", arguments=arguments).arguments_for_template == arguments
    assert FunctionCall(name="f", arguments='{"x": [1]}').arguments_for_template == {"x": [1]}


def test_a_call_that_was_cut_off_may_be_sent_back(server: Server) -> None:
    whole = ask(server, tool_choice=NAMED)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    most = whole["usage"]["completion_tokens"] - len(call["function"]["arguments"]) // 2
    (choice,) = ask(server, tool_choice=NAMED, max_tokens=most)["choices"]
    (call,) = choice["message"]["tool_calls"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["function"]["arguments"])
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[*MESSAGES, choice["message"]], max_tokens=2
        )
    said = json.dumps([call], ensure_ascii=False)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(
        f"user: Weather?\nassistant: {said}\nassistant:".encode()
    )


def test_a_template_that_knows_no_tools_is_no_place_for_them() -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with running(chat_template=template) as server:
        refused = server.post("chat/completions", messages=MESSAGES, tools=[NOW])
        assert (refused.status, refused.error["param"]) == (400, "tools")
        assert "does not support them" in refused.error["message"]
        taken = server.post("chat/completions", messages=MESSAGES, tools=[NOW], tool_choice="none")
        assert taken.status == 200
