"""Limits of clients before their requests are read: headers, bodies, time and connections."""

from __future__ import annotations

import json
import random
import re
import select
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.server import auth
from roseinfer.server.connections import MAX_BACKLOG, ConnectionLimits
from tests.python_process import ROOT
from tests.server.serve_process import serving
from tests.server.served import MODEL, PATIENCE, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.server.served import Server

LONG: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 900, "ignore_eos": True}
SHORT_LIMITS = ConnectionLimits(head_seconds=1.0, discard_seconds=0.2)
"""Limits short enough for a test. The server checks them once a second."""


@pytest.fixture(scope="module")
def strict_server() -> Iterator[Server]:
    with running(limits=SHORT_LIMITS) as server:
        yield server


@contextmanager
def connected(server: Server, *lines: str, end: bool = True) -> Iterator[socket.socket]:
    """Connect, and send the head of a request, or the beginning of one."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        if lines:
            connection.sendall(head(*lines, end=end))
        yield connection


def head(*lines: str, end: bool = True) -> bytes:
    first, *others = lines
    text = "".join(f"{line}\r\n" for line in (first, "Host: localhost", *others))
    return (text + "\r\n" * end).encode()


def completion_request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    lines = ("Content-Type: application/json", f"Content-Length: {len(data)}")
    return head("POST /v1/completions HTTP/1.1", *lines) + data


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the stream, which must not be a reset."""
    with connection.makefile("rb") as stream:
        return stream.read()


def error_of(answer: bytes) -> tuple[int, str | None]:
    """Return the status and code of an error that closes its connection."""
    lines, _, data = answer.partition(b"\r\n\r\n")
    assert re.search(rb"(?i)\r\nconnection: close", lines), answer
    assert re.search(rb"(?i)\r\nx-request-id: req-", lines), answer
    return int(lines.split()[1]), json.loads(data)["error"]["code"]


