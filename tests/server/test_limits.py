"""Auth, limits of bodies and prompts, and a full queue."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest

from roseinfer import ConfigError
from roseinfer.config import API_KEY, ServerConfig
from roseinfer.errors import short_repr
from tests.server.served import MODEL, PATIENCE, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.served import Server

PATHS_WITHOUT_AUTH = ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json")


@pytest.fixture(scope="module")
def keyed_server() -> Iterator[Server]:
    with running(config={"api_key": "rose-key", "max_body_bytes": 2000}) as server:
        yield server


# -------------------------------------------------------------------------------------- the key


MISSING_KEY = "API key missing; send it in the header Authorization: Bearer KEY"
WRONG_KEY = "wrong API key; send the key that this server was started with"


@pytest.mark.parametrize(
    ("authorization", "message"),
    [
        (None, MISSING_KEY),
        ("", MISSING_KEY),
        ("Bearer", MISSING_KEY),
        ("Bearer ", MISSING_KEY),
        ("Bearer rose-ke", WRONG_KEY),
        ("Bearer rose-key2", WRONG_KEY),
        ("Bearer ROSE-KEY", WRONG_KEY),
        ("Basic rose-key", MISSING_KEY),
        ("rose-key", MISSING_KEY),
        ("Bearer r\u00f6se", WRONG_KEY),
    ],
)
def test_request_without_the_key_is_rejected(
    keyed_server: Server, authorization: str | None, message: str
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1/x")):
        response = keyed_server.request(
            method, path, {"model": MODEL, "prompt": "x"}, headers=headers
        )
        assert (response.status, response.error["code"]) == (401, "invalid_api_key")
        assert response.error["message"] == message
        assert response.headers["www-authenticate"] == "Bearer"


def test_request_with_the_key_is_accepted(keyed_server: Server) -> None:
    with keyed_server.client(api_key="rose-key") as client:
        assert client.models.list().data[0].id == MODEL
        assert client.completions.create(model=MODEL, prompt="x").choices
    with (
        keyed_server.client(api_key="rose-kez") as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize("path", PATHS_WITHOUT_AUTH)
def test_monitoring_paths_need_no_key(keyed_server: Server, path: str) -> None:
    assert keyed_server.request("GET", path).status == 200


def test_api_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerConfig().api_key is None
    monkeypatch.setenv(API_KEY, "from-outside")
    assert ServerConfig().api_key == "from-outside"
    assert ServerConfig(api_key="authorization").api_key == "authorization"
    assert "from-outside" not in repr(ServerConfig())
    monkeypatch.setenv(API_KEY, " ")
    with pytest.raises(ConfigError, match="the API key is empty"):
        ServerConfig()


@pytest.mark.parametrize(
    "settings",
    [
        {"port": -1},
        {"port": 1 << 16},
        {"port": 10**5000},
        {"max_queue": 0},
        {"max_queue": True},
        {"drain_seconds": -1.0},
        {"drain_seconds": float("nan")},
        {"drain_seconds": float("inf")},
        {"drain_seconds": True},
        {"drain_seconds": "30"},
        {"drain_seconds": 10**5000},
        {"served_model_name": "rose"},
        {"served_model_name": (1,)},
    ],
    ids=short_repr,
)
def test_invalid_settings_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ServerConfig(**settings)


# --------------------------------------------------------------------------------------- bodies


def test_too_large_body_is_not_read(keyed_server: Server) -> None:
    headers = {"authorization": "Bearer rose-key"}
    response = keyed_server.request("POST", "/v1/completions", b"x" * 2001, headers=headers)
    assert (response.status, response.error["code"]) == (413, "body_too_large")
    assert response.headers["connection"] == "close"
    fits = json.dumps({"model": MODEL, "prompt": "x"}).encode().ljust(2000)
    assert keyed_server.request("POST", "/v1/completions", fits, headers=headers).status == 200


def test_chunked_body_is_counted(keyed_server: Server) -> None:
    connection = keyed_server.connection()
    chunks = iter([b" " * 1500] * 2)
    headers = {"authorization": "Bearer rose-key", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


LARGE = b"x" * (16 << 20)
"""Body larger than any socket buffer."""


@contextmanager
def connected(server: Server, *headers: str) -> Iterator[socket.socket]:
    """Connect, and send the head of a request with a body."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        message = ["POST /v1/completions HTTP/1.1", "Host: x", *headers]
        message.append("Authorization: Bearer rose-key")
        connection.sendall("".join(f"{line}\r\n" for line in [*message, ""]).encode())
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection, which must not be a reset."""
    with connection.makefile("rb") as stream:
        return stream.read()


@pytest.mark.parametrize("counted", [False, True], ids=["announced", "counted"])
def test_client_that_writes_before_it_reads_gets_413(keyed_server: Server, counted: bool) -> None:
    message = "Transfer-Encoding: chunked" if counted else f"Content-Length: {len(LARGE)}"
    with connected(keyed_server, message) as connection:
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(LARGE), LARGE) if counted else LARGE)
        head, _, data = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    error = json.loads(data)["error"]
    assert error["code"] == "body_too_large"
    assert error["message"] == ("the body is too large; this server's limit is 2000 bytes")


def test_openai_client_gets_413_for_a_too_large_body(keyed_server: Server) -> None:
    with keyed_server.client(api_key="rose-key") as client:
        for _ in range(3):
            with pytest.raises(openai.APIStatusError, match="limit is 2000 bytes") as response:
                client.completions.create(model=MODEL, prompt=LARGE.decode())
            assert response.value.status_code == 413


def test_expect_continue_avoids_sending_a_too_large_body(keyed_server: Server) -> None:
    with connected(
        keyed_server, f"Content-Length: {len(LARGE)}", "Expect: 100-continue"
    ) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_incomplete_body_is_not_parsed(keyed_server: Server) -> None:
    before = len(keyed_server.lines)
    with socket.create_connection(("127.0.0.1", keyed_server.port)) as connected:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        connected.sendall(f"{head}Authorization: Bearer rose-key\r\n\r\n{{".encode())
    end = time.monotonic() + PATIENCE
    while len(keyed_server.lines) == before:
        assert time.monotonic() < end
        time.sleep(0.01)
    line = json.loads(keyed_server.lines[-1])
    assert (line["status"], line["client_disconnected"]) == (499, True)


def test_prompt_beyond_max_prompt_tokens_is_rejected() -> None:
    with running(config={"max_prompt_tokens": 10}) as server:
        assert server.post("completions", prompt="x" * 10).status == 200
        response = server.post("completions", prompt="x" * 11)
        assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
        assert "limit is 10" in response.error["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_prompt_with_too_many_characters_is_rejected_before_tokenization(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(config={"max_prompt_tokens": 10}) as server:
        prompts = server.service.prompts
        lengths: list[int] = []
        real = prompts._tokenizer.encode

        def encode(text: str, **options: Any) -> Any:
            lengths.append(len(text))
            return real(text, **options)

        monkeypatch.setattr(prompts._tokenizer, "encode", encode)
        for count in (640, 641):
            text = "x" * count
            chat = {"messages": [{"role": "user", "content": text}]}
            response = server.post(path, **{"prompt": text} if path == "completions" else chat)
            assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
        assert "characters; the limit is 640" in response.error["message"]
        assert lengths == ([640] if path == "completions" else [])


# ------------------------------------------------------------------------------------ the queue


def test_full_queue_gives_429_with_retry_after() -> None:
    with running(config={"max_queue": 2}, max_batch_size=1) as server, ExitStack() as stack:
        long = {"model": MODEL, "prompt": "x", "max_tokens": 900, "stream": True}
        body = json.dumps(long | {"ignore_eos": True}).encode()
        connections: list[socket.socket] = []
        for _ in range(3):
            connected = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            connected.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            connections.append(connected)
        connections[0].recv(1000)
        while server.service.admission.num_open < 3:
            pass
        response = server.post("completions", prompt="y")
        assert (response.status, response.error["type"]) == (429, "rate_limit_error")
        assert response.headers["retry-after"] == "1"
        with server.client() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="y")
        for each in connections:
            each.close()
        server.await_idleness()
        assert server.post("completions", prompt="y").status == 200


def test_client_retries_after_429() -> None:
    with running(config={"max_queue": 1}, max_batch_size=1) as server:
        admission = server.service.admission
        admission.num_open += 2
        ends = threading.Timer(0.3, lambda: setattr(admission, "num_open", 0))
        ends.start()
        with server.client(max_retries=3) as client:
            assert client.completions.create(model=MODEL, prompt="x", max_tokens=2).choices
        ends.join()
    statuses = [json.loads(line)["status"] for line in server.lines]
    assert (statuses[0], statuses[-1]) == (429, 200)
