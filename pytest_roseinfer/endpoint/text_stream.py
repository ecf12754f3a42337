"""One text that a server streams, read by a thread of its own."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.endpoint.server import Dialect, Server, ServerError, in_words

if TYPE_CHECKING:
    from collections.abc import Callable
    from http.client import HTTPResponse


class Streamed:
    """A request, and what has come of it by now."""

    def __init__(
        self, server: Server, prompt: str, most: int, silence: float, arrived: Callable[[], None]
    ) -> None:
        self.text = ""
        self.tokens: list[str] = []
        """The tokens of the text, where the server tells them."""
        self.gaps: list[float] = []
        """By how much the likeliest token was likelier than the second, at each."""
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.error = ""
        self.over = False
        self._left = False
        self._arrived = arrived
        self._silence = silence
        self._dialect: Dialect = server.dialect
        self._answer = server.open(prompt, most, server.dialect, silence)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Close the connection in the middle of the text, as a client that goes away does."""
        self._left = self.over = True
        with suppress(OSError, AttributeError):
            raw: Any = self._answer.fp
            raw.raw._sock.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        self._thread.join()

    def _read(self) -> None:
        try:
            with self._answer as answer:
                self._read_events(answer)
        except (OSError, HTTPException, ValueError, KeyError, ServerError) as error:
            if not self._left:
                broke = "" if isinstance(error, TimeoutError) else "the stream broke off: "
                self.error = f"{broke}{in_words(error, self._silence)}"
        self.over = True
        self._arrived()

    def _read_events(self, answer: HTTPResponse) -> None:
        ended = False
        for line in answer:
            if self._left:
                return
            words = line.strip()
            if not words.startswith(b"data:"):
                continue
            data = words.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                ended = True
                continue
            self._take(json.loads(data))
            self._arrived()
        if not (ended or self.finish_reason):  # not every server has a last word
            raise ServerError("it ended without saying so")

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise ServerError(str(event["error"]))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") if self._dialect.chat else choice["text"]
            if self.finish_reason and piece:
                raise ServerError(f"{piece!r} came behind the end")
            self.text += piece or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self._note(choice.get("logprobs") or {})

    def _note(self, told: dict[str, Any]) -> None:
        if self._dialect.chat:
            for each in told.get("content") or ():
                self.tokens.append(each["token"])
                self.gaps.append(_gap([top["logprob"] for top in each["top_logprobs"]]))
            return
        for token, top in zip(
            told.get("tokens") or (), told.get("top_logprobs") or (), strict=False
        ):
            self.tokens.append(token)
            self.gaps.append(_gap((top or {}).values()))


def _gap(logprobs: Any) -> float:
    first, second, *_ = [*sorted(logprobs, reverse=True), float("-inf"), float("-inf")]
    return float(first - second) if second > float("-inf") else float("inf")
