"""Server in a thread of the test's process, with access to its engine."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, OpenAI

from roseinfer import LLM
from roseinfer.config import ServerConfig
from roseinfer.engine_client.in_process import InProcessClient
from roseinfer.server.app import build_app
from roseinfer.server.http_server import HttpServer, open_listener
from roseinfer.server.service import Service
from tests.engine.test_random_mixes import assert_no_block_is_lost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer.server.connections import ConnectionLimits

PATIENCE = 120
"""Seconds after which a wait fails."""
MODEL = "tiny"
REQUIRED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Who?"},
    "chat/completions": {"messages": [{"role": "user", "content": "Who?"}]},
    "responses": {"input": "Who?"},
}
"""Required fields of each endpoint's body."""


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> dict[str, Any]:
        fields: dict[str, Any] = self.json["error"]
        assert fields.keys() == {"message", "type", "param", "code"}
        return fields

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of a stream, without the final ``[DONE]``."""
        lines = self.data.decode().split("\n\n")
        data = [line.split("data: ", 1)[1] for line in lines if "data: " in line]
        return [json.loads(each) for each in data if each != "[DONE]"]


@dataclass(slots=True)
class Server:
    """Running server."""

    llm: LLM
    served: InProcessClient
    service: Service
    http: HttpServer
    port: int
    lines: list[str] = field(default_factory=list)
    """Lines of its access log."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Any:
        """Return OpenAI's client, untyped since its overloads accept no dict of options."""
        settings: dict[str, Any] = {
            "api_key": "none",
            "max_retries": 0,
            "timeout": PATIENCE,
        } | options
        return OpenAI(base_url=f"{self.url}/v1", **settings)

    def async_client(self, **options: Any) -> Any:
        settings: dict[str, Any] = {
            "api_key": "none",
            "max_retries": 0,
            "timeout": PATIENCE,
        } | options
        return AsyncOpenAI(base_url=f"{self.url}/v1", **settings)

    def connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def request(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request without a client library. A body that is not bytes becomes JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        content_type = {} if body is None else {"content-type": "application/json"}
        connection = self.connection()
        try:
            connection.request(method, path, data, content_type | (headers or {}))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read())
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Answer:
        """Post to an endpoint below ``/v1``."""
        return self.request("POST", f"/v1/{path}", {"model": MODEL} | body)

    def line_of(self, answer: Answer) -> dict[str, Any]:
        """Return the access log line of a request, once it is written."""
        expected = answer.headers["x-request-id"]
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in map(json.loads, self.lines):
                if line["id"] == expected:
                    return dict(line)
            time.sleep(0.002)
        raise AssertionError(f"the access log has no line of {expected}")

    def metric(self, name: str, **labels: str) -> float:
        """Return one sample of ``/metrics``."""
        expected = {f'{label}="{value}"' for label, value in labels.items()}
        for line in self.request("GET", "/metrics").data.decode().splitlines():
            named, _, value = line.rpartition(" ")
            family, _, sample_labels = named.partition("{")
            if family == name and expected <= set(sample_labels.rstrip("}").split(",")):
                return float(value)
        raise AssertionError(f"/metrics has no {name} with {labels}")

    def await_idleness(self) -> None:
        """Wait until nothing is served, then check that all blocks are free."""
        end = time.monotonic() + PATIENCE
        thread = self.served._async_llm._thread
        while self.service.admission.num_open or thread._listeners or self.llm.engine.has_work:
            assert time.monotonic() < end, "a request is served forever"
            time.sleep(0.002)
        assert_no_block_is_lost(self.llm)


@contextmanager
def running(
    *,
    model: Any = MODEL,
    config: dict[str, Any] | None = None,
    chat_template: str | None = None,
    send_buffer: int | None = None,
    limits: ConnectionLimits | None = None,
    **engine: Any,
) -> Iterator[Server]:
    """Serve a model until the block ends, and check that nothing is held then.

    ``send_buffer`` is the number of bytes that the system buffers for a client that does not read.
    """
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_tokens": 8192,
        "block_size": 16,
    }
    llm = LLM(model, **options | engine)
    own = ServerConfig(host="127.0.0.1", port=0, **{"api_key": None} | (config or {}))
    served = InProcessClient(llm)
    service = Service(served, own.served_model_name or (MODEL,), own, chat_template)
    on_listening = threading.Event()
    lines: list[str] = []
    with open_listener(own.host, own.port) as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        http_server = HttpServer(
            build_app(service, lines.append), service, on_listening.set, limits
        )
        thread = threading.Thread(target=http_server.run, args=([listener],))
        port = listener.getsockname()[1]
        thread.start()
        try:
            assert on_listening.wait(PATIENCE)
            server = Server(llm, served, service, http_server, port, lines)
            yield server
            server.await_idleness()
        finally:
            http_server.end()
            thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not llm.engine.has_work
