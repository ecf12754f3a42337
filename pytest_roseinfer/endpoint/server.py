"""HTTP client of a server under test: dialect detection, requests and completion streams."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from pytest_roseinfer.run.watchdog import TargetGoneError
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pytest_roseinfer.settings import Endpoint

_SETTLES = 5.0
"""Seconds for a server to release the blocks of ended requests; also a timeout of short
requests."""
_PATIENCE = 60.0
"""Seconds without a byte after which a server's first responses are given up."""
_LONG_TOKENS = (1024, 256)
"""Tokens of a text that is left before its end, the first number that the server accepts."""
_ARGMAX = {"temperature": 1, "top_p": 1e-6}
"""Parameters that sample the argmax, for servers that refuse several choices at temperature 0."""
CHOICES = 2
"""Choices of a request with several for its prompt."""
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_HELD = (*_REQUESTS, "vllm:kv_cache_usage_perc")
_LOOKED_UP, _FOUND = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
"""Metrics: prompt tokens that were looked up in the prefix cache, and those found there."""


class ServerError(Exception):
    """Failure to reach the server, or an error response."""


class AuthError(ServerError):
    """Response to a missing or wrong key."""


class ServerGone(ServerError, TargetGoneError):
    """Failure after the server worked: it no longer listens, or its engine has stopped."""

    subject_name: ClassVar[str] = "the server"


@dataclass(frozen=True, slots=True)
class Dialect:
    """Request format that a server accepts; later candidates ask for less."""

    chat: bool
    """True if prompts are chat messages."""
    has_logprobs: bool
    """True if the server returns the top two logprobs of each token."""
    usage: bool
    """True if the server sends token counts at the end of a stream."""
    several_prompts: bool = False
    """True if a request may have several prompts, with a choice for each."""
    echo: bool = False
    """True if the server repeats the prompt before its completion on request."""
    several_choices: bool = False
    """True if a request may have several choices for its prompt."""
    sampled_choices: bool = False
    """True if it must sample them: they then get a nucleus of one token, which is the argmax."""
    long_tokens: int = 0
    """Tokens of a long text, which does not end by itself; 0 for a server that makes none."""

    def body(
        self,
        model: str,
        prompts: Sequence[str],
        max_tokens: int,
        *,
        choices: int = 1,
        lasting: bool = False,
    ) -> dict[str, Any]:
        """Return a request's body; the text of a ``lasting`` one does not end by itself."""
        logprobs: dict[str, Any] = {}
        if self.chat:
            (prompt,) = prompts
            text: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
            logprobs = {"logprobs": True, "top_logprobs": 2}
        elif len(prompts) == 1:
            text, logprobs = {"prompt": prompts[0]}, {"logprobs": 2}
        else:
            text, logprobs = {"prompt": list(prompts), "echo": self.echo}, {"logprobs": 2}
        body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True, **text}
        if self.has_logprobs:
            body |= logprobs
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if choices > 1:
            body |= {"n": choices, **(_ARGMAX if self.sampled_choices else {})}
        if lasting:
            body["ignore_eos"] = True
        return body

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