def await_condition(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def await_no_connection(server: Server) -> None:
    await_condition(lambda: not server.http.server_state.connections)
    assert not server.http._connections.idle
    assert server.http._connections.head_bytes == 0


# -------------------------------------------------------------------------------------- heads


TOO_MANY = [f"X-{at}: y" for at in range(100)]
HEADS = {
    "one header of 32 MB": [f"X: {'y' * (32 << 20)}"],
    "many headers of 32 MB": [f"X-{at}: {'y' * 1000}" for at in range(32_000)],
    "101 headers": TOO_MANY,
    "a long name": [f"{'x' * (64 << 10)}: y"],
}


@pytest.mark.parametrize("lines", HEADS.values(), ids=HEADS)
def test_headers_beyond_the_limits_are_rejected(server: Server, lines: list[str]) -> None:
    """A client that writes everything before it reads gets the error, too."""
    with connected(server, "POST /v1/completions HTTP/1.1", *lines) as connection:
        assert error_of(read_all(connection)) == (431, "headers_too_large")
    line = json.loads(server.lines[-1])
    assert (line["status"], line["path"], line["method"]) == (431, "/v1/completions", "POST")


@pytest.mark.parametrize("path", ["/" + "x" * (1 << 20), "/?" + "x" * (1 << 20)])
def test_long_path_is_rejected(server: Server, path: str) -> None:
    with connected(server, f"GET {path} HTTP/1.1") as connection:
        assert error_of(read_all(connection)) == (431, "headers_too_large")
    assert len(server.lines[-1]) < 600


def test_headers_within_the_limits_are_accepted(server: Server) -> None:
    lines = [f"X-{at}: {'y' * 600}" for at in range(98)]
    with connected(server, "GET /health HTTP/1.1", *lines, "Connection: close") as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_trailers_count_as_headers(server: Server) -> None:
    lines = ("POST /v1/completions HTTP/1.1", "Transfer-Encoding: chunked")
    with connected(server, *lines) as connection:
        trailers = "".join(f"{line}\r\n" for line in TOO_MANY)
        connection.sendall(f"1\r\n{{\r\n0\r\n{trailers}\r\n".encode())
        assert error_of(read_all(connection)) == (431, "headers_too_large")


def test_total_bytes_of_incomplete_heads_are_limited() -> None:
    with running(limits=ConnectionLimits(all_head_bytes=100_000)) as server, ExitStack() as stack:
        for _ in range(2):
            with connected(server, "GET / HTTP/1.1", f"X: {'y' * 40_000}", end=False):
                await_condition(lambda: server.http._connections.head_bytes > 40_000)
            await_no_connection(server)
        for _ in range(2):
            each = connected(server, "GET / HTTP/1.1", f"X: {'y' * 40_000}", end=False)
            stack.enter_context(each)
        await_condition(lambda: server.http._connections.head_bytes > 80_000)
        with connected(server, "GET / HTTP/1.1", f"X: {'y' * 40_000}", end=False) as third:
            answer = read_all(third)
        assert error_of(answer) == (503, "overloaded")
        assert b"retry-after: 1" in answer
        assert server.request("GET", "/health").status == 200


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00", b"no http\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_invalid_http_is_rejected(server: Server, data: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(data)
        assert error_of(read_all(connection)) == (400, "invalid_http")


@pytest.mark.slow
def test_slow_head_is_rejected(strict_server: Server) -> None:
    with connected(strict_server, "GET /health HTTP/1.1", end=False) as connection:
        assert error_of(read_all(connection)) == (408, "request_timeout")
    with connected(strict_server, "GET /health HTTP/1.1") as connection:
        connection.recv(1000)
        connection.sendall(b"GET /hea")  # the second request of a kept connection
        assert error_of(read_all(connection)) == (408, "request_timeout")
    await_no_connection(strict_server)


@pytest.mark.parametrize("data", [b"", b"\r\n"], ids=["nothing", "an empty line"])
def test_silent_connection_is_closed(strict_server: Server, data: bytes) -> None:
    with connected(strict_server) as connection:
        connection.sendall(data)
        assert read_all(connection) == b""


@pytest.mark.slow
def test_long_response_does_not_shorten_the_next_head_timeout(
    strict_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it arrives during the first response, which takes longer than a head may."""
    model = strict_server.llm.engine.sequence_runner.model
    logits = model.logits

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return logits(*arguments)

    monkeypatch.setattr(model, "logits", slow)
    with connected(strict_server) as connection:
        connection.sendall(
            completion_request(LONG | {"max_tokens": 35, "stream": True}) + b"GET /health HT"
        )
        time.sleep(2.5)
        connection.sendall(b"TP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        data = read_all(connection)
    assert b"data: [DONE]" in data
    assert data.count(b"HTTP/1.1 200 ") == 2
    assert b'{"alive":true}' in data


# -------------------------------------------------------------------------------------- bodies


WITH_BODY = ("POST /v1/completions HTTP/1.1", "Content-Type: application/json")


@pytest.fixture
def short_body_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_BODY_TIMEOUT_S", 1.0)


@pytest.mark.usefixtures("short_body_timeout")
@pytest.mark.parametrize("lines", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_slow_body_is_rejected(server: Server, lines: str) -> None:
    with connected(server, *WITH_BODY, lines) as connection:
        connection.sendall(b"1\r\n{\r\n")
        assert error_of(read_all(connection)) == (408, "request_timeout")
    assert json.loads(server.lines[-1])["status"] == 408


@pytest.mark.usefixtures("short_body_timeout")
def test_steady_body_is_accepted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte extends the deadline."""
    monkeypatch.setattr(auth, "_MIN_BODY_BYTES_PER_S", 10)
    data = json.dumps({"model": MODEL, "prompt": "x"}).encode().ljust(60)
    with connected(server, *WITH_BODY, "Content-Length: 60", "Connection: close") as connection:
        for at in range(0, 60, 10):
            connection.sendall(data[at : at + 10])
            time.sleep(0.3)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_total_bytes_of_incomplete_bodies_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auth, "_MAX_INCOMPLETE_BYTES", 1)
    with running(config={"max_body_bytes": 100_000}) as server, ExitStack() as stack:
        lines = (*WITH_BODY, "Content-Length: 100000")
        connections = [stack.enter_context(connected(server, *lines)) for _ in range(4)]
        for each in connections[:3]:
            each.sendall(b" " * 33_000)
        body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
        assert server.request("POST", "/v1/completions", body.ljust(2000)).status == 200
        connections[3].sendall(b" " * 33_000)
        (rejected,), _, _ = select.select(connections, [], [], PATIENCE)
        answer = read_all(rejected)
        assert error_of(answer) == (503, "overloaded")
        assert b"retry-after: 1" in answer
        stack.close()
        server.await_idleness()
        assert server.request("POST", "/v1/completions", body.ljust(100_000)).status == 200


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /health", 200),
        ("POST /health", 405),
        ("POST /nowhere", 404),
        ("PUT /v1/completions", 401),
        ("GET /v1/models", 401),
        ("POST /v1/completions", 401),
    ],
)
def test_unused_body_is_not_awaited(line: str, status: int) -> None:
    with (
        running(config={"api_key": "rose-key"}) as server,
        connected(server, f"{line} HTTP/1.1", f"Content-Length: {4 << 20}") as connection,
    ):
        connection.sendall(b" " * (1 << 20))
        assert connection.recv(12) == f"HTTP/1.1 {status}".encode()
        connection.sendall(b" " * (3 << 20))
        connection.sendall(head("GET /version HTTP/1.1", "Connection: close"))
        assert b'"version"' in read_all(connection)


