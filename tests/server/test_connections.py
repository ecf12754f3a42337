"""What clients may take before their requests are read: headers, bodies, time and connections."""

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
SOON = ConnectionLimits(head_seconds=1.0, discard_seconds=0.2)
"""Limits that a test can wait for. The server looks at them once a second."""


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    with running(limits=SOON) as server:
        yield server


@contextmanager
def connected(server: Server, *lines: str, end: bool = True) -> Iterator[socket.socket]:
    """Connect, and send the head of a request, or its beginning."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        if lines:
            connection.sendall(head(*lines, end=end))
        yield connection


def head(*lines: str, end: bool = True) -> bytes:
    first, *others = lines
    text = "".join(f"{line}\r\n" for line in (first, "Host: localhost", *others))
    return (text + "\r\n" * end).encode()


def posting(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    said = ("Content-Type: application/json", f"Content-Length: {len(data)}")
    return head("POST /v1/completions HTTP/1.1", *said) + data


def all_that_comes(connection: socket.socket) -> bytes:
    """Read until the server sends no more, which must not be a reset."""
    with connection.makefile("rb") as stream:
        return stream.read()


def refusal(answer: bytes) -> tuple[int, str | None]:
    """Return the status and the code of an error that ends its connection."""
    lines, _, data = answer.partition(b"\r\n\r\n")
    assert re.search(rb"(?i)\r\nconnection: close", lines), answer
    assert re.search(rb"(?i)\r\nx-request-id: req-", lines), answer
    return int(lines.split()[1]), json.loads(data)["error"]["code"]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def await_no_connection(server: Server) -> None:
    until(lambda: not server.http.server_state.connections)
    assert not server.http._connections.idle
    assert server.http._connections.head_bytes == 0


# -------------------------------------------------------------------------------------- heads


TOO_MANY = [f"X-{at}: y" for at in range(100)]
HEADS = {
    "a header of 32 MB": [f"X: {'y' * (32 << 20)}"],
    "32 MB of headers": [f"X-{at}: {'y' * 1000}" for at in range(32_000)],
    "a header too many": TOO_MANY,
    "a name that is too long": [f"{'x' * (64 << 10)}: y"],
}


@pytest.mark.parametrize("lines", HEADS.values(), ids=HEADS)
def test_headers_beyond_a_bound_are_refused(server: Server, lines: list[str]) -> None:
    """A client that writes all before it reads is told, too."""
    with connected(server, "POST /v1/completions HTTP/1.1", *lines) as connection:
        assert refusal(all_that_comes(connection)) == (431, "headers_too_large")
    line = json.loads(server.lines[-1])
    assert (line["status"], line["path"], line["method"]) == (431, "/v1/completions", "POST")


@pytest.mark.parametrize("path", ["/" + "x" * (1 << 20), "/?" + "x" * (1 << 20)])
def test_so_is_a_path(server: Server, path: str) -> None:
    with connected(server, f"GET {path} HTTP/1.1") as connection:
        assert refusal(all_that_comes(connection)) == (431, "headers_too_large")
    assert len(server.lines[-1]) < 600


def test_headers_within_the_bounds_are_taken(server: Server) -> None:
    lines = [f"X-{at}: {'y' * 600}" for at in range(98)]
    with connected(server, "GET /health HTTP/1.1", *lines, "Connection: close") as connection:
        assert all_that_comes(connection).startswith(b"HTTP/1.1 200 ")


def test_headers_after_a_body_in_chunks_count(server: Server) -> None:
    said = ("POST /v1/completions HTTP/1.1", "Transfer-Encoding: chunked")
    with connected(server, *said) as connection:
        trailers = "".join(f"{line}\r\n" for line in TOO_MANY)
        connection.sendall(f"1\r\n{{\r\n0\r\n{trailers}\r\n".encode())
        assert refusal(all_that_comes(connection)) == (431, "headers_too_large")


def test_incomplete_heads_have_a_bound_together() -> None:
    with running(limits=ConnectionLimits(all_head_bytes=100_000)) as server, ExitStack() as stack:
        for _ in range(2):
            with connected(server, "GET / HTTP/1.1", f"X: {'y' * 40_000}", end=False):
                until(lambda: server.http._connections.head_bytes > 40_000)
            await_no_connection(server)
        for _ in range(2):
            each = connected(server, "GET / HTTP/1.1", f"X: {'y' * 40_000}", end=False)
            stack.enter_context(each)
        until(lambda: server.http._connections.head_bytes > 80_000)
        with connected(server, "GET / HTTP/1.1", f"X: {'y' * 40_000}", end=False) as third:
            answer = all_that_comes(third)
        assert refusal(answer) == (503, "overloaded")
        assert b"retry-after: 1" in answer
        assert server.ask("GET", "/health").status == 200


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"no http\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_http_is_refused_like_all_else(server: Server, sent: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(sent)
        assert refusal(all_that_comes(connection)) == (400, "invalid_http")


def test_a_head_that_is_slow_is_refused(hasty: Server) -> None:
    with connected(hasty, "GET /health HTTP/1.1", end=False) as connection:
        assert refusal(all_that_comes(connection)) == (408, "request_timeout")
    with connected(hasty, "GET /health HTTP/1.1") as connection:
        connection.recv(1000)
        connection.sendall(b"GET /hea")  # as the second of a connection that is kept
        assert refusal(all_that_comes(connection)) == (408, "request_timeout")
    await_no_connection(hasty)


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "an empty line"])
def test_who_sends_nothing_is_not_waited_for(hasty: Server, sent: bytes) -> None:
    with connected(hasty) as connection:
        connection.sendall(sent)
        assert all_that_comes(connection) == b""


def test_a_long_answer_leaves_no_less_time_for_the_next_request(
    hasty: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of that one comes while the first is answered, for longer than a head may take."""
    model = hasty.llm.engine.sequence_runner.model
    logits = model.logits

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return logits(*arguments)

    monkeypatch.setattr(model, "logits", slow)
    with connected(hasty) as connection:
        connection.sendall(posting(LONG | {"max_tokens": 35, "stream": True}) + b"GET /health HT")
        time.sleep(2.5)
        connection.sendall(b"TP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        data = all_that_comes(connection)
    assert b"data: [DONE]" in data
    assert data.count(b"HTTP/1.1 200 ") == 2
    assert b'{"alive":true}' in data


# -------------------------------------------------------------------------------------- bodies


WITH_BODY = ("POST /v1/completions HTTP/1.1", "Content-Type: application/json")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "_BODY_TIMEOUT_S", 1.0)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("said", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_a_body_that_is_slow_is_refused(server: Server, said: str) -> None:
    with connected(server, *WITH_BODY, said) as connection:
        connection.sendall(b"1\r\n{\r\n")
        assert refusal(all_that_comes(connection)) == (408, "request_timeout")
    assert json.loads(server.lines[-1])["status"] == 408


@pytest.mark.usefixtures("short")
def test_a_body_that_comes_steadily_is_taken(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is worth some time here."""
    monkeypatch.setattr(auth, "_MIN_BODY_BYTES_PER_S", 10)
    data = json.dumps({"model": MODEL, "prompt": "x"}).encode().ljust(60)
    with connected(server, *WITH_BODY, "Content-Length: 60", "Connection: close") as connection:
        for at in range(0, 60, 10):
            connection.sendall(data[at : at + 10])
            time.sleep(0.3)
        assert all_that_comes(connection).startswith(b"HTTP/1.1 200 ")


def test_bodies_that_are_not_complete_have_a_bound_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auth, "_MAX_INCOMPLETE_BYTES", 1)
    with running(config={"max_body_bytes": 100_000}) as server, ExitStack() as stack:
        said = (*WITH_BODY, "Content-Length: 100000")
        opened = [stack.enter_context(connected(server, *said)) for _ in range(4)]
        for each in opened[:3]:
            each.sendall(b" " * 33_000)
        body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
        assert server.ask("POST", "/v1/completions", body.ljust(2000)).status == 200
        opened[3].sendall(b" " * 33_000)
        (refused,), _, _ = select.select(opened, [], [], PATIENCE)
        answer = all_that_comes(refused)
        assert refusal(answer) == (503, "overloaded")
        assert b"retry-after: 1" in answer
        stack.close()
        server.await_idleness()
        assert server.ask("POST", "/v1/completions", body.ljust(100_000)).status == 200


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
def test_a_body_that_nobody_wants_is_not_waited_for(line: str, status: int) -> None:
    with (
        running(config={"api_key": "rose-key"}) as server,
        connected(server, f"{line} HTTP/1.1", f"Content-Length: {4 << 20}") as connection,
    ):
        connection.sendall(b" " * (1 << 20))
        assert connection.recv(12) == f"HTTP/1.1 {status}".encode()
        connection.sendall(b" " * (3 << 20))
        connection.sendall(head("GET /version HTTP/1.1", "Connection: close"))
        assert b'"version"' in all_that_comes(connection)


@pytest.mark.parametrize("bound", ["time", "bytes"])
def test_no_more_of_it_is_dropped_than_a_bound(bound: str) -> None:
    limits = SOON if bound == "time" else ConnectionLimits(max_discarded_bytes=1 << 20)
    with (
        running(limits=limits, config={"max_body_bytes": 10}) as server,
        connected(server, "GET /health HTTP/1.1", "Content-Length: 1000000000") as kept,
        connected(server, *WITH_BODY, "Content-Length: 1000000000") as ended,
    ):
        for connection in (kept, ended):
            assert connection.recv(12) in (b"HTTP/1.1 200", b"HTTP/1.1 413")
            if bound == "bytes":
                connection.sendall(b" " * (1 << 20))
                with suppress(ConnectionResetError, BrokenPipeError):
                    connection.sendall(b" ")
        await_no_connection(server)


def test_who_asks_first_is_the_last_on_its_connection(server: Server) -> None:
    """Nobody can say whether what follows is the body that was not asked for."""
    said = ("POST /nowhere HTTP/1.1", "Content-Length: 50", "Expect: 100-continue")
    with connected(server, *said) as connection:
        assert refusal(all_that_comes(connection)) == (404, None)
    with connected(server, *WITH_BODY, "Content-Length: 30", "Expect: 100-continue") as connection:
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(json.dumps({"model": MODEL, "prompt": ""}).encode().ljust(30))
        assert refusal(all_that_comes(connection))[0] == 400


# ---------------------------------------------------------------------------------- pipelines


def test_pipelined_requests_are_answered_in_their_order(server: Server) -> None:
    with connected(server) as connection:
        connection.sendall(
            posting(LONG | {"max_tokens": 30, "stream": True})
            + head("GET /version HTTP/1.1") * 10
            + head("GET /health HTTP/1.1", "Connection: close")
        )
        data = all_that_comes(connection)
    assert data.count(b"HTTP/1.1 200 ") == 12
    assert data.index(b"[DONE]") < data.index(b'"version"') < data.index(b'"alive"')


@pytest.mark.parametrize(
    "wrong",
    [
        b"no http\r\n\r\n",
        head("GET / HTTP/1.1", *TOO_MANY),
        head("GET / HTTP/1.1") * 100,
        head("POST /v1/completions HTTP/1.1", "Transfer-Encoding: chunked") + b"x\r\n",
    ],
    ids=["no http", "headers", "too many", "a chunk"],
)
def test_a_refusal_never_gets_into_the_answer_before_it(server: Server, wrong: bytes) -> None:
    """That one is whole, and the connection ends with it."""
    with connected(server) as connection:
        connection.sendall(posting(LONG | {"max_tokens": 100, "stream": True}) + wrong)
        data = all_that_comes(connection)
    assert data.count(b"HTTP/1.1") == 1
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await_no_connection(server)


def test_a_client_that_leaves_ends_all_that_it_pipelined(server: Server) -> None:
    generated = server.service.metrics.generation_tokens
    with connected(server) as connection:
        connection.sendall(posting(LONG | {"stream": True}) * 3)
        connection.recv(10)
    server.await_idleness()
    assert server.service.metrics.generation_tokens - generated < 900
    line = json.loads(server.lines[-1])
    assert line["client_disconnected"]
    assert "error" not in line


def test_a_reader_that_takes_nothing_is_left() -> None:
    with running(limits=ConnectionLimits(stalled_seconds=0.5), send_buffer=4096) as server:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(posting(LONG | {"stream": True, "n": 8, "logprobs": 0}))
            until(lambda: server.service.admission.num_open == 8)
            server.await_idleness()
        assert json.loads(server.lines[-1])["client_disconnected"]


# --------------------------------------------------------------------------------- connections


def test_the_longest_idle_connection_ends_for_a_new_one() -> None:
    with running(limits=ConnectionLimits(connections=4)) as server, ExitStack() as stack:
        opened = []
        for _ in range(4):
            each = stack.enter_context(connected(server))
            each.sendall(head("GET /version HTTP/1.1"))
            assert each.recv(12) == b"HTTP/1.1 200"
            opened.append(each)
        until(lambda: len(server.http._connections.idle) == 4)
        assert server.ask("GET", "/health").status == 200
        assert b"version" in all_that_comes(opened[0])
        opened[1].sendall(head("GET /health HTTP/1.1", "Connection: close"))
        assert b"alive" in all_that_comes(opened[1])


def test_many_connections_that_send_nothing_end_no_service() -> None:
    with running(limits=ConnectionLimits(connections=8)) as server, ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connected(server))
            stack.enter_context(connected(server, "GET / HTTP/1.1", end=False))
        for _ in range(3):
            assert server.ask("GET", "/health").status == 200


def test_where_all_are_busy_a_new_one_is_refused_and_the_log_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with running(limits=ConnectionLimits(connections=3)) as server, ExitStack() as stack:
        streams = [stack.enter_context(connected(server)) for _ in range(3)]
        for each in streams:
            each.sendall(posting(LONG | {"stream": True, "n": 8}))
            each.recv(10)
        for _ in range(2):
            with connected(server) as connection:
                answer = all_that_comes(connection)
            assert refusal(answer) == (503, "overloaded")
            assert b"retry-after: 1" in answer
        stack.close()
        server.await_idleness()
        assert server.ask("GET", "/health").status == 200
    said = capfd.readouterr().err
    assert said.count("all 3 connections are busy, new ones get 503") == 1


def test_a_server_in_a_process_of_its_own_holds_against_one_client() -> None:
    """Its memory hardly grows, and it answers others."""
    with serving(variables={"ROSEINFER_API_KEY": "rose-key"}) as server, ExitStack() as stack:

        def opened(*lines: str, end: bool = True) -> socket.socket:
            address = ("127.0.0.1", server.port)
            connection = stack.enter_context(socket.create_connection(address, PATIENCE))
            if lines:
                connection.sendall(head(*lines, end=end))
            return connection

        def healthy() -> bool:
            connection = opened("GET /health HTTP/1.1", "Connection: close")
            return b'{"alive":true}' in all_that_comes(connection)

        assert healthy()
        before = peak_memory(server.process.pid)
        large = [f"X-{at}: {'y' * 1000}" for at in range(32_000)]
        assert refusal(all_that_comes(opened("GET / HTTP/1.1", *large)))[0] == 431
        for _ in range(50):
            for line in ("GET /health HTTP/1.1", "POST /v1/completions HTTP/1.1"):
                opened(line, f"Content-Length: {4 << 20}").sendall(b" " * (2 << 20))
        for _ in range(1100):
            opened()
        assert healthy()
        assert peak_memory(server.process.pid) - before < 100 << 20
    assert [json.loads(line)["status"] for line in server.logged].count(401) == 50


def peak_memory(process: int) -> int:
    """Return bytes."""
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
    ("hard", "said"), [(100, "100 8 12"), (1024, "1024 768 128"), (4000, "4000 3372 500")]
)
def test_the_limit_of_files_is_raised(hard: int, said: str) -> None:
    code = "\n".join(line[4:] for line in FEW_FILES.format(hard=hard).splitlines())
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [said, "True"]


def test_a_high_limit_of_files_gives_no_more_connections_than_a_server_can_use() -> None:
    limits = ConnectionLimits.for_open_files(1 << 16)
    assert (limits.connections, limits.backlog) == (8192, MAX_BACKLOG)
    assert limits == ConnectionLimits()


def test_where_out_of_files_connections_end_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running() as server, closing(server.connection()) as kept:
        kept.request("GET", "/version")
        kept.getresponse().read()
        until(lambda: len(server.http._connections.idle) == 1)
        monkeypatch.setattr("roseinfer.server.connections._out_of_files", lambda: True)
        await_no_connection(server)
        monkeypatch.undo()
    assert "limit of open files reached, idle connections are closed" in capfd.readouterr().err


# --------------------------------------------------------------------------------------- all


def _drawn(rng: random.Random) -> bytes:
    """Return something that a hostile client may send."""
    whole = head("GET /health HTTP/1.1")
    made: list[Callable[[], bytes]] = [
        lambda: whole,
        lambda: whole[: rng.randrange(len(whole))],
        lambda: posting(LONG | {"max_tokens": rng.randrange(1, 50), "stream": rng.random() < 0.5}),
        lambda: head("GET / HTTP/1.1", *(f"X: {'y' * rng.randrange(2000)}" for _ in range(120))),
        lambda: head("POST /health HTTP/1.1", "Content-Length: 90000") + b"z" * 90_000,
        lambda: head(*WITH_BODY, "Content-Length: 500") + b"{" * rng.randrange(500),
        lambda: head(*WITH_BODY, "Transfer-Encoding: chunked") + b"5\r\nab",
        lambda: head(*WITH_BODY, "Expect: 100-continue", "Content-Length: 9"),
        lambda: head("GET /health HTTP/1.1", "Host: evil.example"),
        lambda: rng.randbytes(rng.randrange(100)),
        lambda: b"\r\n",
    ]
    return b"".join(rng.choice(made)() for _ in range(rng.randrange(1, 4)))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_sent_nothing_is_held_in_the_end(seed: int) -> None:
    """Connections come and go in any order, with few to have."""
    rng = random.Random(seed)
    with running(limits=replace(SOON, connections=6)) as server:
        opened: list[socket.socket] = []
        for _ in range(60):
            if len(opened) > 8 or (opened and rng.random() < 0.4):
                opened.pop(rng.randrange(len(opened))).close()
            else:
                opened.append(socket.create_connection(("127.0.0.1", server.port), PATIENCE))
            for each in rng.sample(opened, min(len(opened), 2)):
                with suppress(ConnectionResetError, BrokenPipeError):
                    each.sendall(_drawn(rng))
        for each in opened:
            each.close()
        await_no_connection(server)
        assert server.ask("GET", "/health").status == 200
        assert not any("error" in json.loads(line) for line in server.lines)
