"""Who is let in, and how much they may send: host names, a key, and a limit for bodies."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from roseinfer.errors import short_repr
from roseinfer.server.refusals import Refused
from roseinfer.server.streaming import ClientGone

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from roseinfer.config import ServerConfig

_KEPT = "/v1/"
"""What the key is for. Health and metrics are asked for by machines that have none."""
_MOST_DROPPED, _DROPPING_S = 64 << 20, 5
"""So many bytes of a body that is too large are taken and dropped, and for so many seconds."""


class Gatekeeper:
    """Reads a body before anything else looks at it, and turns away what must not come in."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._hosts = tuple(map(host_name, config.allowed_hosts))
        self._key = None if config.api_key is None else _digest(config.api_key)
        self._most = config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._require_host(headers.getlist("host"), scope["http_version"])
            if self._key is not None and scope["path"].startswith(_KEPT):
                self._require_key(self._key, headers.get("authorization", ""))
            body = await self._body(headers.get("content-length"), receive)
        except _TooLarge as refused:
            await refused.response()(scope, receive, _dropping(receive, send))
            return
        except Refused as refused:
            await refused.response()(scope, receive, send)
            return
        first: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def receive_again() -> Message:
            nonlocal first
            message, first = first, None
            return await receive() if message is None else message

        await self._app(scope, receive_again, send)

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
            raise _TooLarge(self._most)
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._most:
                raise _TooLarge(self._most)
        return b"".join(parts)


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


class _TooLarge(Refused):
    """A body of more bytes than are taken. The connection is of no use behind it."""

    def __init__(self, most: int) -> None:
        why = f"the body is larger than {most} bytes, which is the most that this server takes"
        super().__init__(413, why, code="body_too_large", headers={"Connection": "close"})


def _dropping(receive: Receive, send: Send) -> Send:
    """Return what sends an answer, and takes the rest of the body before the answer ends.

    A connection that is closed while something comes is reset, and then a client that reads only
    when it has written everything sees no answer at all.
    """

    async def send_and_drop(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(_DROPPING_S):
                    await _drop(receive)
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    return send_and_drop


async def _drop(receive: Receive) -> None:
    """Take what is left of a body, up to a limit."""
    left, more = _MOST_DROPPED, True
    while more and left > 0:
        message = await receive()
        left -= len(message.get("body", b""))
        more = message.get("more_body", False)  # which a client that left has not


def _digest(key: str) -> bytes:
    """Return what two keys are compared by, which is of one length for all."""
    return sha256(key.encode()).digest()
