"""Who is let in, and how much they may send: a key, and a limit for bodies."""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from roseinfer.server.refusals import Refused
from roseinfer.server.streaming import ClientGone

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEPT = "/v1/"
"""What the key is for. Health and metrics are asked for by machines that have none."""


class Gatekeeper:
    """Reads a body before anything else looks at it, and turns away what must not come in."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._key = None if api_key is None else _digest(api_key)
        self._most = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            if self._key is not None and scope["path"].startswith(_KEPT):
                self._require_key(self._key, headers.get("authorization", ""))
            body = await self._body(headers.get("content-length"), receive)
        except Refused as refused:
            await refused.response()(scope, receive, send)
            return
        first: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def receive_again() -> Message:
            nonlocal first
            message, first = first, None
            return await receive() if message is None else message

        await self._app(scope, receive_again, send)

    @staticmethod
    def _require_key(key: bytes, given: str) -> None:
        kind, _, token = given.partition(" ")
        same = hmac.compare_digest(_digest(token.strip()), key)  # takes as long for any other key
        if not (same and kind.lower() == "bearer"):
            why = "this server wants its API key, as in the header Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise Refused(401, why, code="invalid_api_key", headers=headers)

    async def _body(self, announced: str | None, receive: Receive) -> bytes:
        if announced is not None and announced.isdecimal() and int(announced) > self._most:
            raise self._too_large()
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._most:
                raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> Refused:
        why = f"the body is larger than {self._most} bytes"
        headers = {"Connection": "close"}  # the rest of it is never read
        return Refused(413, why, code="body_too_large", headers=headers)


def _digest(key: str) -> bytes:
    """Return what two keys are compared by, which is of one length for all."""
    return sha256(key.encode()).digest()