@pytest.mark.parametrize("bound", ["time", "bytes"])
def test_discarded_body_bytes_are_limited(bound: str) -> None:
    limits = SHORT_LIMITS if bound == "time" else ConnectionLimits(max_discarded_bytes=1 << 20)
    with (
        running(limits=limits, config={"max_body_bytes": 10}) as server,
        connected(server, "GET /health HTTP/1.1", "Content-Length: 1000000000") as idle,
        connected(server, *WITH_BODY, "Content-Length: 1000000000") as closed,
    ):
        for connection in (idle, closed):
            assert connection.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 413")
            if bound == "bytes":
                connection.sendall(b" " * (1 << 20))
                with suppress(ConnectionResetError, BrokenPipeError):
                    connection.sendall(b" ")
        await_no_connection(server)


def test_expect_continue_closes_the_connection_after_an_error(server: Server) -> None:
    """The server cannot know if the client sends the body it did not ask for."""
    lines = ("POST /nowhere HTTP/1.1", "Content-Length: 50", "Expect: 100-continue")
    with connected(server, *lines) as connection:
        assert error_of(read_all(connection)) == (404, None)
    with connected(server, *WITH_BODY, "Content-Length: 30", "Expect: 100-continue") as connection:
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(json.dumps({"model": MODEL, "prompt": ""}).encode().ljust(30))
        assert error_of(read_all(connection))[0] == 400


# ---------------------------------------------------------------------------------- pipelines


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(
            completion_request(LONG | {"max_tokens": 30, "stream": True})
            + head("GET /version HTTP/1.1") * 10
            + head("GET /health HTTP/1.1", "Connection: close")
        )
        data = read_all(connection)
    assert data.count(b"HTTP/1.1 200 ") == 12
    assert data.index(b"[DONE]") < data.index(b'"version"') < data.index(b'"alive"')


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "invalid_request",
    [
        b"no http\r\n\r\n",
        head("GET / HTTP/1.1", *TOO_MANY),
        head("GET / HTTP/1.1") * 100,
        head("POST /v1/completions HTTP/1.1", "Transfer-Encoding: chunked") + b"x\r\n",
    ],
    ids=["no http", "headers", "too many", "a chunk"],
)
def test_error_of_a_pipelined_request_does_not_corrupt_the_previous_response(
    server: Server, invalid_request: bytes
) -> None:
    """The response is whole, and the connection ends with it."""
    with connected(server) as connection:
        connection.sendall(
            completion_request(LONG | {"max_tokens": 100, "stream": True}) + invalid_request
        )
        data = read_all(connection)
    assert data.count(b"HTTP/1.1") == 1
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await_no_connection(server)


