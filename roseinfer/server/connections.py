"""Connection limits: number of connections, size of request heads, and timeouts of slow clients."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from roseinfer.server.api_errors import RETRY_AFTER_HEADERS, ApiError
from roseinfer.server.auth import EARLY_ERROR_KEY
from roseinfer.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from starlette.types import ASGIApp

_PARSE_CHUNK_BYTES = 16 << 10
"""Bytes parsed between two checks of the limits."""
_MAX_PIPELINED = 16
"""Pipelined requests per connection, at most: they wait for the response to an earlier one."""
_MAX_LOGGED_PATH = 200
"""Characters of the path that are logged for a request whose head was incomplete."""
_LOG_EVERY_S = 10.0
_MAX_OPEN_FILES = 1 << 16
_RESERVED_FILES = 128
"""Open files reserved for anything but connections."""
MAX_BACKLOG = 2048
_MAX_CONNECTIONS = 8192
_MIN_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on clients that send no complete request, or do not read their response."""

    connections: int = _MAX_CONNECTIONS
    backlog: int = MAX_BACKLOG
    """Connections that the operating system queues until they are accepted."""
    headers: int = 100
    head_bytes: int = 64 << 10
    """Bytes of a request's head: its first line and headers."""
    all_head_bytes: int = 64 << 20
    """Bytes of all incomplete heads together."""
    head_seconds: float = 30.0
    """Seconds from the start of a connection, or its last response, to a complete head."""
    max_discarded_bytes: int = 64 << 20
    """Bytes of a body that are read and discarded after the response."""
    discard_seconds: float = 5.0
    """Seconds of discarding a body if the response ends the connection."""
    stalled_seconds: float = 120.0
    """Seconds that a client may pause reading its response."""

    @classmethod
    def for_open_files(cls, files: int) -> ConnectionLimits:
        """Return the limits for a process that may have ``files`` open files."""
        backlog = min(MAX_BACKLOG, max(files // 8, 1))
        connections = min(_MAX_CONNECTIONS, files - backlog - _RESERVED_FILES)
        return cls(connections=max(connections, _MIN_CONNECTIONS), backlog=backlog)


def raise_file_limit() -> int:
    """Raise this process's limit of open files, to 65,536 at most, and return the limit."""
    try:
        import resource
    except ImportError:  # on Windows, sockets are not files
        return _MAX_OPEN_FILES
    soft, hard = (
        _MAX_OPEN_FILES if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    limit = max(soft, min(hard, _MAX_OPEN_FILES))
    if limit > soft:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    return limit


def _out_of_files() -> bool:
    """Return True if no file can be opened. The event loop reports no new connections then."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False


@dataclass(slots=True)
class Connections:
    """All connections of a server, and the resources that they take together."""

    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    head_bytes: int = 0
    """Bytes of incomplete heads."""
    idle: dict[Connection, None] = field(default_factory=dict)
    """Connections without a request whose head is complete; longest idle first."""
    _logged: float = float("-inf")

    def make_room(self, count: int) -> bool:
        """Close an idle connection if ``count`` are too many; return False if all are busy."""
        if count <= self.limits.connections:
            return True
        for oldest in self.idle:
            oldest.drop()
            return True
        self._log(
            f"all {self.limits.connections} connections are busy, new ones get 503; raise the "
            "limit of open files (ulimit -n) for more"
        )
        return False

    def _log(self, message: str) -> None:
        """Print a log line, unless the last one was less than 10 s ago."""
        now = time.monotonic()
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            print_status(f"roseinfer serve: {message}")

    def close_expired(self, connections: Iterable[object]) -> None:
        """Close connections of slow clients, and some idle ones if no file can be opened."""
        now = time.monotonic()
        for each in list(connections):
            if isinstance(each, Connection):
                each.close_expired(now)
        if _out_of_files():
            self._log(
                "limit of open files reached, idle connections are closed; raise the limit "
                "(ulimit -n) for more"
            )
            for oldest in list(self.idle)[:_RESERVED_FILES]:
                oldest.drop()


class Connection(HttpToolsProtocol):
    """Connection of a client, which refuses requests beyond the limits.

    The application still answers a refused request: its auth middleware responds with the error
    under ``EARLY_ERROR_KEY``. So the request has an id, and a line in the access log.
    """

    def __init__(self, connections: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = connections
        self._limits = connections.limits
        self._running: RequestResponseCycle | None = None
        """Newest request that the application runs; later ones may be pipelined."""
        self._since = self._last_write_progress = time.monotonic()
        """Monotonic times: start of the wait for a head, and last progress of client reads."""
        self._bytes_sent = 0
        self._in_head = self._in_body = False
        self._head_bytes = self._pending_bytes = 0
        """Bytes of the current head: parsed ones, and received ones while it is incomplete."""
        self._dropped = 0
        self._problem: ApiError | None = None
        self._rejected = False

    # Start and end of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        wire = _ClosingTransport(transport, self._end)
        super().connection_made(cast("asyncio.Transport", wire))
        self._wire = wire
        if self._all.make_room(len(self.connections)):
            self._all.idle[self] = None
        else:
            message = "too many connections are open; try again later"
            self._refuse(ApiError(503, message, code="overloaded", headers=RETRY_AFTER_HEADERS))

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.idle.pop(self, None)
        self._forget_head()
        self._wire.ending = True
        if self._running is not None and self._running is not self.cycle:
            _disconnect(self._running)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection without a response."""
        self._all.idle.pop(self, None)
        self._wire.ending = True
        self._wire.transport.close()

    def shutdown(self) -> None:
        if self._wire.ending:
            self.drop()
        else:
            super().shutdown()

    def close_expired(self, now: float) -> None:
        """Close the connection if the client is too slow."""
        unsent = self._wire.transport.get_write_buffer_size()
        bytes_sent = self._wire.written - unsent
        if not unsent or bytes_sent > self._bytes_sent:
            self._bytes_sent, self._last_write_progress = bytes_sent, now
        elif now - self._last_write_progress > self._limits.stalled_seconds:
            self._wire.transport.abort()
            return
        if self._wire.ending:
            if now - self._since > self._limits.discard_seconds:
                self._wire.transport.close()
        elif not self._busy and now - self._since > self._limits.head_seconds:
            if self._in_head:
                message = (
                    f"headers incomplete after {self._limits.head_seconds:g} s; send them faster"
                )
                self._refuse(ApiError(408, message, code="request_timeout"))
            else:
                self.drop()

    @property
    def _busy(self) -> bool:
        """True while a response is incomplete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._since = time.monotonic()
        self._all.idle.pop(self, None)
        self._all.idle[self] = None

    def _end(self) -> None:
        """Close the connection once the client has had time to read the response.

        A connection that is closed while data arrives is reset, and then a client that reads only
        after it has written everything gets no response at all.
        """
        if self._in_body or self._rejected:
            self.flow.resume_reading()
            self._wire.transport.write_eof()
            self._await_head()
        else:
            self._wire.transport.close()

    # Incoming data

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), _PARSE_CHUNK_BYTES):
            if self._rejected or self._wire.ending:
                self._drop_bytes(len(data) - at)
                return
            piece = data[at : at + _PARSE_CHUNK_BYTES]
            super().data_received(piece)
            if self._in_head and not self._rejected:
                self._count_pending(len(piece))

    def _count_pending(self, count: int) -> None:
        self._pending_bytes += count
        self._all.head_bytes += count
        if self._pending_bytes > self._limits.head_bytes + _PARSE_CHUNK_BYTES:
            self._refuse(self._too_large())
        elif self._all.head_bytes > self._limits.all_head_bytes:
            message = "the server is receiving too many request heads; try again later"
            self._refuse(ApiError(503, message, code="overloaded", headers=RETRY_AFTER_HEADERS))

    def _forget_head(self) -> None:
        self._all.head_bytes -= self._pending_bytes
        self._pending_bytes = 0
        self._in_head = False

    def _drop_bytes(self, count: int) -> None:
        self._dropped += count
        if self._dropped > self._limits.max_discarded_bytes:
            self.drop()

    def _too_large(self) -> ApiError:
        limits = self._limits
        message = (
            f"the headers are too large; this server's limits are {limits.headers} headers and "
            f"{limits.head_bytes} bytes"
        )
        return ApiError(431, message, code="headers_too_large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if not self._busy:
            self._since = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer of a chunked body."""
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
        raise _ParserAborted

    def on_headers_complete(self) -> None:
        if len(self.pipeline) == _MAX_PIPELINED:
            raise _ParserAborted
        super().on_headers_complete()
        self._forget_head()
        self._in_body, self._dropped = True, 0
        self._all.idle.pop(self, None)
        if self.expect_100_continue:  # the next bytes may be the body, or another request
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._drop_bytes(len(body))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body = False

    # Responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not (self._busy or self._wire.ending):
            self._await_head()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse a request that the parser failed at; uvicorn calls this."""
        message = "malformed request; send a first line, headers and a body as in HTTP/1.1"
        self._refuse(self._problem or ApiError(400, message, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Answer the incoming request with an error, and close the connection.

        If an earlier request is still being answered, close it after that response, without one
        for this request.
        """
        self._rejected = True
        self._all.idle.pop(self, None)
        running = self._running
        if running is not None and not running.response_complete:
            if running is not self.cycle or not self._in_body or running.response_started:
                running.keep_alive = False
                return
            _disconnect(running)
        elif self._in_body:  # of a request whose response is complete
            self.drop()
            return
        if not self._in_head:  # nothing was received, or it was discarded
            super().on_message_begin()
        self._forget_head()
        self._in_body = False
        path = self.url.partition(b"?")[0][:_MAX_LOGGED_PATH].decode("latin-1")
        method = self.parser.get_method().decode() if path else "-"
        request_line = {"method": method, "path": path, "raw_path": b"", "query_string": b""}
        self.cycle = RequestResponseCycle(
            scope=cast(
                "Any", {**self.scope, **request_line, "headers": [], EARLY_ERROR_KEY: error}
            ),
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


class _ParserAborted(Exception):
    """Error raised in callbacks to make the parser fail as at a malformed request."""


def _disconnect(cycle: RequestResponseCycle) -> None:
    """End a request as if its client had disconnected."""
    cycle.disconnected = True
    cycle.message_event.set()


class _ClosingTransport:
    """Transport of a connection, whose ``close`` may be delayed."""

    def __init__(self, transport: asyncio.Transport, end: Callable[[], None]) -> None:
        """Wrap a transport; ``close`` calls ``end``, which closes it now or later."""
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
