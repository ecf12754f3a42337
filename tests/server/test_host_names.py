"""Allowed host names, and redirects that name no other host."""

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
    """Server with the host names allowed by default on 127.0.0.1."""
    config = ServerConfig(port=0, api_key="x")
    with open_listener(config.host, config.port) as listener:
        names = with_loopback_hosts(config, listener).allowed_hosts
    with running(config={"allowed_hosts": names}) as server:
        yield server


def raw(server: Server, *lines: str) -> bytes:
    """Send raw lines, and read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        connection.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode("latin-1"))
        with connection.makefile("rb") as stream:
            return stream.read()


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:1", "[::1]", "[::1]:8000"]
)
def test_loopback_names_are_accepted(local: Server, host: str) -> None:
    for path in PATHS[:-1]:
        assert local.request("GET", path, headers={"host": host}).status == 200


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
def test_other_host_names_are_rejected_for_every_path(local: Server, host: str) -> None:
    for path in PATHS:
        response = local.request("GET", path, headers={"host": host})
        assert (response.status, response.error["code"]) == (421, "host_not_allowed")
    response = local.request("POST", "/v1/completions", {"model": MODEL}, headers={"host": host})
    assert (response.status, response.error["type"]) == (421, "invalid_request_error")
    assert "--allowed-hosts" in response.error["message"]


def test_request_needs_exactly_one_host(local: Server, server: Server) -> None:
    head = ("GET /health HTTP/1.1", "Connection: close")
    for each in (local, server):
        assert b" 400 " in raw(each, *head).split(b"\r\n")[0]
        assert b'"invalid_host"' in raw(each, *head, "Host: localhost", "Host: evil.example")
        assert b" 200 " in raw(each, "GET /health HTTP/1.0").split(b"\r\n")[0]
        assert b" 200 " in raw(each, *head, "Host: localhost").split(b"\r\n")[0]
    absolute = ("GET http://evil.example/health HTTP/1.1", "Connection: close")
    assert b" 421 " in raw(local, *absolute, "Host: evil.example").split(b"\r\n")[0]


def test_allowed_hosts_accept_subdomain_wildcards() -> None:
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
            assert server.request("GET", "/health", headers={"host": host}).status == status, host


@pytest.mark.parametrize(
    ("host", "allowed", "names"),
    [
        ("localhost", (), ("localhost", "127.0.0.1", "::1", "127.0.0.1", "localhost")),
        ("127.0.0.2", (), ("localhost", "127.0.0.1", "::1", "127.0.0.2", "127.0.0.2")),
        ("127.0.0.1", ("x.example",), ("x.example",)),
        ("127.0.0.1", ("*",), ("*",)),
        ("0.0.0.0", (), ()),
        ("0.0.0.0", ("x.example",), ("x.example",)),
    ],
)
def test_default_allowed_hosts_by_address(
    host: str, allowed: tuple[str, ...], names: tuple[str, ...]
) -> None:
    config = ServerConfig(host=host, port=0, api_key="x", allowed_hosts=allowed)
    with open_listener(config.host, config.port) as listener:
        assert with_loopback_hosts(config, listener).allowed_hosts == names


def test_any_host_is_accepted_when_all_are_allowed() -> None:
    for names in ((), ("*",)):
        with running(config={"allowed_hosts": names}) as server:
            assert server.request("GET", "/health", headers={"host": "any.example"}).status == 200


@pytest.mark.parametrize(
    "names", [("",), ("https://x.example",), ("x.example/v1",), (" x",), "x", (1,)]
)
def test_invalid_allowed_hosts_are_rejected(names: Any) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=names)


def test_trailing_slash_is_not_redirected_to_the_named_host(server: Server) -> None:
    """A path with a trailing slash does not exist."""
    for method, path in (
        ("GET", "/health/"),
        ("GET", "/metrics/"),
        ("POST", "/v1/completions/"),
        ("GET", "/v1/chat/completions/"),
        ("GET", "//evil.example/"),
        ("GET", "/v1/models/"),
    ):
        response = server.request(method, path, headers={"host": "evil.example"})
        assert response.status == 404, path
        assert "location" not in response.headers
        assert b"evil" not in response.data
    assert "none of them ends with a slash" in server.request("GET", "/health/").error["message"]
