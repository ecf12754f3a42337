"""One text, asked of a server and streamed, with the moments at which its parts came."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from http.client import HTTPResponse

PATH = "/v1/completions"
_SILENCE = 120.0
"""Seconds after which a server that says nothing is given up."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Moments are seconds of ``time.monotonic``, which all processes of a machine share."""

    asked: float
    parts: tuple[float, ...]
    """When each part came, of its text or of tokens that had no text yet."""
    tokens: int

    @property
    def gaps(self) -> list[float]:
        return [later - part for part, later in zip(self.parts, self.parts[1:], strict=False)]

    def tokens_within(self, began: float, ended: float) -> float:
        """Return how many tokens came in that time, if its parts have equally many."""
        inside = sum(began <= part < ended for part in self.parts)
        return self.tokens * inside / len(self.parts)


@dataclass(frozen=True, slots=True)
class Client:
    url: str
    model: str
    key: str | None
    new_tokens: int

    def ask(self, prompt: list[int]) -> Answer:
        """Ask for a text, and wait until it has ended."""
        where = urlsplit(self.url)
        kind = HTTPSConnection if where.scheme == "https" else HTTPConnection
        connection = kind(where.hostname or "", where.port, timeout=_SILENCE)
        asked = time.monotonic()
        try:
            connection.request("POST", PATH, json.dumps(self._body(prompt)), self._headers())
            with connection.getresponse() as answer:
                return _read(asked, answer)
        except (OSError, HTTPException) as error:
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self.url} did not answer to the end: {said}") from error
        finally:
            connection.close()

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        return headers | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


def _read(asked: float, answer: HTTPResponse) -> Answer:
    if answer.status != 200:
        said = answer.read(1000).decode(errors="replace")
        raise ConfigError(f"the server answered with status {answer.status}: {said}")
    parts, tokens = [], 0
    for line in answer:
        data = line.removeprefix(b"data:").strip()
        if data == line.strip() or data == b"[DONE]":
            continue  # an empty line, or the end
        event = json.loads(data)
        if "error" in event:
            raise ConfigError(f"the server broke off a text: {event['error']}")
        if event["choices"]:  # a token may add no text, as one does that begins a character
            parts.append(time.monotonic())
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not parts or not tokens:
        raise ConfigError("the server streams nothing, or does not count its tokens")
    return Answer(asked, tuple(parts), tokens)
