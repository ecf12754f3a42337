"""Host names that requests may name, and paths that lead to no other host."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer import ConfigError
from roseinfer.config import ServerConfig
from roseinfer.server.http_server import open_listener, with_loopback_hosts
from tests.server.served import MODEL, PATIENCE, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.served import Server

PATHS = ("/", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/v1/models", "/none")


@pytest.fixture(scope="module")
def local() -> Iterator[Server]:
    """A server with the names that one on 127.0.0.1 gets."""
    config = ServerConfig(port=0, api_key="x")
    with open_listener(config.host, config.port) as listener:
        names = with_loopback_hosts(config, listener).allowed_hosts
    with running(config={"allowed_hosts": names}) as server:
        yield server


def raw(server: Server, *lines: str) -> bytes:
    """Send a request as it is, and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1"))
        with connection.makefile("rb") as stream:
            return stream.read()


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:1", "[::1]", "[::1]:8000"]
)
def test_names_of_loopback_are_taken(local: Server, host: str) -> None:
    for path in PATHS[:-1]:
        assert local.ask("GET", path, headers={"host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "",
        "[",
        "*",
    ],
)
def test_other_names_are_refused_whatever_is_asked(local: Server, host: str) -> None:
    for path in PATHS:
        refused = local.ask("GET", path, headers={"host": host})
        assert (refused.status, refused.error["code"]) == (421, "host_not_allowed")
    refused = local.ask("POST", "/v1/completions", {"model": MODEL}, headers={"host": host})
    assert (refused.status, refused.error["type"]) == (421, "invalid_request_error")
    assert "--allowed-hosts" in refused.error["message"]


def test_a_request_has_one_host(local: Server, server: Server) -> None:
    head = ("GET /health HTTP/1.1", "Connection: close")
    for each in (local, server):
        assert b" 400 " in raw(each, *head).split(b"\r\n")[0]
        assert b'"invalid_host"' in raw(each, *head, "Host: localhost", "Host: evil.example")
        assert b" 200 " in raw(each, "GET /health HTTP/1.0").split(b"\r\n")[0]
        assert b" 200 " in raw(each, *head, "Host: localhost").split(b"\r\n")[0]
    absolute = ("GET http://evil.example/health HTTP/1.1", "Connection: close")
    assert b" 421 " in raw(local, *absolute, "Host: evil.example").split(b"\r\n")[0]


def test_names_may_be_given_with_all_below_a_domain() -> None:
    names = ("API.example.com:443", "*.example.org", "::1")
    with running(config={"allowed_hosts": names}) as server:
        for host, status in (
            ("api.example.com", 200),
            ("api.example.com:8443", 200),
            ("a.b.example.org", 200),
            ("[::1]:80", 200),
            ("example.org", 421),
            ("badexample.org", 421),
            ("localhost", 421),
        ):
            assert server.ask("GET", "/health", headers={"host": host}).status == status, host


@pytest.mark.parametrize(
    ("host", "given", "names"),
    [
        ("localhost", (), ("localhost", "127.0.0.1", "::1", "127.0.0.1", "localhost")),
        ("127.0.0.2", (), ("localhost", "127.0.0.1", "::1", "127.0.0.2", "127.0.0.2")),
        ("127.0.0.1", ("x.example",), ("x.example",)),
        ("127.0.0.1", ("*",), ("*",)),
        ("0.0.0.0", (), ()),
        ("0.0.0.0", ("x.example",), ("x.example",)),
    ],
)
def test_loopback_has_its_own_names_and_other_addresses_any(
    host: str, given: tuple[str, ...], names: tuple[str, ...]
) -> None:
    config = ServerConfig(host=host, port=0, api_key="x", allowed_hosts=given)
    with open_listener(config.host, config.port) as listener:
        assert with_loopback_hosts(config, listener).allowed_hosts == names


def test_where_any_name_is_allowed_any_is_taken() -> None:
    for names in ((), ("*",)):
        with running(config={"allowed_hosts": names}) as server:
            assert server.ask("GET", "/health", headers={"host": "any.example"}).status == 200


@pytest.mark.parametrize(
    "wrong", [("",), ("https://x.example",), ("x.example/v1",), (" x",), "x", (1,)]
)
def test_names_that_no_host_has_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=wrong)


def test_nothing_is_redirected_to_the_host_that_was_named(server: Server) -> None:
    """A path with a slash too many is none."""
    for method, path in (
        ("GET", "/health/"),
        ("GET", "/metrics/"),
        ("POST", "/v1/completions/"),
        ("GET", "/v1/chat/completions/"),
        ("GET", "//evil.example/"),
        ("GET", "/v1/models/"),
    ):
        refused = server.ask(method, path, headers={"host": "evil.example"})
        assert refused.status == 404, path
        assert "location" not in refused.headers
        assert b"evil" not in refused.data
    assert "none of them ends with a slash" in server.ask("GET", "/health/").error["message"]
