"""The application of the process that listens: it hands each request to a replica."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roseinfer.replicas.asked import Asked, ReplicaLost, is_last
from roseinfer.replicas.one_page import one_page
from roseinfer.server.access_log import AccessLog, Note, noted, write_line
from roseinfer.server.admission import Admission
from roseinfer.server.app import refuse
from roseinfer.server.gatekeeper import Gatekeeper
from roseinfer.server.refusals import Refused
from roseinfer.server.streaming import event, unless_gone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from starlette.types import Message, Receive, Scope, Send

    from roseinfer.config import ServerConfig

_NO_LIMIT = 1 << 62
"""Each replica has its own limit, and says so when it is reached."""


class Replicas(Protocol):
    """All that serve."""

    def answer(self, asked: Asked) -> AsyncGenerator[list[Message] | Note, None]:
        """Have one of them answer. This raises ``ReplicaLost`` where that one ends first."""

    async def metrics(self) -> list[bytes]: ...

    async def ready(self) -> bool:
        """Say whether any of them takes requests."""

    def cut(self) -> None: ...


class Front:
    """What the process that listens has for a service."""

    def __init__(
        self,
        replicas: Replicas,
        config: ServerConfig,
        write: Callable[[str], None] = write_line,
    ) -> None:
        self.config = config
        self.admission = Admission(_NO_LIMIT, 0)
        self._replicas = replicas
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/{path:path}", _Handed(replicas, self.admission)),
            ],
            middleware=[
                Middleware(AccessLog, write if config.access_log else None),
                Middleware(Gatekeeper, config),
            ],
            exception_handlers={Refused: refuse, HTTPException: refuse},
        )

    def cut(self) -> None:
        """End the texts that are left with an error."""
        self._replicas.cut()

    async def _health(self, _: Request) -> Response:
        """Answer. Replicas that stop are replaced without anybody's help."""
        return JSONResponse({"alive": True})

    async def _ready(self, _: Request) -> Response:
        ready = not self.admission.draining and await self._replicas.ready()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        pages = await self._replicas.metrics()
        return Response(one_page(pages), media_type=CONTENT_TYPE_LATEST)


class _Handed:
    """Hands requests on, and says so in words where a replica ends in the middle of one."""

    def __init__(self, replicas: Replicas, admission: Admission) -> None:
        self._replicas = replicas
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        asked = Asked.of(noted(scope).id, scope, body)
        with self._admission.admit(1):
            await unless_gone(receive, self._answer(asked, noted(scope), send))

    async def _answer(self, asked: Asked, note: Note, send: Send) -> None:
        sending = _Sending(send)
        last: list[Message] = []
        async with aclosing(self._replicas.answer(asked)) as answer:
            try:
                async for part in answer:
                    if isinstance(part, Note):
                        note.usage, note.error = part.usage, part.error
                    elif is_last(part):
                        last = part
                    else:
                        await sending.send(part)
            except ReplicaLost as lost:
                if not sending.begun:
                    raise
                note.error = type(lost).__name__
                await sending.break_off(lost)
                return
        await sending.send(last)  # now, since nothing is left to do when the client has it


class _Sending:
    """An answer on its way to a client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streams = False
        self.begun = False

    async def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                await self._send(_without_id(message))
                self.begun, self._streams = True, _streams(message)
            else:
                await self._send(message)

    async def break_off(self, lost: ReplicaLost) -> None:
        """Say so where that can be read. There is no proper end, so it is not taken for whole."""
        if self._streams:
            error = event(lost.body, "error")
            await self._send({"type": "http.response.body", "body": error, "more_body": True})


def _without_id(start: Message) -> Message:
    """Return the message without the header that is put on every answer here."""
    headers = [each for each in start["headers"] if each[0] != b"x-request-id"]
    return {**start, "headers": headers}


def _streams(start: Message) -> bool:
    kinds = [value for name, value in start["headers"] if name == b"content-type"]
    return any(kind.startswith(b"text/event-stream") for kind in kinds)
