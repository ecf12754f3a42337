"""A request that fails while it is served, or in the middle of its stream, says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from roseinfer import NoDistribution, StepFailed
from roseinfer.server.access_log import AccessLog
from roseinfer.server.schemas.completions import Completion
from tests.server.served import MODEL, NEEDED, running

if TYPE_CHECKING:
    from tests.server.served import Server


def fail_after(server: Server, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Have one forward pass run out of memory, once so many more tokens were sent."""
    model, metrics = server.llm.engine.sequence_runner.model, server.service.metrics
    logits, sent = model.logits, metrics.generation_tokens

    def broken(*arguments: Any) -> Any:
        if metrics.generation_tokens - sent < tokens:
            return logits(*arguments)
        monkeypatch.setattr(model, "logits", logits)
        raise MemoryError("no room, as was drawn")

    monkeypatch.setattr(model, "logits", broken)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", NEEDED)
def test_a_step_that_fails_before_the_first_token_has_a_status(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    fail_after(server, monkeypatch, 0)
    failed = server.post(path, **NEEDED[path], stream=stream)
    assert (failed.status, failed.error["type"]) == (500, "server_error")
    assert failed.error["code"] == "generation_failed"
    assert server.line_of(failed)["error"] == StepFailed.__name__
    assert server.post(path, **NEEDED[path]).status == 200


@pytest.mark.parametrize("path", NEEDED)
def test_a_stream_that_breaks_off_ends_with_the_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    fail_after(server, monkeypatch, 4)
    limit = {"max_output_tokens" if path == "responses" else "max_tokens": 900}
    asked = {"stream": True, "ignore_eos": True, "temperature": 0} | limit
    answer = server.post(path, **NEEDED[path], **asked)
    assert answer.status == 200
    last = answer.events[-1]
    if path == "responses":
        assert (last["type"], last["code"]) == ("error", "generation_failed")
    else:
        assert last["error"]["type"] == "server_error"
        assert answer.data.endswith(b"data: [DONE]\n\n")


def test_the_client_raises_when_a_stream_breaks_off(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(server, monkeypatch, 4)
    with server.client() as client:
        asked: dict[str, Any] = {"prompt": "x", "max_tokens": 900, "temperature": 0}
        asked["stream"] = True
        asked["extra_body"] = {"ignore_eos": True}
        stream = client.completions.create(model=MODEL, **asked)
        with pytest.raises(openai.APIError, match="the step that this request took part in failed"):
            list(stream)


def test_an_engine_that_stopped_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        assert server.ask("GET", "/health").json == {"alive": True}

        def never(*_: Any) -> Any:
            raise NoDistribution("never again")

        monkeypatch.setattr(server.llm.engine.sequence_runner.model, "logits", never)
        statuses = [server.post("completions", prompt="x").status for _ in range(4)]
        assert statuses == [500, 500, 500, 503]
        assert server.ask("GET", "/health").status == 503
        assert server.ask("GET", "/ready").status == 503


def test_an_error_that_nobody_expected_says_where_and_not_what(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(server.service, "generation", broken)
    failed = server.post("completions", prompt="secret")
    assert (failed.status, failed.error["type"]) == (500, "server_error")
    assert b"secret" not in failed.data
    said = capfd.readouterr().err
    assert "KeyError" in said
    assert "app.py" in said
    assert "secret" not in said.replace('raise KeyError("secret")', "")


def test_the_same_in_the_middle_of_a_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the first pieces were sent, however many of them came at once."""
    sent: list[str] = []
    part, call = Completion.part, AccessLog.__call__

    async def noted(self: AccessLog, scope: Any, receive: Any, send: Any) -> None:
        async def send_noted(message: Any) -> None:
            await send(message)
            sent.append(message["type"])

        await call(self, scope, receive, send_noted)

    def broken(*told: Any) -> Any:
        if sent:
            raise KeyError("secret")
        return part(*told)

    monkeypatch.setattr(AccessLog, "__call__", noted)
    monkeypatch.setattr(Completion, "part", broken)
    answer = server.post("completions", prompt="x", max_tokens=900, stream=True, ignore_eos=True)
    assert answer.status == 200
    assert answer.events[-1]["error"]["type"] == "server_error"
    assert b"secret" not in answer.data
    assert server.line_of(answer)["error"] == "KeyError"
    said = capfd.readouterr().err
    assert "choices.py" in said
    assert "secret" not in said.replace('raise KeyError("secret")', "")


def test_a_stream_that_breaks_off_is_noted_in_the_log(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fail_after(server, monkeypatch, 4)
    asked = {"input": "x", "max_output_tokens": 900, "stream": True, "ignore_eos": True}
    answer = server.post("responses", **asked)
    assert server.line_of(answer)["error"] == "StepFailed"
    assert capfd.readouterr().err == ""