def test_disconnect_cancels_all_pipelined_requests(server: Server) -> None:
    generated = server.service.metrics.generation_tokens
    with connected(server) as connection:
        connection.sendall(completion_request(LONG | {"stream": True}) * 3)
        connection.recv(10)
    server.await_idleness()
    assert server.service.metrics.generation_tokens - generated < 900
    line = json.loads(server.lines[-1])
    assert line["client_disconnected"]
    assert "error" not in line


def test_stalled_reader_is_disconnected() -> None:
    with running(limits=ConnectionLimits(stalled_seconds=0.5), send_buffer=4096) as server:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(completion_request(LONG | {"stream": True, "n": 8, "logprobs": 0}))
            await_condition(lambda: server.service.admission.num_open == 8)
            server.await_idleness()
        assert json.loads(server.lines[-1])["client_disconnected"]


# --------------------------------------------------------------------------------- connections


def test_longest_idle_connection_is_closed_for_a_new_one() -> None:
    with running(limits=ConnectionLimits(connections=4)) as server, ExitStack() as stack:
        connections = []
        for _ in range(4):
            each = stack.enter_context(connected(server))
            each.sendall(head("GET /version HTTP/1.1"))
            assert each.recv(12) == b"HTTP/1.1 200"
            connections.append(each)
        await_condition(lambda: len(server.http._connections.idle) == 4)
        assert server.request("GET", "/health").status == 200
        assert b"version" in read_all(connections[0])
        connections[1].sendall(head("GET /health HTTP/1.1", "Connection: close"))
        assert b"alive" in read_all(connections[1])


def test_many_silent_connections_do_not_stop_the_server() -> None:
    with running(limits=ConnectionLimits(connections=8)) as server, ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connected(server))
            stack.enter_context(connected(server, "GET / HTTP/1.1", end=False))
        for _ in range(3):
            assert server.request("GET", "/health").status == 200


def test_new_connection_is_rejected_and_logged_when_all_are_busy(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with running(limits=ConnectionLimits(connections=3)) as server, ExitStack() as stack:
        streams = [stack.enter_context(connected(server)) for _ in range(3)]
        for each in streams:
            each.sendall(completion_request(LONG | {"stream": True, "n": 8}))
            each.recv(10)
        for _ in range(2):
            with connected(server) as connection:
                answer = read_all(connection)
            assert error_of(answer) == (503, "overloaded")
            assert b"retry-after: 1" in answer
        stack.close()
        server.await_idleness()
        assert server.request("GET", "/health").status == 200
    lines = capfd.readouterr().err
    assert lines.count("all 3 connections are busy, new ones get 503") == 1


@pytest.mark.slow
def test_server_process_withstands_one_hostile_client() -> None:
    """Its memory hardly grows, and it serves other clients."""
    with serving(variables={"ROSEINFER_API_KEY": "rose-key"}) as server, ExitStack() as stack:

        def connections(*lines: str, end: bool = True) -> socket.socket:
            address = ("127.0.0.1", server.port)
            connection = stack.enter_context(socket.create_connection(address, PATIENCE))
            if lines:
                connection.sendall(head(*lines, end=end))
            return connection

        def healthy() -> bool:
            connection = connections("GET /health HTTP/1.1", "Connection: close")
            return b'{"alive":true}' in read_all(connection)

        assert healthy()
        before = peak_memory(server.process.pid)
        large = [f"X-{at}: {'y' * 1000}" for at in range(32_000)]
        assert error_of(read_all(connections("GET / HTTP/1.1", *large)))[0] == 431
        for _ in range(50):
            for line in ("GET /health HTTP/1.1", "POST /v1/completions HTTP/1.1"):
                connections(line, f"Content-Length: {4 << 20}").sendall(b" " * (2 << 20))
        for _ in range(1100):
            connections()
        assert healthy()
        assert peak_memory(server.process.pid) - before < 100 << 20
    assert [json.loads(line)["status"] for line in server.stdout_lines].count(401) == 50


def peak_memory(process: int) -> int:
    """Return the peak resident bytes of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


FEW_FILES = """
    import resource
    from roseinfer.server.connections import ConnectionLimits, raise_file_limit, _out_of_files

    resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))
    files = raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (files, {hard})
    assert not _out_of_files()
    limits = ConnectionLimits.for_open_files(files)
    print(files, limits.connections, limits.backlog)
    opened = []
    while not _out_of_files():
        opened.append(open("/dev/null"))
    print(len(opened) > files - 50)
