"""Access log: one line of JSON per HTTP request, with its outcome but without its prompt."""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from roseinfer.errors import RoseinferError
from roseinfer.server.api_errors import ApiError, to_api_error
from roseinfer.server.streaming import ClientDisconnected
from roseinfer.terminal import discard_stdout, print_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from roseinfer.server.generation import Usage
    from roseinfer.server.metrics import HttpMetrics

REQUEST_LOG_KEY = "roseinfer.note"
"""Scope key of a request's log entry. A proxying application may have set it already."""
_CLIENT_CLOSED_REQUEST = 499
"""Status that nginx logs for a client that disconnected before its response."""


@dataclass(slots=True)
class RequestLogEntry:
    """Data of a request for its log line, complete when the request ends."""

    id: str
    status: int = _CLIENT_CLOSED_REQUEST
    usage: Usage | None = None
    client_disconnected: bool = False
    error: str | None = None


def log_entry_of(scope: Scope) -> RequestLogEntry:
    entry: RequestLogEntry = scope[REQUEST_LOG_KEY]
    return entry


def log_error(scope: Scope, error: Exception) -> None:
    """Record an error in a request's log entry; print the traceback if it is unexpected.

    The message of an unexpected error is left out: it may contain a prompt.
    """
    entry = log_entry_of(scope)
    entry.error = type(error).__name__
    if not isinstance(error, (RoseinferError, ApiError)):
        frames = "".join(traceback.format_tb(error.__traceback__))
        print(f"{entry.id}: {entry.error}\n{frames}", file=sys.stderr, flush=True)


def write_line(line: str) -> None:
    """Print a line to stdout; stop printing, but not serving, once stdout is closed."""
    try:
        print(line, flush=True)
    except OSError as error:
        discard_stdout()
        print_status(f"access log: stdout failed ({error.strerror}); requests are not logged")


class AccessLog:
    """Outermost middleware, which logs and counts every response."""

    def __init__(
        self,
        app: ASGIApp,
        write: Callable[[str], None] | None,
        counts: HttpMetrics | None = None,
    ) -> None:
        self._app = app
        self._write = write
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry: RequestLogEntry = scope.setdefault(
            REQUEST_LOG_KEY, RequestLogEntry(f"req-{uuid4().hex}")
        )
        start = time.perf_counter()

        async def send_logged(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", entry.id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._respond(scope, receive, send_logged, entry)
        finally:
            seconds = time.perf_counter() - start
            if self._counts is not None:
                self._counts.add(scope["path"], scope["method"], entry.status, seconds)
            if self._write is not None:
                self._write(_line(scope, entry, seconds))

    async def _respond(
        self, scope: Scope, receive: Receive, send: Send, entry: RequestLogEntry
    ) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientDisconnected:
            entry.client_disconnected = True
        except Exception as error:
            log_error(scope, error)
            # Once the response has started, it can only be cut off.
            if entry.status == _CLIENT_CLOSED_REQUEST:
                await to_api_error(error).response()(scope, receive, send)


def _line(scope: Scope, entry: RequestLogEntry, seconds: float) -> str:
    client = scope.get("client")
    record: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": entry.id,
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": entry.status,
        "seconds": round(seconds, 4),
    }
    if entry.usage is not None:
        usage = entry.usage
        record |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        }
    if entry.client_disconnected:
        record["client_disconnected"] = True
    if entry.error is not None:
        record["error"] = entry.error
    return json.dumps(record)
