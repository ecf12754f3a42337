"""Front process of the replicas: a proxy that forwards each request to one of them."""

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

from roseinfer.server.access_log import AccessLog, RequestLogEntry, log_entry_of, write_line
from roseinfer.server.api_errors import RETRY_AFTER_HEADERS, ApiError
from roseinfer.server.app import handle_api_error
from roseinfer.server.auth import Admission, AuthMiddleware
from roseinfer.server.streaming import cancel_on_disconnect, event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from starlette.types import Message, Receive, Scope, Send

    from roseinfer.config import ServerConfig

# Forwarded requests, and the error of a lost replica.


_FORWARDED_SCOPE_KEYS = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
)
"""Keys of a scope that are forwarded. All others belong to the front process."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """Complete HTTP request: it is forwarded after its body was read."""

    id: str
    scope: dict[str, Any] = field(repr=False)
    body: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str, scope: Scope, body: bytes) -> ForwardedRequest:
        return cls(name, {key: scope[key] for key in _FORWARDED_SCOPE_KEYS if key in scope}, body)


def is_last(messages: Sequence[Message]) -> bool:
    """Return True if a response ends with these messages."""
    if not messages:
        return False
    last = messages[-1]
    return bool(last["type"] == "http.response.body" and not last.get("more_body", False))


class ReplicaLost(ApiError):
    """Error of a request whose replica has ended, or that found no running replica."""

    def __init__(self) -> None:
        message = (
            "the replica of this request has ended; try again, and another replica will answer"
        )
        super().__init__(503, message, code="replica_lost", headers=RETRY_AFTER_HEADERS)


# Metrics of all replicas on one page, where the label ``engine`` is the replica's number.


_REPLICA_LABEL = "engine="
"""Label of all metrics of a replica; metrics of its process do not have it, and are left out."""


def merge_metrics_pages(pages: Iterable[bytes]) -> bytes:
    """Merge pages in Prometheus' format into one, with one description of each metric."""
    descriptions: dict[str, list[str]] = {}
    values: dict[str, list[str]] = {}
    for page in pages:
        name = ""
        for line in page.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                descriptions[name], values[name] = [line], values.get(name, [])
            elif line.startswith("# "):
                descriptions[name].append(line)
            elif _REPLICA_LABEL in line:
                values[name].append(line)
    lines = (
        line
        for name in descriptions
        if values[name]
        for line in (*descriptions[name], *values[name])
    )
    return "".join(f"{line}\n" for line in lines).encode()


_NO_LIMIT = 1 << 62
"""Open requests of the front process: unlimited, as each replica has its own limit."""


class Replicas(Protocol):
    """Running replicas."""

    def answer(
        self, request: ForwardedRequest
    ) -> AsyncGenerator[list[Message] | RequestLogEntry, None]:
        """Forward a request to a replica; raise ``ReplicaLost`` if it ends before its response."""

    async def metrics(self) -> list[bytes]: ...

    async def ready(self) -> bool:
        """Return True if any replica accepts requests."""

    def abort(self) -> None: ...


class ReplicaProxy:
    """Service and application of the front process."""

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
                Route("/{path:path}", _ForwardingEndpoint(replicas, self.admission)),
            ],
            middleware=[
                Middleware(AccessLog, write if config.access_log else None),
                Middleware(AuthMiddleware, config),
            ],
            exception_handlers={ApiError: handle_api_error, HTTPException: handle_api_error},
        )

    def abort(self) -> None:
        """Fail the open completions."""
        self._replicas.abort()

    async def _health(self, _: Request) -> Response:
        """Report liveness, always: Ray replaces replicas that stop."""
        return JSONResponse({"alive": True})

    async def _ready(self, _: Request) -> Response:
        ready = not self.admission.draining and await self._replicas.ready()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        pages = await self._replicas.metrics()
        return Response(merge_metrics_pages(pages), media_type=CONTENT_TYPE_LATEST)


class _ForwardingEndpoint:
    """Endpoint that forwards requests, and sends an error if a replica ends during one."""

    def __init__(self, replicas: Replicas, admission: Admission) -> None:
        self._replicas = replicas
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        request = ForwardedRequest.of(log_entry_of(scope).id, scope, body)
        with self._admission.admit(1):
            await cancel_on_disconnect(receive, self._respond(request, log_entry_of(scope), send))

    async def _respond(
        self, request: ForwardedRequest, log_entry: RequestLogEntry, send: Send
    ) -> None:
        sender = _ResponseSender(send)
        last: list[Message] = []
        async with aclosing(self._replicas.answer(request)) as response:
            try:
                async for part in response:
                    if isinstance(part, RequestLogEntry):
                        log_entry.usage, log_entry.error = part.usage, part.error
                    elif is_last(part):
                        last = part
                    else:
                        await sender.send(part)
            except ReplicaLost as error:
                if not sender.has_begun:
                    raise
                log_entry.error = type(error).__name__
                await sender.send_error(error)
                return
        await sender.send(last)  # after all other work, as the client may disconnect then


class _ResponseSender:
    """Sender of a replica's response to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streams = False
        self.has_begun = False

    async def send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                await self._send(_without_id(message))
                self.has_begun, self._streams = True, _streams(message)
            else:
                await self._send(message)

    async def send_error(self, lost: ReplicaLost) -> None:
        """Send the error if the response is a stream of events.

        The response gets no end, so that clients see that it is incomplete.
        """
        if self._streams:
            error = event(lost.body, "error")
            await self._send({"type": "http.response.body", "body": error, "more_body": True})


def _without_id(start: Message) -> Message:
    """Return the message without the request id, which the front process adds itself."""
    headers = [each for each in start["headers"] if each[0] != b"x-request-id"]
    return {**start, "headers": headers}


def _streams(start: Message) -> bool:
    content_types = [value for name, value in start["headers"] if name == b"content-type"]
    return any(content_type.startswith(b"text/event-stream") for content_type in content_types)
