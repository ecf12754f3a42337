"""Who is let in, and how much: the key, bodies, prompts, and a queue that is full."""

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

OPEN = ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json")


@pytest.fixture(scope="module")
def kept() -> Iterator[Server]:
    with running(config={"api_key": "rose-key", "max_body_bytes": 2000}) as server:
        yield server


# -------------------------------------------------------------------------------------- the key


NONE = "API key missing; send it in the header Authorization: Bearer KEY"
OTHER = "wrong API key; send the key that this server was started with"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, NONE),
        ("", NONE),
        ("Bearer", NONE),
        ("Bearer ", NONE),
        ("Bearer rose-ke", OTHER),
        ("Bearer rose-key2", OTHER),
        ("Bearer ROSE-KEY", OTHER),
        ("Basic rose-key", NONE),
        ("rose-key", NONE),
        ("Bearer r\u00f6se", OTHER),
    ],
)
def test_nobody_comes_in_without_the_key(kept: Server, given: str | None, said: str) -> None:
    headers = {} if given is None else {"authorization": given}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1/x")):
        refused = kept.ask(method, path, {"model": MODEL, "prompt": "x"}, headers=headers)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert refused.error["message"] == said
        assert refused.headers["www-authenticate"] == "Bearer"


def test_who_has_the_key_comes_in(kept: Server) -> None:
    with kept.client(api_key="rose-key") as client:
        assert client.models.list().data[0].id == MODEL
        assert client.completions.create(model=MODEL, prompt="x").choices
    with kept.client(api_key="rose-kez") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize("path", OPEN)
def test_machines_that_look_on_need_no_key(kept: Server, path: str) -> None:
    assert kept.ask("GET", path).status == 200


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerConfig().api_key is None
    monkeypatch.setenv(API_KEY, "from-outside")
    assert ServerConfig().api_key == "from-outside"
    assert ServerConfig(api_key="given").api_key == "given"
    assert "from-outside" not in repr(ServerConfig())
    monkeypatch.setenv(API_KEY, " ")
    with pytest.raises(ConfigError, match="the API key is empty"):
        ServerConfig()


@pytest.mark.parametrize(
    "wrong",
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
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerConfig(**wrong)


# --------------------------------------------------------------------------------------- bodies


def test_a_body_that_is_too_large_is_not_read(kept: Server) -> None:
    headers = {"authorization": "Bearer rose-key"}
    refused = kept.ask("POST", "/v1/completions", b"x" * 2001, headers=headers)
    assert (refused.status, refused.error["code"]) == (413, "body_too_large")
    assert refused.headers["connection"] == "close"
    fits = json.dumps({"model": MODEL, "prompt": "x"}).encode().ljust(2000)
    assert kept.ask("POST", "/v1/completions", fits, headers=headers).status == 200


def test_a_body_that_does_not_say_how_large_it_is_is_counted(kept: Server) -> None:
    connection = kept.connection()
    chunks = iter([b" " * 1500] * 2)
    headers = {"authorization": "Bearer rose-key", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


LARGE = b"x" * (16 << 20)
"""More than any socket holds for a reader that does not come."""


@contextmanager
def asking(server: Server, *headers: str) -> Iterator[socket.socket]:
    """Connect, and send the head of a request with a body."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        said = ["POST /v1/completions HTTP/1.1", "Host: x", *headers]
        said.append("Authorization: Bearer rose-key")
        connection.sendall("".join(f"{line}\r\n" for line in [*said, ""]).encode())
        yield connection


def all_that_comes(connection: socket.socket) -> bytes:
    """Read until the server closes the connection, which must not be a reset."""
    with connection.makefile("rb") as stream:
        return stream.read()


@pytest.mark.parametrize("counted", [False, True], ids=["announced", "counted"])
def test_a_client_that_writes_all_before_it_reads_is_told_too(kept: Server, counted: bool) -> None:
    said = "Transfer-Encoding: chunked" if counted else f"Content-Length: {len(LARGE)}"
    with asking(kept, said) as connection:
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(LARGE), LARGE) if counted else LARGE)
        head, _, data = all_that_comes(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    error = json.loads(data)["error"]
    assert error["code"] == "body_too_large"
    assert error["message"] == ("the body is too large; this server's limit is 2000 bytes")


def test_openais_client_is_told_of_a_body_that_is_too_large(kept: Server) -> None:
    with kept.client(api_key="rose-key") as client:
        for _ in range(3):
            with pytest.raises(openai.APIStatusError, match="limit is 2000 bytes") as refused:
                client.completions.create(model=MODEL, prompt=LARGE.decode())
            assert refused.value.status_code == 413


def test_who_asks_first_need_not_send_what_is_too_large(kept: Server) -> None:
    with asking(kept, f"Content-Length: {len(LARGE)}", "Expect: 100-continue") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_ends_half_way_is_not_looked_at(kept: Server) -> None:
    before = len(kept.lines)
    with socket.create_connection(("127.0.0.1", kept.port)) as asking:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        asking.sendall(f"{head}Authorization: Bearer rose-key\r\n\r\n{{".encode())
    end = time.monotonic() + PATIENCE
    while len(kept.lines) == before:
        assert time.monotonic() < end
        time.sleep(0.01)
    line = json.loads(kept.lines[-1])
    assert (line["status"], line["client_disconnected"]) == (499, True)


def test_a_prompt_that_is_longer_than_the_server_takes_is_refused() -> None:
    with running(config={"max_prompt_tokens": 10}) as server:
        assert server.post("completions", prompt="x" * 10).status == 200
        refused = server.post("completions", prompt="x" * 11)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert "limit is 10" in refused.error["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_prompt_is_refused_by_its_characters_before_it_is_tokenised(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(config={"max_prompt_tokens": 10}) as server:
        prompts = server.service.prompts
        read: list[int] = []
        real = prompts._tokenizer.encode

        def encode(text: str, **options: Any) -> Any:
            read.append(len(text))
            return real(text, **options)

        monkeypatch.setattr(prompts._tokenizer, "encode", encode)
        for count in (640, 641):
            text = "x" * count
            chat = {"messages": [{"role": "user", "content": text}]}
            refused = server.post(path, **{"prompt": text} if path == "completions" else chat)
            assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert "characters; the limit is 640" in refused.error["message"]
        assert read == ([640] if path == "completions" else [])


# ------------------------------------------------------------------------------------ the queue


def test_a_full_queue_says_when_to_come_again() -> None:
    with running(config={"max_queue": 2}, max_batch_size=1) as server, ExitStack() as stack:
        long = {"model": MODEL, "prompt": "x", "max_tokens": 900, "stream": True}
        body = json.dumps(long | {"ignore_eos": True}).encode()
        held: list[socket.socket] = []
        for _ in range(3):
            asking = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            asking.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            held.append(asking)
        held[0].recv(1000)
        while server.service.admission.num_open < 3:
            pass
        refused = server.post("completions", prompt="y")
        assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
        assert refused.headers["retry-after"] == "1"
        with server.client() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=MODEL, prompt="y")
        for each in held:
            each.close()
        server.await_idleness()
        assert server.post("completions", prompt="y").status == 200


def test_the_client_comes_again_by_itself() -> None:
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
