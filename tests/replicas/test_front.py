"""The process that listens, before replicas that a test plays: what it says when one is lost."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, IncompleteRead
from typing import TYPE_CHECKING, Any

import openai
import pytest

from roseinfer.config import ServerConfig
from roseinfer.replicas.front import ForwardedRequest, ReplicaLost, ReplicaProxy
from roseinfer.server.access_log import RequestLogEntry
from roseinfer.server.generation import Usage
from roseinfer.server.http_server import HttpServer, open_listener

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from starlette.types import Message

    Part = list[Message] | RequestLogEntry | Exception

PATIENCE = 20
CHUNK = {"id": "1", "object": "text_completion", "created": 1, "model": "tiny"}


@dataclass
class Played:
    """Replicas that answer as they are told, and keep what they were asked."""

    parts: list[Part] = field(default_factory=list)
    asked: list[ForwardedRequest] = field(default_factory=list)
    left: list[bool] = field(default_factory=list)
    were_cut: bool = False

    async def answer(
        self, asked: ForwardedRequest
    ) -> AsyncGenerator[list[Message] | RequestLogEntry, None]:
        self.asked.append(asked)
        whole = False
        try:
            for part in self.parts:
                if isinstance(part, Exception):
                    raise part
                yield part
                await asyncio.sleep(0.01)
            whole = True
        finally:
            self.left.append(not whole)

    async def metrics(self) -> list[bytes]:
        head = b"# HELP vllm:a A.\n# TYPE vllm:a gauge\n"
        return [head + b'vllm:a{engine="0"} 1.0\n', head + b'vllm:a{engine="1"} 2.0\n']

    async def ready(self) -> bool:
        return not self.were_cut

    def abort(self) -> None:
        self.were_cut = True


@dataclass
class Listening:
    played: Played
    front: ReplicaProxy
    port: int
    lines: list[str]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def line(self) -> dict[str, Any]:
        """Return the line of the only request, once it is there."""
        end = threading.Event()
        for _ in range(PATIENCE * 100):
            if self.lines:
                break
            end.wait(0.01)
        (line,) = self.lines
        return dict(json.loads(line))


@contextmanager
def on_listening(*parts: Part, **config: Any) -> Iterator[Listening]:
    played, lines = Played([*parts]), list[str]()
    front = ReplicaProxy(
        played, ServerConfig(**{"port": 0, "api_key": None} | config), lines.append
    )
    begun = threading.Event()
    with open_listener("127.0.0.1", 0) as listener:
        server = HttpServer(front.app, front, begun.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        assert begun.wait(PATIENCE)
        try:
            yield Listening(played, front, listener.getsockname()[1], lines)
        finally:
            server.end()
            thread.join(PATIENCE)
    assert not thread.is_alive()


def head(kind: bytes, status: int = 200) -> list[Message]:
    headers = [(b"content-type", kind), (b"x-request-id", b"of-the-replica")]
    return [{"type": "http.response.start", "status": status, "headers": headers}]


def body(data: bytes, more: bool = True) -> list[Message]:
    return [{"type": "http.response.body", "body": data, "more_body": more}]


def chunk(text: str) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
    return b"data: " + json.dumps(CHUNK | {"choices": [choice]}).encode() + b"\n\n"


STREAM = b"text/event-stream; charset=utf-8"
REQUEST_LOG_KEY = RequestLogEntry("of-the-replica", usage=Usage(3, 2, 1))


def test_an_answer_is_that_of_the_replica_and_its_tokens_are_logged() -> None:
    parts: list[Part] = [
        head(b"application/json"),
        [*body(b'{"a":'), *body(b"1}"), *body(b"", False)],
        REQUEST_LOG_KEY,
    ]
    with on_listening(*parts) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions?x=1", b'{"b": 2}')
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b'{"a":1}')
        name = answer.headers.get_all("x-request-id")
        connection.close()
        line = server.line()
        (asked,) = server.played.asked
    assert name == [asked.id] == [line["id"]]
    assert asked.body == b'{"b": 2}'
    assert (asked.scope["method"], asked.scope["path"]) == ("POST", "/v1/completions")
    assert asked.scope["query_string"] == b"x=1"
    assert (line["status"], line["prompt_tokens"], line["completion_tokens"]) == (200, 3, 2)
    assert "left" not in line
    assert server.played.left == [False]


def test_one_that_had_not_begun_is_told_to_come_again() -> None:
    with on_listening(ReplicaLost()) as server:
        status, data = server.ask("POST", "/v1/completions", {})
        line = server.line()
    assert status == 503
    assert json.loads(data)["error"]["code"] == "replica_lost"
    assert (line["status"], line["error"]) == (503, "ReplicaLost")


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_a_stream_that_breaks_off_says_so_and_has_no_end(path: str) -> None:
    with on_listening(head(STREAM), body(chunk("so far")), ReplicaLost()) as server:
        with pytest.raises(IncompleteRead) as broken:
            server.ask("POST", f"/v1/{path}", {})
        line = server.line()
    said = broken.value.partial
    assert said.startswith(chunk("so far"))
    assert b"[DONE]" not in said
    error = json.loads(said.rpartition(b"event: error\ndata: ")[2])["error"]
    assert error["code"] == "replica_lost"
    assert line["error"] == "ReplicaLost"


def test_openais_client_raises_where_a_stream_breaks_off() -> None:
    with on_listening(head(STREAM), body(chunk("so far")), ReplicaLost()) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="tiny", prompt="x", stream=True)
            assert next(stream).choices[0].text == "so far"
            with pytest.raises(openai.APIError, match="another replica will answer"):
                next(stream)


def test_an_answer_in_parts_that_breaks_off_has_no_end_either() -> None:
    parts: list[Part] = [head(b"application/json"), body(b'{"a":'), ReplicaLost()]
    with on_listening(*parts) as server, pytest.raises(IncompleteRead) as broken:
        server.ask("POST", "/v1/completions", {})
    assert broken.value.partial == b'{"a":'


def test_who_leaves_cancels_what_the_replica_does() -> None:
    parts = [head(STREAM), *(body(chunk("x")) for _ in range(1000))]
    with on_listening(*parts) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", b"{}")
        connection.getresponse().read(10)
        connection.close()
        line = server.line()
    assert server.played.left == [True]
    assert line["client_disconnected"] is True


def test_the_key_and_the_limit_are_looked_at_before_a_replica_is_asked() -> None:
    with on_listening(
        head(b"text/plain"), body(b"", False), api_key="rose", max_body_bytes=9
    ) as server:
        assert server.ask("GET", "/v1/models")[0] == 401
        right = {"authorization": "Bearer rose"}
        assert server.ask("POST", "/v1/completions", {"a": "long" * 9}, **right)[0] == 413
        assert not server.played.asked
        assert server.ask("GET", "/v1/models", **right)[0] == 200
        assert server.ask("GET", "/health") == (200, b'{"alive":true}')
        assert len(server.played.asked) == 1


def test_metrics_are_those_of_all_and_one_that_is_ready_is_enough() -> None:
    with on_listening() as server:
        assert server.ask("GET", "/metrics")[1].decode().splitlines()[2:] == [
            'vllm:a{engine="0"} 1.0',
            'vllm:a{engine="1"} 2.0',
        ]
        assert server.ask("GET", "/ready") == (200, b'{"ready":true}')
        server.front.admission.draining = True
        assert server.ask("GET", "/ready")[0] == 503
        assert server.ask("GET", "/health")[0] == 200
        status, data = server.ask("POST", "/v1/completions", {})
        assert (status, json.loads(data)["error"]["code"]) == (503, "draining")
        assert not server.played.asked


def test_when_the_time_is_up_the_replicas_are_told_to_cut() -> None:
    parts = [head(STREAM), *(body(chunk("x")) for _ in range(300)), body(b"", False)]
    with on_listening(*parts, drain_seconds=0.1) as server:
        asking = threading.Thread(target=server.ask, args=("POST", "/v1/completions", {}))
        asking.start()
        while not server.played.asked:
            pass
    asking.join(PATIENCE)
    assert server.played.were_cut
