"""Clients that go away: what was computed for them ends within a step, and nothing is held."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import EnginePath
from tests.server.load import Users
from tests.server.served import MODEL, PATIENCE, running

if TYPE_CHECKING:
    from tests.server.served import Server

LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 900, "ignore_eos": True}


def ask_and_leave(server: Server, body: dict[str, Any], wait: float | None) -> None:
    """Ask, wait for an answer's beginning or so many seconds, and hang up."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as asking:
        asking.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        if wait is None:
            assert asking.recv(100).startswith(b"HTTP/1.1 200")
        else:
            end = time.monotonic() + PATIENCE
            while not server.llm.engine.has_work and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(wait)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_cancels_what_it_asked_for(
    server: Server, stream: bool, n: int
) -> None:
    cancelled = server.llm.engine.path_counts[EnginePath.CANCELLED]
    ends = server.service.metrics.finish_reasons["abort"]
    generated = server.service.metrics.generation_tokens
    ask_and_leave(server, LONG | {"stream": stream, "n": n}, None if stream else 0.05)
    server.await_idleness()
    assert server.llm.engine.path_counts[EnginePath.CANCELLED] - cancelled == n
    assert server.service.metrics.finish_reasons["abort"] - ends == n
    assert server.service.metrics.generation_tokens - generated < 900 * n


def test_it_is_cancelled_within_a_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are so slow here that one more would be seen."""
    model = server.llm.engine.sequence_runner.model
    logits, done = model.logits, []

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        done.append(time.monotonic())
        return logits(*arguments)

    monkeypatch.setattr(model, "logits", slow)
    ask_and_leave(server, LONG | {"stream": True}, None)
    left = time.monotonic()
    server.await_idleness()
    assert len([end for end in done if end > left]) <= 2  # the one that runs, and one between


def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    with running(max_batch_size=1) as server:
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as first:
            data = json.dumps(LONG | {"stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
            first.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
            first.recv(100)
            ask_and_leave(server, LONG | {"prompt": "Second"}, 0.05)
            end = time.monotonic() + PATIENCE
            while server.llm.engine.num_waiting:
                assert time.monotonic() < end
                time.sleep(0.001)
        server.await_idleness()
    assert '"client_disconnected": true' in "".join(server.lines)


def test_a_reader_that_stops_reading_is_paused_and_others_go_on() -> None:
    """Its text waits in buffers of a bounded size."""
    with running(send_buffer=4096) as server:
        data = json.dumps(LONG | {"stream": True, "n": 8, "logprobs": 0}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        with socket.socket() as asking:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            asking.connect(("127.0.0.1", server.port))
            asking.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
            end = time.monotonic() + 2 * PATIENCE
            while not server.llm.engine._scheduler.paused:
                assert time.monotonic() < end, "nothing is ever paused"
                time.sleep(0.01)
            assert server.post("completions", prompt="beside", max_tokens=4).status == 200
        server.await_idleness()


SLOTS: dict[str, Any] = {"resident_decode": True, "run_ahead": 2, "cuda_graph": False}


@pytest.mark.parametrize(
    ("requests", "together", "engine"),
    [(400, 200, {"max_batch_size": 32}), (100, 50, SLOTS | {"max_batch_size": 8})],
    ids=["200 streams", "in slots, two steps ahead"],
)
def test_streams_with_random_disconnects_leave_nothing_behind(
    requests: int, together: int, engine: dict[str, Any]
) -> None:
    """Whoever stays gets the text that a request alone gets."""
    with running(kv_cache_tokens=2048, **engine) as server:
        users = Users(server.url, MODEL, random.Random(5), most_tokens=24)
        asyncio.run(users.learn())
        ends = asyncio.run(users.come(requests, together))
        server.await_idleness()
    assert ends.keys() - {"refused"} == {"whole", "left"}, ends
    assert ends["whole"] > requests / 4
    assert ends["left"] > requests / 8