class Server:
    """Client of one server, with a rate limit, that also reads the server's usage metrics."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._url_parts = urlsplit(endpoint.url)
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        self._key = endpoint.key
        if endpoint.key:
            self._headers["Authorization"] = f"Bearer {endpoint.key}"
        self._min_interval = 1 / endpoint.rate
        self._opened = 0.0
        self._was_reachable = False
        self.model = endpoint.model or self._first_model()
        self.dialect = self._dialect()
        self._idle = self._read_metrics(_HELD)
        self.dialect = self._with_several_prompts(self.dialect)
        self.dialect = self._with_several_choices(self.dialect)
        self.dialect = self._with_long_texts(self.dialect)
        self._was_reachable = True

    def open(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        dialect: Dialect,
        silence: float,
        *,
        choices: int = 1,
        lasting: bool = False,
    ) -> HTTPResponse:
        """Send a completion request and return the response, with its lines still unread."""
        self._wait_for_turn()
        body = dialect.body(self.model, prompts, max_tokens, choices=choices, lasting=lasting)
        return self._request("POST", dialect.path, silence, json.dumps(body))

    def leave_early(self, prompt: str, seconds: float) -> None:
        """Request a long text, and disconnect ``seconds`` later without reading a response."""
        self._wait_for_turn()
        dialect = self.dialect
        body = dialect.body(self.model, [prompt], dialect.long_tokens, lasting=True)
        with closing(self._connect(_SETTLES)) as connection, suppress(OSError, HTTPException):
            connection.request("POST", dialect.path, json.dumps(body), self._headers)
            time.sleep(seconds)

    def _wait_for_turn(self) -> None:
        """Wait until another request may be opened."""
        wait = self._opened + self._min_interval - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        self._opened = time.monotonic()

    def require_reachable(self) -> None:
        """Raise ``ServerGone`` if the server has stopped; ignore error responses."""
        try:
            with self.open(["a"], 1, self.dialect, _SETTLES) as response:
                response.read()
        except ServerGone:
            raise
        except (ServerError, OSError, HTTPException):
            pass

    @property
    def shows_usage(self) -> bool:
        """True if the server shows in metrics what it holds."""
        return self._idle is not None

    def describe_requests(self, expected: int) -> str:
        """Describe the requests that it serves, as of now; "" for at most ``expected``."""
        now, idle = self._read_metrics(_REQUESTS) or {}, self._idle or {}
        if sum(now.values()) <= sum(idle.get(name, 0.0) for name in now) + expected:
            return ""
        return ", ".join(f"{name} {number:g}" for name, number in now.items())

    def describe_leaks(self) -> str:
        """Describe requests and blocks that the server holds beyond its idle state; "" if none."""
        ends = time.monotonic() + _SETTLES
        while True:
            now = self._read_metrics(_HELD) or {}  # also raises if the server is gone
            more = [
                f"{name} {now[name]:g} (it was {was:g})"
                for name, was in (self._idle or {}).items()
                if now.get(name, was) > was + 1e-9
            ]
            if not more or time.monotonic() > ends:
                return ", ".join(more)
            time.sleep(0.05)

    def _request(
        self, method: str, path: str, silence: float, body: str | None = None
    ) -> HTTPResponse:
        with ExitStack() as stack:
            try:
                connection = self._connect(silence)
                stack.callback(connection.close)
                connection.request(method, path, body, self._headers)
                response = connection.getresponse()
                if response.status != HTTPStatus.OK:
                    with response:
                        text = response.read(2000).decode(errors="replace")
            except (OSError, HTTPException) as error:
                has_stopped = self._was_reachable and isinstance(error, ConnectionRefusedError)
                broken = ServerGone if has_stopped else ServerError
                raise broken(
                    f"{method} {path}: {describe_connection_error(error, silence)}"
                ) from error
            if response.status != HTTPStatus.OK:
                raise self._refusal(f"{method} {path}", response.status, text)
            stack.pop_all()
        return response

    def _connect(self, timeout: float) -> HTTPConnection:
        kind = HTTPSConnection if self._url_parts.scheme == "https" else HTTPConnection
        assert self._url_parts.hostname is not None
        return kind(self._url_parts.hostname, self._url_parts.port, timeout=timeout)

    def _refusal(self, request: str, status: int, text: str) -> ServerError:
        has_stopped = self._was_reachable and _has_stopped(status, text)
        shown = text.replace(self._key, "(the key)") if self._key else text
        message = f"{request} was answered with {status}: {shown}"
        if has_stopped:
            return ServerGone(message)
        if status == HTTPStatus.UNAUTHORIZED:
            reason = "refuses the key in" if self._key else "needs a key; put it into"
            return AuthError(f"the server {reason} ROSEINFER_API_KEY ({message})")
        return ServerError(message)

    def _models(self) -> list[str]:
        with self._request("GET", "/v1/models", _SETTLES) as response:
            try:
                return [str(each["id"]) for each in json.load(response)["data"]]
            except (OSError, HTTPException, ValueError, LookupError, TypeError):
                raise ServerError(
                    "GET /v1/models: no list of models in the response; name a model with "
                    "--roseinfer-model"
                ) from None

    def _first_model(self) -> str:
        if not (models := self._models()):
            raise ServerError(
                "GET /v1/models: the list of models is empty; name one with --roseinfer-model"
            )
        return models[0]

    def _refuse_unknown_model(self, refused: ServerError) -> None:
        """Raise an error if the server lists its models without the requested one."""
        try:
            models = self._models()
        except ServerError:
            return  # some servers do not list models
        if models and self.model not in models:
            model_names = ", ".join(models)
            raise ServerError(
                f"the server has no model {self.model}: it has {model_names} ({refused})"
            )

    def _dialect(self) -> Dialect:
        """Return the first dialect that the server accepts."""
        for chat, has_logprobs, usage in product((False, True), (True, False), (True, False)):
            dialect = Dialect(chat, has_logprobs, usage)
            try:
                with self.open(["a"], 1, dialect, _PATIENCE) as response:
                    response.read()
            except AuthError:
                raise
            except ServerError as error:
                refused = error
            except (OSError, HTTPException) as error:
                refused = ServerError(
                    f"POST {dialect.path}: {describe_connection_error(error, _PATIENCE)}"
                )
            else:
                return dialect
        self._refuse_unknown_model(refused)  # last: some accept names they do not list
        raise ServerError(f"the server refuses all streamed completions: {refused}")

    def _with_several_prompts(self, dialect: Dialect) -> Dialect:
        """Return the dialect with several prompts, and their echo, if the server has them."""
        if dialect.chat:
            return dialect
        for echo in (True, False):
            several = replace(dialect, several_prompts=True, echo=echo)
            stream = self._try_stream(["a", "b"], several)
            begins = ["a", "b"] if echo else ["", ""]
            if stream and all(
                choice.finish_reason and choice.text.startswith(begin)
                for choice, begin in zip(stream.choices, begins, strict=True)
            ):
                return several
        return dialect

    def _with_several_choices(self, dialect: Dialect) -> Dialect:
        """Return the dialect with several choices for a prompt, if the server has them."""
        for sampled in (False, True):
            several = replace(dialect, several_choices=True, sampled_choices=sampled)
            stream = self._try_stream(["a"], several, CHOICES)
            if stream and all(choice.finish_reason for choice in stream.choices):
                return several
        return dialect

    def _with_long_texts(self, dialect: Dialect) -> Dialect:
        """Return the dialect with the longest texts that the server makes."""
        for tokens in _LONG_TOKENS:
            with suppress(ServerError):
                self.open(["a"], tokens, dialect, _PATIENCE, lasting=True).close()
                return replace(dialect, long_tokens=tokens)
        return dialect

    def _try_stream(
        self, prompts: Sequence[str], dialect: Dialect, choices: int = 1
    ) -> CompletionStream | None:
        """Return an ended stream of one token per choice; None if the server refuses it."""
        try:
            stream = CompletionStream(
                self, prompts, 1, _PATIENCE, lambda: None, dialect=dialect, choices=choices
            )
        except ServerError:
            return None
        stream.wait()
        return None if stream.error else stream

    @property
    def looks_up_prompts(self) -> bool:
        """True if the server shows in metrics that it looks prompts up in a prefix cache."""
        return bool((self._read_metrics((_LOOKED_UP,)) or {}).get(_LOOKED_UP))

    def count_cached_tokens(self) -> int:
        """Return the number of prompt tokens that the server has found in its prefix cache."""
        return int((self._read_metrics((_FOUND,)) or {}).get(_FOUND, 0))

    def _read_metrics(self, names: Collection[str]) -> dict[str, float] | None:
        """Return the sum of each of these metrics; None for a server without them."""
        try:
            with self._request("GET", "/metrics", _SETTLES) as response:
                lines = response.read().decode(errors="replace").splitlines()
        except ServerGone:
            raise
        except (ServerError, OSError, HTTPException):
            return None
        metrics: dict[str, float] = {}
        for line in lines:
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name in names:
                with suppress(ValueError):
                    metrics[name] = metrics.get(name, 0.0) + float(value)
        return metrics or None


def describe_connection_error(error: Exception, silence: float) -> str:
    """Describe a connection's error; ``silence`` is its timeout in seconds."""
    if isinstance(error, TimeoutError):
        return f"nothing received for {silence:g} s"
    return f"{type(error).__name__}: {error}"


