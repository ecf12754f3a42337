"""Disconnects: the request of a client that leaves ends within a step, and nothing is held."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import EnginePath
from tests.server.load import LoadClients
from tests.server.served import MODEL, PATIENCE, running

if TYPE_CHECKING:
    from tests.server.served import Server

LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 900, "ignore_eos": True}


def request_and_disconnect(server: Server, body: dict[str, Any], wait: float | None) -> None:
    """Send a request, wait for the response to begin or this many seconds, and disconnect."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        if wait is None:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            end = time.monotonic() + PATIENCE
            engine = server.llm.engine
            submitted = body.get("n", 1)
            while engine.num_waiting + engine.num_running < submitted and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(wait)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_cancels_the_request(server: Server, stream: bool, n: int) -> None:
    cancelled = server.llm.engine.path_counts[EnginePath.CANCELLED]
    ends = server.service.metrics.finish_reasons["abort"]
    generated = server.service.metrics.generation_tokens
    request_and_disconnect(server, LONG | {"stream": stream, "n": n}, None if stream else 0.05)
    server.await_idleness()
    assert server.llm.engine.path_counts[EnginePath.CANCELLED] - cancelled == n
    assert server.service.metrics.finish_reasons["abort"] - ends == n
    assert server.service.metrics.generation_tokens - generated < 900 * n


def test_disconnect_cancels_within_a_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are so slow here that an additional one would be noticed."""
    model = server.llm.engine.sequence_runner.model
    logits, step_ends = model.logits, []

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        step_ends.append(time.monotonic())
        return logits(*arguments)

    monkeypatch.setattr(model, "logits", slow)
    request_and_disconnect(server, LONG | {"stream": True}, None)
    disconnected_at = time.monotonic()
    server.await_idleness()
    assert (
        len([end for end in step_ends if end > disconnected_at]) <= 2
    )  # the running one, and one more


def test_disconnect_removes_a_queued_request() -> None:
    with running(max_batch_size=1) as server:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as first:
            data = json.dumps(LONG | {"stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
            first.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
            first.recv(100)
            request_and_disconnect(server, LONG | {"prompt": "Second"}, 0.05)
            end = time.monotonic() + PATIENCE
            while server.llm.engine.num_waiting:
                assert time.monotonic() < end
                time.sleep(0.001)
        server.await_idleness()
    assert '"client_disconnected": true' in "".join(server.lines)


def test_unread_stream_is_paused_while_others_run() -> None:
    """Its text waits in buffers of bounded size."""
    with running(send_buffer=4096) as server:
        data = json.dumps(LONG | {"stream": True, "n": 8, "logprobs": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
            end = time.monotonic() + 2 * PATIENCE
            while not server.llm.engine._scheduler.paused:
                assert time.monotonic() < end, "no request is paused"
                time.sleep(0.01)
            assert server.post("completions", prompt="other", max_tokens=4).status == 200
        server.await_idleness()


SLOTS: dict[str, Any] = {"resident_decode": True, "run_ahead": 2, "cuda_graph": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "together", "engine"),
    [(400, 200, {"max_batch_size": 32}), (100, 50, SLOTS | {"max_batch_size": 8})],
    ids=["200 streams", "50 streams in slots, run ahead"],
)
def test_random_disconnects_leave_nothing_held(
    requests: int, together: int, engine: dict[str, Any]
) -> None:
    """Clients that stay get the text that a request gets alone."""
    with running(kv_cache_tokens=2048, **engine) as server:
        clients = LoadClients(server.url, MODEL, random.Random(5), max_tokens=24)
        asyncio.run(clients.record_completions())
        ends = asyncio.run(clients.run(requests, together))
        server.await_idleness()
    assert ends.keys() - {"rejected"} == {"complete", "disconnected"}, ends
    assert ends["complete"] > requests / 4
    assert ends["disconnected"] > requests / 8
