"""The listening process with replicas played by a test: responses, and loss of a replica."""

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
class FakeReplicas:
    """Replicas that respond as configured, and record their requests."""

    parts: list[Part] = field(default_factory=list)
    requests: list[ForwardedRequest] = field(default_factory=list)
    cancellations: list[bool] = field(default_factory=list)
    aborted: bool = False

    async def answer(
        self, forwarded: ForwardedRequest
    ) -> AsyncGenerator[list[Message] | RequestLogEntry, None]:
        self.requests.append(forwarded)
        complete = False
        try:
            for part in self.parts:
                if isinstance(part, Exception):
                    raise part
                yield part
                await asyncio.sleep(0.01)
            complete = True
        finally:
            self.cancellations.append(not complete)

    async def metrics(self) -> list[bytes]:
        head = b"# HELP vllm:a A.\n# TYPE vllm:a gauge\n"
        return [head + b'vllm:a{engine="0"} 1.0\n', head + b'vllm:a{engine="1"} 2.0\n']

    async def ready(self) -> bool:
        return not self.aborted

    def abort(self) -> None:
        self.aborted = True


@dataclass
class ProxyServer:
    replicas: FakeReplicas
    front: ReplicaProxy
    port: int
    lines: list[str]

    def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def line(self) -> dict[str, Any]:
        """Return the log line of the only request, once it is written."""
        end = threading.Event()
        for _ in range(PATIENCE * 100):
            if self.lines:
                break
            end.wait(0.01)
        (line,) = self.lines
        return dict(json.loads(line))


@contextmanager
def on_listening(*parts: Part, **config: Any) -> Iterator[ProxyServer]:
    replicas, lines = FakeReplicas([*parts]), list[str]()
    front = ReplicaProxy(
        replicas, ServerConfig(**{"port": 0, "api_key": None} | config), lines.append
    )
    listening = threading.Event()
    with open_listener("127.0.0.1", 0) as listener:
        server = HttpServer(front.app, front, listening.set)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        assert listening.wait(PATIENCE)
        try:
            yield ProxyServer(replicas, front, listener.getsockname()[1], lines)
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


def test_response_of_a_replica_is_forwarded_and_logged() -> None:
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
        request_ids = answer.headers.get_all("x-request-id")
        connection.close()
        line = server.line()
        (forwarded,) = server.replicas.requests
    assert request_ids == [forwarded.id] == [line["id"]]
    assert forwarded.body == b'{"b": 2}'
    assert (forwarded.scope["method"], forwarded.scope["path"]) == ("POST", "/v1/completions")
    assert forwarded.scope["query_string"] == b"x=1"
    assert (line["status"], line["prompt_tokens"], line["completion_tokens"]) == (200, 3, 2)
    assert "client_disconnected" not in line
    assert server.replicas.cancellations == [False]


def test_request_of_a_lost_replica_gets_503_before_its_response() -> None:
    with on_listening(ReplicaLost()) as server:
        status, data = server.request("POST", "/v1/completions", {})
        line = server.line()
    assert status == 503
    assert json.loads(data)["error"]["code"] == "replica_lost"
    assert (line["status"], line["error"]) == (503, "ReplicaLost")


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_stream_of_a_lost_replica_has_an_error_and_no_end(path: str) -> None:
    with on_listening(head(STREAM), body(chunk("so far")), ReplicaLost()) as server:
        with pytest.raises(IncompleteRead) as failure:
            server.request("POST", f"/v1/{path}", {})
        line = server.line()
    received = failure.value.partial
    assert received.startswith(chunk("so far"))
    assert b"[DONE]" not in received
    error = json.loads(received.rpartition(b"event: error\ndata: ")[2])["error"]
    assert error["code"] == "replica_lost"
    assert line["error"] == "ReplicaLost"


def test_openai_client_raises_for_a_stream_of_a_lost_replica() -> None:
    with on_listening(head(STREAM), body(chunk("so far")), ReplicaLost()) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="tiny", prompt="x", stream=True)
            assert next(stream).choices[0].text == "so far"
            with pytest.raises(openai.APIError, match="another replica will answer"):
                next(stream)


def test_chunked_response_of_a_lost_replica_has_no_end() -> None:
    parts: list[Part] = [head(b"application/json"), body(b'{"a":'), ReplicaLost()]
    with on_listening(*parts) as server, pytest.raises(IncompleteRead) as failure:
        server.request("POST", "/v1/completions", {})
    assert failure.value.partial == b'{"a":'


def test_disconnect_cancels_the_request_of_the_replica() -> None:
    parts = [head(STREAM), *(body(chunk("x")) for _ in range(1000))]
    with on_listening(*parts) as server:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", b"{}")
        connection.getresponse().read(10)
        connection.close()
        line = server.line()
    assert server.replicas.cancellations == [True]
    assert line["client_disconnected"] is True


def test_auth_and_body_limit_are_checked_before_forwarding() -> None:
    with on_listening(
        head(b"text/plain"), body(b"", False), api_key="rose", max_body_bytes=9
    ) as server:
        assert server.request("GET", "/v1/models")[0] == 401
        authorization = {"authorization": "Bearer rose"}
        assert (
            server.request("POST", "/v1/completions", {"a": "long" * 9}, **authorization)[0] == 413
        )
        assert not server.replicas.requests
        assert server.request("GET", "/v1/models", **authorization)[0] == 200
        assert server.request("GET", "/health") == (200, b'{"alive":true}')
        assert len(server.replicas.requests) == 1


def test_metrics_are_merged_and_one_ready_replica_suffices() -> None:
    with on_listening() as server:
        assert server.request("GET", "/metrics")[1].decode().splitlines()[2:] == [
            'vllm:a{engine="0"} 1.0',
            'vllm:a{engine="1"} 2.0',
        ]
        assert server.request("GET", "/ready") == (200, b'{"ready":true}')
        server.front.admission.draining = True
        assert server.request("GET", "/ready")[0] == 503
        assert server.request("GET", "/health")[0] == 200
        status, data = server.request("POST", "/v1/completions", {})
        assert (status, json.loads(data)["error"]["code"]) == (503, "draining")
        assert not server.replicas.requests


@pytest.mark.slow
def test_replicas_are_aborted_after_drain_seconds() -> None:
    parts = [head(STREAM), *(body(chunk("x")) for _ in range(300)), body(b"", False)]
    with on_listening(*parts, drain_seconds=0.1) as server:
        client_thread = threading.Thread(
            target=server.request, args=("POST", "/v1/completions", {})
        )
        client_thread.start()
        while not server.replicas.requests:
            pass
    client_thread.join(PATIENCE)
    assert server.replicas.aborted
