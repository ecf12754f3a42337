"""Failures before and during a response: status, error events and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from roseinfer import NoDistribution, StepFailed
from roseinfer.server.access_log import AccessLog
from roseinfer.server.schemas.completions import Completion
from tests.server.served import MODEL, REQUIRED, running

if TYPE_CHECKING:
    from tests.server.served import Server


def fail_after(server: Server, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Make one forward pass run out of memory, after this many more tokens were sent."""
    model, metrics = server.llm.engine.sequence_runner.model, server.service.metrics
    logits, sent = model.logits, metrics.generation_tokens

    def broken(*arguments: Any) -> Any:
        if metrics.generation_tokens - sent < tokens:
            return logits(*arguments)
        monkeypatch.setattr(model, "logits", logits)
        raise MemoryError("no room, as was drawn")

    monkeypatch.setattr(model, "logits", broken)


@pytest.mark.sampled_cases
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUIRED)
def test_failure_before_the_first_token_sets_the_status(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    fail_after(server, monkeypatch, 0)
    response = server.post(path, **REQUIRED[path], stream=stream)
    assert (response.status, response.error["type"]) == (500, "server_error")
    assert response.error["code"] == "generation_failed"
    assert server.line_of(response)["error"] == StepFailed.__name__
    assert server.post(path, **REQUIRED[path]).status == 200


@pytest.mark.parametrize("path", REQUIRED)
def test_failed_stream_ends_with_an_error_event(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    fail_after(server, monkeypatch, 4)
    limit = {"max_output_tokens" if path == "responses" else "max_tokens": 900}
    options = {"stream": True, "ignore_eos": True, "temperature": 0} | limit
    answer = server.post(path, **REQUIRED[path], **options)
    assert answer.status == 200
    last = answer.events[-1]
    if path == "responses":
        assert (last["type"], last["code"]) == ("error", "generation_failed")
    else:
        assert last["error"]["type"] == "server_error"
        assert answer.data.endswith(b"data: [DONE]\n\n")


def test_client_raises_for_a_failed_stream(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_after(server, monkeypatch, 4)
    with server.client() as client:
        options: dict[str, Any] = {"prompt": "x", "max_tokens": 900, "temperature": 0}
        options["stream"] = True
        options["extra_body"] = {"ignore_eos": True}
        stream = client.completions.create(model=MODEL, **options)
        with pytest.raises(openai.APIError, match="the step that this request took part in failed"):
            list(stream)


def test_stopped_engine_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        assert server.request("GET", "/health").json == {"alive": True}

        def fail(*_: Any) -> Any:
            raise NoDistribution("never again")

        monkeypatch.setattr(server.llm.engine.sequence_runner.model, "logits", fail)
        statuses = [server.post("completions", prompt="x").status for _ in range(4)]
        assert statuses == [500, 500, 500, 503]
        assert server.request("GET", "/health").status == 503
        assert server.request("GET", "/ready").status == 503


def test_unexpected_error_is_logged_with_its_place_and_without_values(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(server.service, "generation", broken)
    response = server.post("completions", prompt="secret")
    assert (response.status, response.error["type"]) == (500, "server_error")
    assert b"secret" not in response.data
    stderr = capfd.readouterr().err
    assert "KeyError" in stderr
    assert "app.py" in stderr
    assert "secret" not in stderr.replace('raise KeyError("secret")', "")


def test_unexpected_error_in_a_stream_is_logged_without_values(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error occurs after the first chunk was sent, however many tokens it had."""
    sent: list[str] = []
    part, call = Completion.part, AccessLog.__call__

    async def recorded_call(self: AccessLog, scope: Any, receive: Any, send: Any) -> None:
        async def recorded_send(message: Any) -> None:
            await send(message)
            sent.append(message["type"])

        await call(self, scope, receive, recorded_send)

    def broken(*arguments: Any) -> Any:
        if sent:
            raise KeyError("secret")
        return part(*arguments)

    monkeypatch.setattr(AccessLog, "__call__", recorded_call)
    monkeypatch.setattr(Completion, "part", broken)
    answer = server.post("completions", prompt="x", max_tokens=900, stream=True, ignore_eos=True)
    assert answer.status == 200
    assert answer.events[-1]["error"]["type"] == "server_error"
    assert b"secret" not in answer.data
    assert server.line_of(answer)["error"] == "KeyError"
    stderr = capfd.readouterr().err
    assert "choices.py" in stderr
    assert "secret" not in stderr.replace('raise KeyError("secret")', "")


def test_failed_stream_is_in_the_access_log(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fail_after(server, monkeypatch, 4)
    options = {"input": "x", "max_output_tokens": 900, "stream": True, "ignore_eos": True}
    answer = server.post("responses", **options)
    assert server.line_of(answer)["error"] == "StepFailed"
    assert capfd.readouterr().err == ""
