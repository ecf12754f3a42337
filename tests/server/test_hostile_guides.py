"""Forms that are made to do harm: they get 400 with the reason, and others go on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from roseinfer.guided import compiler
from roseinfer.guided.sandbox import _MAX_SLOW_TRIALS

if TYPE_CHECKING:
    import pytest

    from tests.server.served import Answer, Server

PATIENCE = 60
LOWEST = -(1 << 63)
CRASH = {"type": "integer", "minimum": LOWEST, "maximum": LOWEST}
HEAVY = {"type": "integer", "multipleOf": 2147483648}


def ask(server: Server, schema: dict[str, Any]) -> Answer:
    form = {"name": "f", "schema": schema, "strict": True}
    return server.post(
        "chat/completions",
        messages=[{"role": "user", "content": "Who?"}],
        response_format={"type": "json_schema", "json_schema": form},
        max_tokens=20,
    )


def refused(answer: Answer) -> str:
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert answer.error["param"].startswith("response_format")
    return str(answer.error["message"])


def test_others_go_on_while_a_form_is_tried(server: Server) -> None:
    assert ask(server, {"type": "boolean"}).status == 200
    made = server.llm.engine._guide_compiler._tools
    assert made is not None
    trial: Any = made[2]
    with ThreadPoolExecutor(1) as threads:
        with trial._workers[1]._lock:  # as if another were tried for long
            hostile = threads.submit(ask, server, HEAVY)
            end = time.monotonic() + PATIENCE
            while trial._slow_trials._value == _MAX_SLOW_TRIALS:
                assert time.monotonic() < end
                time.sleep(0.01)
            other = ask(server, {"enum": ["yes", "no"]})
            assert other.json["choices"][0]["message"]["content"] in ('"yes"', '"no"')
            stream = server.post("completions", prompt="Who?", stream=True, max_tokens=20)
            assert len(stream.events) > 1
            assert not hostile.done()
        answer = hostile.result(PATIENCE)
    assert "2 s of processor time to compile" in refused(answer)


def test_bounds_that_no_grammar_keeps_are_refused(server: Server) -> None:
    for schema in (CRASH, {"type": "integer", "minimum": 10**300}):
        assert "up to which numbers are exact" in refused(ask(server, schema))
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": CRASH}}}
    messages = [{"role": "user", "content": "Who?"}]
    tools = [{"type": "function", "function": tool}]
    answer = server.post("chat/completions", messages=messages, tools=tools)
    assert answer.status == 400
    assert "up to which numbers are exact" in answer.error["message"]


def test_a_crash_is_a_refusal(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "reject_inexact_numbers", lambda _: None)
    assert "the compiler crashed on it" in refused(ask(server, CRASH))
    assert ask(server, {"type": "boolean"}).status == 200


def test_a_pattern_that_is_too_hard_is_refused(server: Server) -> None:
    pattern = {"type": "string", "pattern": "a?" * 30_000}
    assert "too many expressions" in refused(ask(server, pattern))
