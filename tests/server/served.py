"""A server in a thread of the test's process, and how its engine is looked into."""

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

PATIENCE = 20
"""Seconds after which something that hangs is given up."""
MODEL = "tiny"
NEEDED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Who?"},
    "chat/completions": {"messages": [{"role": "user", "content": "Who?"}]},
    "responses": {"input": "Who?"},
}
"""What each endpoint has to be asked."""


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
        found: dict[str, Any] = self.json["error"]
        assert found.keys() == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """What a stream sent, but for its last word."""
        lines = self.data.decode().split("\n\n")
        data = [line.split("data: ", 1)[1] for line in lines if "data: " in line]
        return [json.loads(each) for each in data if each != "[DONE]"]


@dataclass(slots=True)
class Server:
    """One that runs."""

    llm: LLM
    served: InProcessClient
    service: Service
    http: HttpServer
    port: int
    lines: list[str] = field(default_factory=list)
    """Its access log."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> Any:
        """Return OpenAI's client. Its types are those of calls without a dict of options."""
        known: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE} | options
        return OpenAI(base_url=f"{self.url}/v1", **known)

    def async_client(self, **options: Any) -> Any:
        known: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE} | options
        return AsyncOpenAI(base_url=f"{self.url}/v1", **known)

    def connection(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> Answer:
        """Ask without a client's help. A body that is no bytes becomes JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        said = {} if body is None else {"content-type": "application/json"}
        connection = self.connection()
        try:
            connection.request(method, path, data, said | (headers or {}))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read())
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Answer:
        """Post to an endpoint below ``/v1``."""
        return self.ask("POST", f"/v1/{path}", {"model": MODEL} | body)

    def line_of(self, answer: Answer) -> dict[str, Any]:
        """Return the line that the access log has of a request, once it is there."""
        wanted = answer.headers["x-request-id"]
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in map(json.loads, self.lines):
                if line["id"] == wanted:
                    return dict(line)
            time.sleep(0.002)
        raise AssertionError("there is no line of it")

    def metric(self, name: str, **labels: str) -> float:
        """Return one number of ``/metrics``."""
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        for line in self.ask("GET", "/metrics").data.decode().splitlines():
            named, _, value = line.rpartition(" ")
            found, _, own = named.partition("{")
            if found == name and wanted <= set(own.rstrip("}").split(",")):
                return float(value)
        raise AssertionError(f"there is no {name} with {labels}")

    def await_idleness(self) -> None:
        """Wait until nothing is served; whatever was held for it is free then."""
        end = time.monotonic() + PATIENCE
        thread = self.served._async_llm._thread
        while self.service.admission.num_open or thread._listeners or self.llm.engine.has_work:
            assert time.monotonic() < end, "something is served for ever"
            time.sleep(0.002)
        assert_no_block_is_lost(self.llm)


@contextmanager
def running(
    *,
    config: dict[str, Any] | None = None,
    chat_template: str | None = None,
    send_buffer: int | None = None,
    limits: ConnectionLimits | None = None,
    **engine: Any,
) -> Iterator[Server]:
    """Serve the tiny model until the block ends. Then nothing may be held.

    ``send_buffer`` bytes is what the system takes for a client that does not read.
    """
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_tokens": 8192,
        "block_size": 16,
    }
    llm = LLM("tiny", **options | engine)
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