"""


@pytest.mark.parametrize(
    ("hard", "lines"), [(100, "100 8 12"), (1024, "1024 768 128"), (4000, "4000 3372 500")]
)
def test_open_file_limit_is_raised(hard: int, lines: str) -> None:
    code = "\n".join(line[4:] for line in FEW_FILES.format(hard=hard).splitlines())
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert process.stdout.splitlines() == [lines, "True"]


def test_connection_limit_is_bounded_with_many_open_files() -> None:
    limits = ConnectionLimits.for_open_files(1 << 16)
    assert (limits.connections, limits.backlog) == (8192, MAX_BACKLOG)
    assert limits == ConnectionLimits()


def test_idle_connections_are_closed_and_logged_when_out_of_files(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running() as server, closing(server.connection()) as idle:
        idle.request("GET", "/version")
        idle.getresponse().read()
        await_condition(lambda: len(server.http._connections.idle) == 1)
        monkeypatch.setattr("roseinfer.server.connections._out_of_files", lambda: True)
        await_no_connection(server)
        monkeypatch.undo()
    assert "limit of open files reached, idle connections are closed" in capfd.readouterr().err


# --------------------------------------------------------------------------------------- all


def _draw_input(rng: random.Random) -> bytes:
    """Draw input that a hostile client may send."""
    whole = head("GET /health HTTP/1.1")
    makers: list[Callable[[], bytes]] = [
        lambda: whole,
        lambda: whole[: rng.randrange(len(whole))],
        lambda: completion_request(
            LONG | {"max_tokens": rng.randrange(1, 50), "stream": rng.random() < 0.5}
        ),
        lambda: head("GET / HTTP/1.1", *(f"X: {'y' * rng.randrange(2000)}" for _ in range(120))),
        lambda: head("POST /health HTTP/1.1", "Content-Length: 90000") + b"z" * 90_000,
        lambda: head(*WITH_BODY, "Content-Length: 500") + b"{" * rng.randrange(500),
        lambda: head(*WITH_BODY, "Transfer-Encoding: chunked") + b"5\r\nab",
        lambda: head(*WITH_BODY, "Expect: 100-continue", "Content-Length: 9"),
        lambda: head("GET /health HTTP/1.1", "Host: evil.example"),
        lambda: rng.randbytes(rng.randrange(100)),
        lambda: b"\r\n",
    ]
    return b"".join(rng.choice(makers)() for _ in range(rng.randrange(1, 4)))


@pytest.mark.parametrize("seed", range(4))
def test_random_input_leaves_nothing_held(seed: int) -> None:
    """Connections open and close in random order, with a low limit."""
    rng = random.Random(seed)
    with running(limits=replace(SHORT_LIMITS, connections=6)) as server:
        connections: list[socket.socket] = []
        for _ in range(60):
            if len(connections) > 8 or (connections and rng.random() < 0.4):
                connections.pop(rng.randrange(len(connections))).close()
            else:
                connections.append(socket.create_connection(("127.0.0.1", server.port), PATIENCE))
            for each in rng.sample(connections, min(len(connections), 2)):
                with suppress(ConnectionResetError, BrokenPipeError):
                    each.sendall(_draw_input(rng))
        for each in connections:
            each.close()
        await_no_connection(server)
        assert server.request("GET", "/health").status == 200
        assert not any("error" in json.loads(line) for line in server.lines)
