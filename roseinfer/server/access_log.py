"""One line of JSON for each HTTP request: what was asked and how it ended, but no prompt."""

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
from roseinfer.progress import let_go_of_the_result, say
from roseinfer.server.refusals import Refused, refusal_of
from roseinfer.server.streaming import ClientGone

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from roseinfer.server.generation import Usage
    from roseinfer.server.metrics import HttpCounts

NOTE = "roseinfer.note"
"""What a scope calls its note. Who hands a request on may have begun one."""
_CLIENT_LEFT = 499
"""As nginx writes where a client left before it had an answer."""


@dataclass(slots=True)
class Note:
    """What is known of a request when it ends."""

    id: str
    status: int = _CLIENT_LEFT
    usage: Usage | None = None
    left: bool = False
    error: str | None = None


def noted(scope: Scope) -> Note:
    note: Note = scope[NOTE]
    return note


def note_error(scope: Scope, error: Exception) -> None:
    """Have the line say that a request failed. Where nobody expected that, say where, too.

    The message of such an error is left out: a prompt may be in it.
    """
    note = noted(scope)
    note.error = type(error).__name__
    if not isinstance(error, (RoseinferError, Refused)):
        where = "".join(traceback.format_tb(error.__traceback__))
        print(f"{note.id}: {note.error}\n{where}", file=sys.stderr, flush=True)


def write_line(line: str) -> None:
    """Print a line, as long as somebody takes it: requests are answered all the same."""
    try:
        print(line, flush=True)
    except OSError as error:
        let_go_of_the_result()
        say(f"no more lines of requests are printed: {error.strerror}")


class AccessLog:
    """Stands before everything else, so that it sees whatever is answered."""

    def __init__(
        self,
        app: ASGIApp,
        write: Callable[[str], None] | None,
        counts: HttpCounts | None = None,
    ) -> None:
        self._app = app
        self._write = write
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note: Note = scope.setdefault(NOTE, Note(f"req-{uuid4().hex}"))
        begun = time.perf_counter()

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", note.id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._answer(scope, receive, send_noted, note)
        finally:
            seconds = time.perf_counter() - begun
            if self._counts is not None:
                self._counts.add(scope["path"], scope["method"], note.status, seconds)
            if self._write is not None:
                self._write(_line(scope, note, seconds))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, note: Note) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientGone:
            note.left = True
        except Exception as error:
            note_error(scope, error)
            if note.status == _CLIENT_LEFT:  # else half of an answer is out, and is broken off
                await refusal_of(error).response()(scope, receive, send)


def _line(scope: Scope, note: Note, seconds: float) -> str:
    client = scope.get("client")
    said: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "id": note.id,
        "client": client[0] if client else None,
        "method": scope["method"],
        "path": scope["path"],
        "status": note.status,
        "seconds": round(seconds, 4),
    }
    if note.usage is not None:
        used = note.usage
        said |= {
            "prompt_tokens": used.prompt_tokens,
            "cached_tokens": used.cached_tokens,
            "completion_tokens": used.completion_tokens,
        }
    if note.left:
        said["left"] = True
    if note.error is not None:
        said["error"] = note.error
    return json.dumps(said)
