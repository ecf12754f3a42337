"""Connections: how many there are, and how large and slow a request may be before it is read."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from roseinfer.progress import say
from roseinfer.server.auth import REFUSAL
from roseinfer.server.refusals import LATER, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp

_PIECE = 16 << 10
"""Bytes that are parsed before one looks at the limits."""
_MOST_PIPELINED = 16
"""Requests of a connection that may wait for the answer to an earlier one."""
_LONGEST_PATH = 200
"""Characters of the path that the access log has of a request whose head was not complete."""
_LOG_EVERY_S = 10.0
_MOST_FILES = 1 << 16
_OTHER_FILES = 128
"""Files that a server may have open beside its connections."""
MOST_BACKLOG = 2048
_MOST_CONNECTIONS = 8192
_FEWEST_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """Resources that clients may take before a request is read, or without reading its answer."""

    connections: int = _MOST_CONNECTIONS
    backlog: int = MOST_BACKLOG
    """Connections that the system has ready to be accepted."""
    headers: int = 100
    head_bytes: int = 64 << 10
    """Bytes of a request's first line and headers."""
    all_head_bytes: int = 64 << 20
    """Bytes of all heads that are not complete."""
    head_seconds: float = 30.0
    """Seconds from the beginning of a connection, or the last answer, to a complete head."""
    dropped_bytes: int = 64 << 20
    """Bytes of a body that are read after the answer, and dropped."""
    dropping_seconds: float = 5.0
    """Seconds for which they are, where the answer ends the connection."""
    stalled_seconds: float = 120.0
    """Seconds in which a client may take nothing of what is sent to it."""

    @classmethod
    def of_files(cls, files: int) -> Limits:
        """Return the limits of a process that may have so many files open."""
        backlog = min(MOST_BACKLOG, max(files // 8, 1))
        most = min(_MOST_CONNECTIONS, files - backlog - _OTHER_FILES)
        return cls(connections=max(most, _FEWEST_CONNECTIONS), backlog=backlog)


def raise_file_limit() -> int:
    """Let this process open as many files as it may, within reason, and return the number."""
    try:
        import resource
    except ImportError:  # on Windows, sockets are not files
        return _MOST_FILES
    soft, hard = (
        _MOST_FILES if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    most = max(soft, min(hard, _MOST_FILES))
    if most > soft:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    return most


def _files_run_out() -> bool:
    """Return True where no file can be opened. The event loop says nothing of connections then."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


@dataclass(slots=True)
class Connections:
    """All connections of a server, and what they take together."""

    limits: Limits = field(default_factory=Limits)
    head_bytes: int = 0
    """Bytes of heads that are not complete."""
    idle: dict[Connection, None] = field(default_factory=dict)
    """Connections without a request whose head is complete, those first that are so longest."""
    _logged: float = float("-inf")

    def make_room(self, count: int) -> bool:
        """Close an idle connection where ``count`` are too many; return False if all are busy."""
        if count <= self.limits.connections:
            return True
        for oldest in self.idle:
            oldest.drop()
            return True
        self._say(
            f"all {self.limits.connections} connections are busy, and new ones get 503: a higher "
            "limit of open files (ulimit -n) may allow more"
        )
        return False

    def _say(self, what: str) -> None:
        """Write a line of the log, if the last one was long enough ago."""
        now = time.monotonic()
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            say(f"roseinfer serve: {what}")

    def look(self, connections: Iterable[object]) -> None:
        """End the connections whose clients are too slow, and some idle ones if files run out."""
        now = time.monotonic()
        for each in list(connections):
            if isinstance(each, Connection):
                each.look(now)
        if _files_run_out():
            self._say(
                "all files that may be open are, and connections are closed: a higher limit "
                "(ulimit -n) allows more"
            )
            for oldest in list(self.idle)[:_OTHER_FILES]:
                oldest.drop()


class Connection(HttpToolsProtocol):
    """A client's connection. Requests beyond the limits are refused before the application runs.

    A request that is refused gets an answer from the application all the same, as its gatekeeper
    makes it of ``REFUSAL``: so it has an id, and a line in the access log.
    """

    def __init__(self, connections: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = connections
        self._limits = connections.limits
        self._running: RequestResponseCycle | None = None
        """The newest request that was handed to the application; others may be pipelined."""
        self._since = self._moved = time.monotonic()
        """Times since which a head is awaited, and when bytes were last taken by the client."""
        self._taken = 0
        self._in_head = self._in_body = False
        self._head_bytes = self._pending_bytes = 0
        """Bytes of the present head that are parsed, and of all of it while it is incomplete."""
        self._dropped = 0
        self._problem: Refused | None = None
        self._broken = False

    # ------------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        wire = _Wire(transport, self._end)
        super().connection_made(cast("asyncio.Transport", wire))
        self._wire = wire
        if self._all.make_room(len(self.connections)):
            self._all.idle[self] = None
        else:
            why = "too many connections are open: try again later"
            self._refuse(Refused(503, why, code="overloaded", headers=LATER))

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.idle.pop(self, None)
        self._forget_head()
        self._wire.ending = True
        if self._running is not None and self._running is not self.cycle:
            _disconnect(self._running)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection without another word."""
        self._all.idle.pop(self, None)
        self._wire.ending = True
        self._wire.transport.close()

    def shutdown(self) -> None:
        if self._wire.ending:
            self.drop()
        else:
            super().shutdown()

    def look(self, now: float) -> None:
        """End the connection if the client is too slow."""
        waiting = self._wire.transport.get_write_buffer_size()
        taken = self._wire.written - waiting
        if not waiting or taken > self._taken:
            self._taken, self._moved = taken, now
        elif now - self._moved > self._limits.stalled_seconds:
            self._wire.transport.abort()
            return
        if self._wire.ending:
            if now - self._since > self._limits.dropping_seconds:
                self._wire.transport.close()
        elif not self._busy and now - self._since > self._limits.head_seconds:
            if self._in_head:
                why = f"the request had no end of its headers after {self._limits.head_seconds:g} s"
                self._refuse(Refused(408, why, code="request_timeout"))
            else:
                self.drop()

    @property
    def _busy(self) -> bool:
        """True while an answer is due."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._since = time.monotonic()
        self._all.idle.pop(self, None)
        self._all.idle[self] = None

    def _end(self) -> None:
        """Close the connection once the client has had time to read the answer.

        A connection that is closed while something comes is reset, and then a client that reads
        only when it has written everything sees no answer at all.
        """
        if self._in_body or self._broken:
            self.flow.resume_reading()
            self._wire.transport.write_eof()
            self._await_head()
        else:
            self._wire.transport.close()

    # ---------------------------------------------------------------------------- what comes

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), _PIECE):
            if self._broken or self._wire.ending:
                self._drop_bytes(len(data) - at)
                return
            piece = data[at : at + _PIECE]
            super().data_received(piece)
            if self._in_head and not self._broken:
                self._count_pending(len(piece))

    def _count_pending(self, count: int) -> None:
        self._pending_bytes += count
        self._all.head_bytes += count
        if self._pending_bytes > self._limits.head_bytes + _PIECE:
            self._refuse(self._too_large())
        elif self._all.head_bytes > self._limits.all_head_bytes:
            why = "the server has too many requests that are not complete: try again later"
            self._refuse(Refused(503, why, code="overloaded", headers=LATER))

    def _forget_head(self) -> None:
        self._all.head_bytes -= self._pending_bytes
        self._pending_bytes = 0
        self._in_head = False

    def _drop_bytes(self, count: int) -> None:
        self._dropped += count
        if self._dropped > self._limits.dropped_bytes:
            self.drop()

    def _too_large(self) -> Refused:
        limits = self._limits
        why = (
            f"the request has more than {limits.headers} headers or {limits.head_bytes} bytes of "
            "them, which is the most that this server takes"
        )
        return Refused(431, why, code="headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if not self._busy:
            self._since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or one that comes after a body in chunks."""
        self._count_head(len(name) + len(value) + len(b": \r\n"))
        if len(self.headers) == self._limits.headers:
            self._refuse_head()
        super().on_header(name, value)

    def _count_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > self._limits.head_bytes:
            self._refuse_head()

    def _refuse_head(self) -> None:
        self._problem = self._too_large()
        raise _Stopped

    def on_headers_complete(self) -> None:
        if len(self.pipeline) == _MOST_PIPELINED:
            raise _Stopped
        super().on_headers_complete()
        self._forget_head()
        self._in_body, self._dropped = True, 0
        self._all.idle.pop(self, None)
        if self.expect_100_continue:  # what follows may be the body, or not
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._drop_bytes(len(body))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False

    # ------------------------------------------------------------------------ what is answered

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._busy or self._wire.ending):
            self._await_head()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse a request that the parser did not take. uvicorn calls this."""
        why = "the request is malformed: its first line, headers and body must be those of HTTP/1.1"
        self._refuse(self._problem or Refused(400, why, code="invalid_http"))

    def _refuse(self, refused: Refused) -> None:
        """Answer the request that comes in with a refusal, and end the connection.

        Where an earlier one is still answered, the connection ends when it is.
        """
        self._broken = True
        self._all.idle.pop(self, None)
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or not self._in_body or running.response_started:
                running.keep_alive = False
                return
            _disconnect(running)
        elif self._in_body:  # of a request that has its answer
            self.drop()
            return
        if not self._in_head:  # nothing came, or what came is forsaken
            super().on_message_begin()
        self._forget_head()
        self._in_body = False
        path = self.url.partition(b"?")[0][:_LONGEST_PATH].decode("latin-1")
        method = self.parser.get_method().decode() if path else "-"
        known = {"method": method, "path": path, "raw_path": b"", "query_string": b""}
        self.cycle = RequestResponseCycle(
            scope=cast("Any", {**self.scope, **known, "headers": [], REFUSAL: refused}),
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=False,
            on_response=self.on_response_complete,
        )
        self._start_asgi_task(self.cycle, self.app)


class _Stopped(Exception):
    """Ends the parser, which then fails as at a request that it cannot read."""


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Let a request end as if its client had left."""
    cycle.disconnected = True
    cycle.message_event.set()


class _Wire:
    """The transport of a connection, as requests have it."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        """``end`` closes it, now or later."""
        self.transport = transport
        self.ending = False
        self.written = 0
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self.transport.write(data)

    def is_closing(self) -> bool:
        return self.ending or self.transport.is_closing()

    def close(self) -> None:
        if not self.ending:
            self.ending = True
            self._end()