def _has_stopped(status: int, text: str) -> bool:
    """Return True if an error response says that the server's engine has stopped."""
    if status != HTTPStatus.SERVICE_UNAVAILABLE:
        return False
    try:
        return json.loads(text)["error"]["code"] in ("engine_stopped", "engine_restarting")
    except (ValueError, LookupError, TypeError):
        return False


# Streams of completions.


@dataclass(slots=True)
class Choice:
    """One text of a streamed request, as far as it has arrived."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    """Tokens of the text; empty for a server without logprobs."""
    top2_gaps: list[float] = field(default_factory=list)
    """Gap between the top two logprobs, of each token."""
    finish_reason: str | None = None
    logprobs: list[dict[str, float]] = field(default_factory=list)
    """Logprobs at the position of each token, by token: its own and the top ones."""


class CompletionStream:
    """A streamed request and its texts so far, read by a thread of its own."""

    def __init__(
        self,
        server: Server,
        prompts: Sequence[str],
        max_tokens: int,
        silence: float,
        arrived: Callable[[], None],
        *,
        dialect: Dialect | None = None,
        choices: int = 1,
        lasting: bool = False,
    ) -> None:
        """Send a request with ``choices`` texts for each prompt: those of the first come first."""
        self.prompts = prompts
        self.lasting = lasting
        self.choices = [Choice() for _ in range(len(prompts) * choices)]
        self.usage: dict[str, Any] = {}
        self.error = ""
        self.has_ended = False
        self._disconnected = False
        self._arrived = arrived
        self._silence = silence
        self._dialect = dialect or server.dialect
        self._response = server.open(
            prompts, max_tokens, self._dialect, silence, choices=choices, lasting=lasting
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """The text of the only prompt."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the only prompt's text."""
        return self.choices[0].finish_reason

    def disconnect(self) -> None:
        """Close the connection in the middle of the stream, as a client that disconnects does."""
        self._disconnected = self.has_ended = True
        with suppress(OSError, AttributeError):
            raw: Any = self._response.fp
            raw.raw._sock.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        self._thread.join()

    def _read(self) -> None:
        try:
            with self._response as response:
                self._read_events(response)
        except (OSError, HTTPException, ValueError, KeyError, ServerError) as error:
            if not self._disconnected:
                broke = "" if isinstance(error, TimeoutError) else "the stream broke off: "
                self.error = f"{broke}{describe_connection_error(error, self._silence)}"
        self.has_ended = True
        self._arrived()

    def _read_events(self, response: HTTPResponse) -> None:
        ended = False
        for line in response:
            if self._disconnected:
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
        # Not every server sends [DONE].
        if not (ended or all(choice.finish_reason for choice in self.choices)):
            raise ServerError("it ended without a finish reason or [DONE]")

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise ServerError(str(event["error"]))
        self.usage = event.get("usage") or self.usage
        for chunk in event.get("choices", ()):
            index = chunk.get("index", 0)
            if index not in range(len(self.choices)):
                expected = format_count(len(self.choices), "choice")
                raise ServerError(f"choice {index} arrived in a response of {expected}")
            choice = self.choices[index]
            piece = chunk["delta"].get("content") if self._dialect.chat else chunk["text"]
            if choice.finish_reason and piece:
                raise ServerError(f"{piece!r} arrived after the finish reason")
            choice.text += piece or ""
            choice.finish_reason = chunk.get("finish_reason") or choice.finish_reason
            self._note(choice, chunk.get("logprobs") or {})

    def _note(self, choice: Choice, logprobs: dict[str, Any]) -> None:
        if self._dialect.chat:
            for each in logprobs.get("content") or ():
                choice.tokens.append(each["token"])
                choice.top2_gaps.append(_gap([top["logprob"] for top in each["top_logprobs"]]))
                shown = (*each["top_logprobs"], each)
                choice.logprobs.append({one["token"]: one["logprob"] for one in shown})
            return
        lists = {name: each for name in _LISTS if (each := logprobs.get(name)) is not None}
        if len({len(each) for each in lists.values()}) > 1:
            lengths = ", ".join(f"{len(each)} {name}" for name, each in lists.items())
            raise ServerError(f"its logprobs have lists of different lengths: {lengths}")
        if {"tokens", "top_logprobs"} <= lists.keys():
            choice.tokens += lists["tokens"]
            choice.top2_gaps += [_gap((top or {}).values()) for top in lists["top_logprobs"]]
            choice.logprobs += [top or {} for top in lists["top_logprobs"]]


_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Lists of a completion's logprobs, with one entry for each token."""


def _gap(logprobs: Any) -> float:
    first, second, *_ = [*sorted(logprobs, reverse=True), float("-inf"), float("-inf")]
    return float(first - second) if second > float("-inf") else float("inf")
