"""A server under test: its address and key, one request, one stream."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from pytest_roseinfer.run.watchdog import StoppedAnswering

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer.settings import Endpoint

_SETTLES = 5.0
"""Seconds within which a server must have given back what ended requests held."""
_HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class ServerError(Exception):
    """The server cannot be asked, or answers with an error."""


class KeyRefused(ServerError):
    """The server wants a key, or another one."""


class ServerGone(ServerError, StoppedAnswering):
    """Nobody listens there any more, or the engine behind it has stopped."""

    who: ClassVar[str] = "the server"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server takes. Every later choice is for servers that refuse the ones before."""

    chat: bool
    """Prompts are messages of a chat."""
    told: bool
    """It tells the two likeliest tokens at each place."""
    usage: bool
    """It counts tokens at the end of a stream."""

    def body(self, model: str, prompt: str, most: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self.chat:
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
            told = {"logprobs": True, "top_logprobs": 2}
        else:
            asked, told = {"prompt": prompt}, {"logprobs": 2}
        body = {"model": model, "max_tokens": most, "temperature": 0, "stream": True, **asked}
        if self.told:
            body |= told
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        return body

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


class Server:
    """Opens requests, at most so many a second, and looks at what the server says it holds."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._where = urlsplit(endpoint.url)
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        self._key = endpoint.key
        if endpoint.key:
            self._headers["Authorization"] = f"Bearer {endpoint.key}"
        self._apart = 1 / endpoint.rate
        self._opened = 0.0
        self._was_there = False
        self.model = endpoint.model or self._first_model()
        self.dialect = self._dialect()
        self._idle = self._holds()
        self._was_there = True

    def open(self, prompt: str, most: int, dialect: Dialect, silence: float) -> HTTPResponse:
        """Ask for a text and return the answer, whose lines are still to be read."""
        wait = self._opened + self._apart - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        self._opened = time.monotonic()
        body = json.dumps(dialect.body(self.model, prompt, most))
        return self._answer("POST", dialect.path, silence, body)

    def require_there(self) -> None:
        """Raise an error if the server is gone. That it answers with errors is another matter."""
        try:
            with self.open("a", 1, self.dialect, _SETTLES) as answer:
                answer.read()
        except ServerGone:
            raise
        except (ServerError, OSError, HTTPException):
            pass

    def held(self) -> str:
        """Say what is held beyond what was when nobody asked for anything; nothing is right."""
        ends = time.monotonic() + _SETTLES
        while True:
            now = self._holds() or {}  # which also shows whether it is still there
            more = [
                f"{name} {now[name]:g} (it was {was:g})"
                for name, was in (self._idle or {}).items()
                if now.get(name, was) > was + 1e-9
            ]
            if not more or time.monotonic() > ends:
                return ", ".join(more)
            time.sleep(0.05)

    def _answer(
        self, method: str, path: str, silence: float, body: str | None = None
    ) -> HTTPResponse:
        kind = HTTPSConnection if self._where.scheme == "https" else HTTPConnection
        assert self._where.hostname is not None
        with ExitStack() as stack:
            try:
                connection = kind(self._where.hostname, self._where.port, timeout=silence)
                stack.callback(connection.close)
                connection.request(method, path, body, self._headers)
                answer = connection.getresponse()
                if answer.status != HTTPStatus.OK:
                    with answer:
                        said = answer.read(2000).decode(errors="replace")
            except (OSError, HTTPException) as error:
                gone = self._was_there and isinstance(error, ConnectionRefusedError)
                broken = ServerGone if gone else ServerError
                raise broken(f"{method} {path}: {in_words(error, silence)}") from error
            if answer.status != HTTPStatus.OK:
                raise self._refused(f"{method} {path}", answer.status, said)
            stack.pop_all()
        return answer

    def _refused(self, asked: str, status: int, said: str) -> ServerError:
        gone = self._was_there and _has_stopped(status, said)
        shown = said.replace(self._key, "(the key)") if self._key else said
        said = f"{asked} was answered with {status}: {shown}"
        if gone:
            return ServerGone(said)
        if status == HTTPStatus.UNAUTHORIZED:
            why = "refuses the key in" if self._key else "wants a key: put it into"
            return KeyRefused(f"the server {why} ROSEINFER_API_KEY ({said})")
        return ServerError(said)

    def _models(self) -> list[str]:
        with self._answer("GET", "/v1/models", _SETTLES) as answer:
            try:
                return [str(each["id"]) for each in json.load(answer)["data"]]
            except (OSError, HTTPException, ValueError, LookupError, TypeError):
                raise ServerError(
                    "GET /v1/models brought no list of models: --roseinfer-model names one"
                ) from None

    def _first_model(self) -> str:
        if not (models := self._models()):
            raise ServerError("GET /v1/models names no model")
        return models[0]

    def _refuse_unknown_model(self, refused: ServerError) -> None:
        """Raise an error if the server lists its models, and not the one that is asked for."""
        try:
            models = self._models()
        except ServerError:
            return  # it may have no such list
        if models and self.model not in models:
            known = ", ".join(models)
            raise ServerError(f"the server has no model {self.model}: it has {known} ({refused})")

    def _dialect(self) -> Dialect:
        """Find the first dialect that the server takes."""
        for chat, told, usage in product((False, True), (True, False), (True, False)):
            dialect = Dialect(chat, told, usage)
            try:
                with self.open("a", 1, dialect, 60.0) as answer:
                    answer.read()
            except KeyRefused:
                raise
            except ServerError as error:
                refused = error
            except (OSError, HTTPException) as error:
                refused = ServerError(f"POST {dialect.path}: {in_words(error, 60.0)}")
            else:
                return dialect
        self._refuse_unknown_model(refused)  # not before: some take names that they do not list
        raise ServerError(f"the server takes no streamed text: {refused}")

    def _holds(self) -> dict[str, float] | None:
        """Return what the metrics say is held; None for a server without them."""
        try:
            with self._answer("GET", "/metrics", _SETTLES) as answer:
                lines = answer.read().decode(errors="replace").splitlines()
        except ServerGone:
            raise
        except (ServerError, OSError, HTTPException):
            return None
        found: dict[str, float] = {}
        for line in lines:
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name in _HELD:
                with suppress(ValueError):
                    found[name] = found.get(name, 0.0) + float(value)
        return found or None


def in_words(error: Exception, silence: float) -> str:
    """Say what broke a connection that may be silent for so many seconds."""
    if isinstance(error, TimeoutError):
        return f"nothing came for {silence:g} s"
    return f"{type(error).__name__}: {error}"


def _has_stopped(status: int, said: str) -> bool:
    """Return True if an error says that the engine behind the server has stopped."""
    if status != HTTPStatus.SERVICE_UNAVAILABLE:
        return False
    try:
        return json.loads(said)["error"]["code"] in ("engine_stopped", "engine_restarting")
    except (ValueError, LookupError, TypeError):
        return False


# One text that a server streams, read by a thread of its own.


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
