"""Checks before a request is served: host names, the API key, and limits of bodies."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from roseinfer.errors import short_repr
from roseinfer.server.refusals import LATER, Refused
from roseinfer.server.streaming import ClientGone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from roseinfer.config import ServerConfig

_KEPT = "/v1/"
"""What the key is for. Health and metrics are asked for by machines that have none."""
_WITH_BODY = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Paths whose requests want a body. That of any other request is never kept."""
_BODY_S, _SLOWEST = 60.0, 16 << 10
"""Seconds that a body may take, and bytes of it that are worth one more."""
_MOST_UNFINISHED = 64 << 20
"""Bytes of all bodies that are not complete."""
_CLOSE = {"Connection": "close"}
REFUSAL = "roseinfer.refusal"
"""Key of a scope for what its request is refused with, if that is known before it is complete."""


class Gatekeeper:
    """Reads a body before anything else looks at it, and turns away what must not come in."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._hosts = tuple(map(host_name, config.allowed_hosts))
        self._key = None if config.api_key is None else _digest(config.api_key)
        self._most = config.max_body_bytes
        self._most_unfinished = max(_MOST_UNFINISHED, self._most)
        self._unfinished = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            first: Message | None = await self._let_in(scope, receive)
        except Refused as refused:
            await refused.response()(scope, receive, send)
            return

        async def receive_again() -> Message:
            nonlocal first
            message, first = first, None
            return await receive() if message is None else message

        await self._app(scope, receive_again, send)

    async def _let_in(self, scope: Scope, receive: Receive) -> Message:
        """Return the body of a request, as one message, or raise a refusal."""
        if REFUSAL in scope:
            raise scope[REFUSAL]
        headers = Headers(scope=scope)
        self._require_host(headers.getlist("host"), scope["http_version"])
        if self._key is not None and scope["path"].startswith(_KEPT):
            self._require_key(self._key, headers.get("authorization", ""))
        body = b""
        if scope["method"] == "POST" and scope["path"] in _WITH_BODY:
            body = await self._body(headers.get("content-length"), receive)
        return {"type": "http.request", "body": body, "more_body": False}

    def _require_host(self, hosts: list[str], version: str) -> None:
        """Refuse a host that is not one of this server's.

        A page of another site whose name was made to resolve to this machine names itself here.
        """
        if len(hosts) > 1 or (not hosts and version != "1.0"):
            why = f"the request must have one header Host, and has {len(hosts)}"
            raise Refused(400, why, code="invalid_host")
        if not self._hosts:
            return
        for host in hosts:
            name = host_name(host)
            if not any(_fits(name, pattern) for pattern in self._hosts):
                why = (
                    f"this server is not {short_repr(name)}: ask for it by one of its own names, "
                    "or start it with that one in --allowed-hosts"
                )
                raise Refused(421, why, code="host_not_allowed")

    @staticmethod
    def _require_key(key: bytes, given: str) -> None:
        kind, _, token = given.partition(" ")
        token = token.strip()
        if not token or kind.lower() != "bearer":
            why = "this server wants its API key, as in the header Authorization: Bearer KEY"
        elif not hmac.compare_digest(_digest(token), key):  # takes as long for any other key
            why = "the API key that was sent is not the one of this server"
        else:
            return
        raise Refused(401, why, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _body(self, announced: str | None, receive: Receive) -> bytes:
        if announced is not None and announced.isdecimal() and int(announced) > self._most:
            raise self._too_large()
        body, more = bytearray(), True
        latest = asyncio.get_running_loop().time() + _BODY_S
        try:
            async with asyncio.timeout_at(latest) as limit:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    body += part
                    self._unfinished += len(part)
                    more = message.get("more_body", False)
                    self._require_room(len(body), more)
                    limit.reschedule(latest + len(body) / _SLOWEST)
        except TimeoutError:
            why = f"the body was not complete in time: {len(body)} bytes came"
            raise Refused(408, why, code="request_timeout", headers=_CLOSE) from None
        finally:
            self._unfinished -= len(body)
        return bytes(body)

    def _require_room(self, size: int, more: bool) -> None:
        """Refuse a body, unless it fits. A complete one fits however many others are not."""
        if size > self._most:
            raise self._too_large()
        if more and self._unfinished > self._most_unfinished:
            why = "the server has too many bodies that are not complete: try again later"
            raise Refused(503, why, code="overloaded", headers=LATER | _CLOSE)

    def _too_large(self) -> Refused:
        why = (
            f"the body is larger than {self._most} bytes, which is the most that this server takes"
        )
        return Refused(413, why, code="body_too_large", headers=_CLOSE)


def host_name(host: str) -> str:
    """Return the name in a header Host, without the port, as names are compared."""
    if host.startswith("["):
        name = host[1:].partition("]")[0]
    elif host.count(":") > 1:  # an address of IPv6 as people write it
        name = host
    else:
        name = host.partition(":")[0]
    return name.strip().rstrip(".").lower()


def _fits(name: str, pattern: str) -> bool:
    """Return True where the pattern is the name, any name, or all below a domain."""
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def _digest(key: str) -> bytes:
    """Return what two keys are compared by, which is of one length for all."""
    return sha256(key.encode()).digest()


# How much is let in: a bounded queue, and nothing once the server drains.


_ELSEWHERE = LATER | {"Connection": "close"}
"""A client that comes again on this connection would meet the same server."""


class Admission:
    """Counts the texts that are worked on or wait, and refuses those beyond a limit."""

    def __init__(self, at_once: int, max_queue: int) -> None:
        """``at_once`` run together, and ``max_queue`` more may wait for them to end."""
        self._most = at_once + max_queue
        self.open = 0
        self.draining = False

    @contextmanager
    def admit(self, texts: int) -> Iterator[None]:
        """Count so many texts until the block ends."""
        if self.draining:
            why = "the server is about to end, and takes no more requests"
            raise Refused(503, why, code="draining", headers=_ELSEWHERE)
        if texts > self._most:
            why = f"this asks for {texts} texts at once, and there is never room for so many"
            raise Refused(400, f"{why}: at most {self._most}", code="invalid_value")
        if self.open + texts > self._most:
            why = f"{self.open} texts are open, and {self._most} may be: try again later"
            raise Refused(429, why, code="rate_limit_exceeded", headers=LATER)
        self.open += texts
        try:
            yield
        finally:
            self.open -= texts
