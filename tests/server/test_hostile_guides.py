"""Hostile guides: they get 400 with the reason, and other requests are served."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.guided import compiler
from roseinfer.guided.sandbox import _MAX_SLOW_TRIALS

if TYPE_CHECKING:
    from tests.server.served import Answer, Server

TIMEOUT_S = 60
LOWEST = -(1 << 63)
CRASH = {"type": "integer", "minimum": LOWEST, "maximum": LOWEST}
HEAVY = {"type": "integer", "multipleOf": 2147483648}


def request_with_schema(server: Server, schema: dict[str, Any]) -> Answer:
    schema_format = {"name": "f", "schema": schema, "strict": True}
    return server.post(
        "chat/completions",
        messages=[{"role": "user", "content": "Who?"}],
        response_format={"type": "json_schema", "json_schema": schema_format},
        max_tokens=20,
    )


def rejection_of(answer: Answer) -> str:
    assert (answer.status, answer.error["code"]) == (400, "invalid_value")
    assert answer.error["param"].startswith("response_format")
    return str(answer.error["message"])


@pytest.mark.slow
def test_other_requests_run_while_a_guide_is_tried(server: Server) -> None:
    assert request_with_schema(server, {"type": "boolean"}).status == 200
    tools_of_compiler = server.llm.engine._guide_compiler._tools
    assert tools_of_compiler is not None
    trial: Any = tools_of_compiler[2]
    with ThreadPoolExecutor(1) as threads:
        with trial._workers[1]._lock:  # as if another guide were tried for long
            hostile = threads.submit(request_with_schema, server, HEAVY)
            end = time.monotonic() + TIMEOUT_S
            while trial._slow_trials._value == _MAX_SLOW_TRIALS:
                assert time.monotonic() < end
                time.sleep(0.01)
            other = request_with_schema(server, {"enum": ["yes", "no"]})
            assert other.json["choices"][0]["message"]["content"] in ('"yes"', '"no"')
            stream = server.post("completions", prompt="Who?", stream=True, max_tokens=20)
            assert len(stream.events) > 1
            assert not hostile.done()
        answer = hostile.result(TIMEOUT_S)
    assert "2 s of processor time to compile" in rejection_of(answer)


def test_inexact_number_bounds_are_rejected(server: Server) -> None:
    for schema in (CRASH, {"type": "integer", "minimum": 10**300}):
        assert "up to which numbers are exact" in rejection_of(request_with_schema(server, schema))
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"x": CRASH}}}
    messages = [{"role": "user", "content": "Who?"}]
    tools = [{"type": "function", "function": tool}]
    answer = server.post("chat/completions", messages=messages, tools=tools)
    assert answer.status == 400
    assert "up to which numbers are exact" in answer.error["message"]


def test_compiler_crash_is_a_rejection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "reject_inexact_numbers", lambda _: None)
    assert "the compiler crashed on it" in rejection_of(request_with_schema(server, CRASH))
    assert request_with_schema(server, {"type": "boolean"}).status == 200


def test_too_complex_pattern_is_rejected(server: Server) -> None:
    pattern = {"type": "string", "pattern": "a?" * 30_000}
    assert "too many expressions" in rejection_of(request_with_schema(server, pattern))
