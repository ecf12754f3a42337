"""The application of the process that listens: it hands each request to a replica."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from roseinfer.server.access_log import AccessLog, Note, noted, write_line
from roseinfer.server.app import refuse
from roseinfer.server.auth import Admission, Gatekeeper
from roseinfer.server.refusals import LATER, Refused
from roseinfer.server.streaming import event, unless_gone

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from starlette.types import Message, Receive, Scope, Send

    from roseinfer.config import ServerConfig

# A request as it goes to a replica, and what is told of one that a replica lost.


_KEPT = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
"""What a replica gets of a scope. The rest belongs to the process that listens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request: all of it, since nothing is handed on before its body was read."""

    id: str
    scope: dict[str, Any] = field(repr=False)
    body: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str, scope: Scope, body: bytes) -> Asked:
        return cls(name, {key: scope[key] for key in _KEPT if key in scope}, body)


def is_last(messages: Sequence[Message]) -> bool:
    """Return whether an answer ends with these."""
    if not messages:
        return False
    last = messages[-1]
    return bool(last["type"] == "http.response.body" and not last.get("more_body", False))


class ReplicaLost(Refused):
    """A replica ended with a request in it, or none is there to take one."""

    def __init__(self) -> None:
        why = "the replica that had this request has ended: ask again, and another will take it"
        super().__init__(503, why, code="replica_lost", headers=LATER)


# The metrics of all replicas as one page, on which each is told by its label ``engine``.


_OWN = "engine="
"""What every number of a replica's has for a label; those of its process have none."""


def one_page(pages: Iterable[bytes]) -> bytes:
    """Return pages in Prometheus' format as one: what a name means is said once, before all."""
    meant: dict[str, list[str]] = {}
    numbers: dict[str, list[str]] = {}
    for page in pages:
        name = ""
        for line in page.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                meant[name], numbers[name] = [line], numbers.get(name, [])
            elif line.startswith("# "):
                meant[name].append(line)
            elif _OWN in line:
                numbers[name].append(line)
    lines = (line for name in meant if numbers[name] for line in (*meant[name], *numbers[name]))
    return "".join(f"{line}\n" for line in lines).encode()


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
