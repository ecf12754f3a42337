"""Checks before a request is served: host name, API key, body size, and admission."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from roseinfer.errors import short_repr
from roseinfer.server.api_errors import RETRY_AFTER_HEADERS, ApiError
from roseinfer.server.streaming import ClientDisconnected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from roseinfer.config import ServerConfig

_AUTHENTICATED_PREFIX = "/v1/"
"""Prefix of the paths that need the API key. Probes of health and metrics have no key."""
_BODY_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Paths whose requests have a body. The bodies of other requests are not read."""
_BODY_TIMEOUT_S, _MIN_BODY_BYTES_PER_S = 60.0, 16 << 10
"""Seconds allowed for a body to arrive, and bytes received that extend them by one second."""
_MAX_INCOMPLETE_BYTES = 64 << 20
"""Bytes of all incomplete bodies together, at most."""
_CLOSE = {"Connection": "close"}
EARLY_ERROR_KEY = "roseinfer.refusal"
"""Scope key of the error for a request that is refused before it is complete."""


class AuthMiddleware:
    """Middleware that checks host, API key and body size, and reads the body."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._hosts = tuple(map(host_name, config.allowed_hosts))
        self._key = None if config.api_key is None else _digest(config.api_key)
        self._limit = config.max_body_bytes
        self._max_incomplete_bytes = max(_MAX_INCOMPLETE_BYTES, self._limit)
        self._incomplete_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            first: Message | None = await self._check_request(scope, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return

        async def receive_again() -> Message:
            nonlocal first
            message, first = first, None
            return await receive() if message is None else message

        await self._app(scope, receive_again, send)

    async def _check_request(self, scope: Scope, receive: Receive) -> Message:
        """Return the body of a request as one message, or raise the error that refuses it."""
        if EARLY_ERROR_KEY in scope:
            raise scope[EARLY_ERROR_KEY]
        headers = Headers(scope=scope)
        self._require_host(headers.getlist("host"), scope["http_version"])
        if self._key is not None and scope["path"].startswith(_AUTHENTICATED_PREFIX):
            self._require_key(self._key, headers.get("authorization", ""))
        body = b""
        if scope["method"] == "POST" and scope["path"] in _BODY_PATHS:
            body = await self._body(headers.get("content-length"), receive)
        return {"type": "http.request", "body": body, "more_body": False}

    def _require_host(self, hosts: list[str], version: str) -> None:
        """Refuse a request whose header Host does not name this server.

        This stops DNS rebinding: a page of another site, whose name was made to resolve to this
        machine, sends its own name.
        """
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            message = f"the request has {len(hosts)} headers Host; send exactly one"
            raise ApiError(400, message, code="invalid_host")
        if not self._hosts:
            return
        for host in hosts:
            name = host_name(host)
            if not any(_matches_host(name, pattern) for pattern in self._hosts):
                message = (
                    f"host {short_repr(name)} is not allowed; use a host name of this server, or "
                    "start it with that name in --allowed-hosts"
                )
                raise ApiError(421, message, code="host_not_allowed")

    @staticmethod
    def _require_key(key: bytes, header: str) -> None:
        scheme, _, token = header.partition(" ")
        token = token.strip()
        if not token or scheme.lower() != "bearer":
            message = "API key missing; send it in the header Authorization: Bearer KEY"
        elif not hmac.compare_digest(_digest(token), key):  # in constant time
            message = "wrong API key; send the key that this server was started with"
        else:
            return
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, content_length: str | None, receive: Receive) -> bytes:
        if (
            content_length is not None
            and content_length.isdecimal()
            and int(content_length) > self._limit
        ):
            raise self._too_large()
        body, more = bytearray(), True
        deadline = asyncio.get_running_loop().time() + _BODY_TIMEOUT_S
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    chunk = message.get("body", b"")
                    body += chunk
                    self._incomplete_bytes += len(chunk)
                    more = message.get("more_body", False)
                    self._check_body_size(len(body), more)
                    timeout.reschedule(deadline + len(body) / _MIN_BODY_BYTES_PER_S)
        except TimeoutError:
            problem = f"the body timed out after {len(body)} bytes; send it faster"
            raise ApiError(408, problem, code="request_timeout", headers=_CLOSE) from None
        finally:
            self._incomplete_bytes -= len(body)
        return bytes(body)

    def _check_body_size(self, size: int, more: bool) -> None:
        """Refuse a body that is too large, or incomplete while too many bytes of others are."""
        if size > self._limit:
            raise self._too_large()
        if more and self._incomplete_bytes > self._max_incomplete_bytes:
            message = "the server is receiving too many request bodies; try again later"
            raise ApiError(503, message, code="overloaded", headers=RETRY_AFTER_HEADERS | _CLOSE)

    def _too_large(self) -> ApiError:
        message = f"the body is too large; this server's limit is {self._limit} bytes"
        return ApiError(413, message, code="body_too_large", headers=_CLOSE)


def host_name(host: str) -> str:
    """Return the name in a header Host in lower case, without the port and a final dot."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    elif host.count(":") > 1:  # an IPv6 address without brackets
        name = host
    else:
        name = host.partition(":")[0]
    return name.strip().rstrip(".").lower()


def _matches_host(name: str, pattern: str) -> bool:
    """Return True if a pattern is the name, ``*``, or ``*.`` and a domain above the name."""
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def _digest(key: str) -> bytes:
    """Return the digest of a key: keys are compared by bytes of equal length."""
    return sha256(key.encode()).digest()


# Admission: a bounded queue, which is closed while the server drains.


_RETRY_ELSEWHERE_HEADERS = RETRY_AFTER_HEADERS | {"Connection": "close"}
"""Headers that close the connection: a retry on it would reach the same server."""


class Admission:
    """Counts running and queued completions, and refuses requests beyond the limit."""

    def __init__(self, max_running: int, max_queue: int) -> None:
        """Admit ``max_running`` completions at a time, and ``max_queue`` more that wait."""
        self._limit = max_running + max_queue
        self.num_open = 0
        self.draining = False

    @contextmanager
    def admit(self, texts: int) -> Iterator[None]:
        """Count completions as open until the block ends, or refuse them."""
        if self.draining:
            message = "the server is shutting down; send the request to another one"
            raise ApiError(503, message, code="draining", headers=_RETRY_ELSEWHERE_HEADERS)
        if texts > self._limit:
            message = f"the request has {texts} completions; this server's limit is {self._limit}"
            raise ApiError(400, message, code="invalid_value")
        if self.num_open + texts > self._limit:
            message = f"{self.num_open} of {self._limit} completions are open; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers=RETRY_AFTER_HEADERS)
        self.num_open += texts
        try:
            yield
        finally:
            self.num_open -= texts
