"""``endpoint``: throughput and latencies of a server that streams to many clients."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from roseinfer.bench.driver import LatencyRow
from roseinfer.bench.report import Report, Table
from roseinfer.config import ServerConfig
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from http.client import HTTPResponse
    from multiprocessing.synchronize import Barrier

# One streamed completion, with the times of its chunks.


PATH = "/v1/completions"
_READ_TIMEOUT_S = 120.0
"""Seconds without data that fail a request."""


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Times of one streamed completion, by ``time.monotonic``, which all processes share."""

    sent_at: float
    chunk_times: tuple[float, ...]
    """Arrival times of its chunks, including those of tokens without text."""
    tokens: int

    @property
    def gaps(self) -> list[float]:
        return [
            later - earlier
            for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False)
        ]

    def tokens_within(self, starts_at: float, ends_at: float) -> float:
        """Estimate the number of tokens in an interval, as if all chunks had equally many."""
        inside = sum(starts_at <= part < ends_at for part in self.chunk_times)
        return self.tokens * inside / len(self.chunk_times)


@dataclass(frozen=True, slots=True)
class Client:
    """Client of a server's streamed completions."""

    url: str
    model: str
    key: str | None
    new_tokens: int

    def ask(self, prompt: list[int]) -> StreamTimes:
        """Request a completion, and wait for its end."""
        url = urlsplit(self.url)
        connection_type = HTTPSConnection if url.scheme == "https" else HTTPConnection
        connection = connection_type(url.hostname or "", url.port, timeout=_READ_TIMEOUT_S)
        sent_at = time.monotonic()
        try:
            connection.request("POST", PATH, json.dumps(self._body(prompt)), self._headers())
            with connection.getresponse() as response:
                return _read(sent_at, response)
        except (OSError, HTTPException) as error:
            error_text = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self.url}: incomplete response: {error_text}") from error
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


def _read(sent_at: float, response: HTTPResponse) -> StreamTimes:
    if response.status != 200:
        body = response.read(1000).decode(errors="replace")
        raise ConfigError(f"the server responded with status {response.status}: {body}")
    chunk_times, tokens = [], 0
    for line in response:
        data = line.removeprefix(b"data:").strip()
        if data == line.strip() or data == b"[DONE]":
            continue  # an empty line, or the end of the stream
        event = json.loads(data)
        if "error" in event:
            raise ConfigError(f"the server ended a stream with an error: {event['error']}")
        if event["choices"]:  # with or without text: a token may be the begin of a character
            chunk_times.append(time.monotonic())
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not chunk_times or not tokens:
        raise ConfigError("the server streamed no tokens, or did not report their number")
    return StreamTimes(sent_at, tuple(chunk_times), tokens)


# Many concurrent clients, in threads of several processes, so that they do not delay each other.


_TOKENS = range(4, 256)
"""Token ids of random prompts: all vocabularies have them; lower ids are often special tokens."""


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """Time window of a load, by ``time.monotonic``."""

    starts_at: float
    ends_at: float


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of clients that each send one after the other."""

    client: Client
    clients: int
    prompt_tokens: int
    seconds: float
    """Time after which no request is sent; the last response is read to its end."""
    rate: int | None = None
    """Requests per second of all clients together; None to send each right after the one before."""

    def answers(self, number: int, window: LoadWindow) -> list[StreamTimes]:
        """Return the completions of a client."""
        rng = random.Random(number)
        times: list[StreamTimes] = []
        while True:
            if self.rate is not None:
                due_at = window.starts_at + (number + len(times) * self.clients) / self.rate
                time.sleep(max(0.0, min(due_at, window.ends_at) - time.monotonic()))
            if time.monotonic() >= window.ends_at:
                return times
            times.append(self.client.ask(rng.choices(_TOKENS, k=self.prompt_tokens)))


_all_started: Barrier
"""Barrier of the processes of clients; set in these processes alone."""


def _set_barrier(barrier: Barrier) -> None:
    global _all_started
    _all_started = barrier


def _run_some_clients(load: Load, numbers: range) -> tuple[LoadWindow, list[StreamTimes]]:
    """Run some clients, each in a thread of this process, and return their completions."""
    _all_started.wait()
    starts_at = time.monotonic()
    window = LoadWindow(starts_at, starts_at + load.seconds)
    with ThreadPoolExecutor(len(numbers)) as threads:
        answers = threads.map(partial(load.answers, window=window), numbers)
        return window, [response for times in answers for response in times]


def run_clients(load: Load, processes: int) -> tuple[LoadWindow, list[StreamTimes]]:
    """Run a load's clients in some processes; return their window, and all completions."""
    clients = load.clients
    groups = [range(first, clients, processes) for first in range(min(clients, processes))]
    context = multiprocessing.get_context("spawn")  # this process may have threads, and torch
    barrier = context.Barrier(len(groups))
    with ProcessPoolExecutor(len(groups), context, _set_barrier, (barrier,)) as pool:
        futures = [pool.submit(_run_some_clients, load, seeds) for seeds in groups]
        windows, answers = zip(*(each.result() for each in futures), strict=True)
    common = LoadWindow(
        max(each.starts_at for each in windows), min(each.ends_at for each in windows)
    )
    return common, [response for each in answers for response in each]


_TEXTS = """\
Completions in the timed window, after a warm-up with as many clients. A chunk is one event of the
stream, with one or more tokens."""
_WAITS = """\
Latencies of the requests sent in the window. TTFT: from request to first chunk. TPOT: (last chunk -
first chunk) / (tokens - 1). ITL: between two chunks. latency: from request to last chunk."""
_CONFIG_OPTIONS = (
    "url",
    "model",
    "in_flight",
    "rate",
    "prompt_tokens",
    "max_new_tokens",
    "seconds",
    "processes",
)


@dataclass(frozen=True, slots=True)
class StreamedRow:
    """Throughput of all clients together."""

    texts: int
    tok_per_s: float
    chunks_per_s: float
    tokens_per_chunk: float


def run(args: argparse.Namespace) -> Report:
    client = Client(args.url, args.model, ServerConfig().api_key, args.max_new_tokens)
    load = Load(client, args.in_flight, args.prompt_tokens, args.seconds, args.rate)
    run_clients(replace(load, seconds=args.warmup_seconds), args.processes)
    window, answers = run_clients(load, args.processes)
    tables = [
        Table("streamed", _TEXTS, [_streamed_row(window, answers)]),
        Table("latencies", _WAITS, _waits(answers)),
    ]
    config = {name: getattr(args, name) for name in _CONFIG_OPTIONS}
    return Report("endpoint", args.command, torch.device("cpu"), config, tables)


def _streamed_row(window: LoadWindow, answers: Sequence[StreamTimes]) -> StreamedRow:
    seconds = window.ends_at - window.starts_at
    tokens = sum(response.tokens_within(window.starts_at, window.ends_at) for response in answers)
    chunk_times = sum(
        window.starts_at <= part < window.ends_at for each in answers for part in each.chunk_times
    )
    return StreamedRow(
        len(answers), tokens / seconds, chunk_times / seconds, tokens / max(1, chunk_times)
    )


def _waits(answers: Sequence[StreamTimes]) -> list[LatencyRow]:
    whole = [each for each in answers if each.tokens > 1]
    waits: dict[str, list[float]] = {
        "TTFT": [each.chunk_times[0] - each.sent_at for each in answers],
        "TPOT": [
            (each.chunk_times[-1] - each.chunk_times[0]) / (each.tokens - 1) for each in whole
        ],
        "ITL": [gap for each in answers for gap in each.gaps],
        "latency": [each.chunk_times[-1] - each.sent_at for each in answers],
    }
    return [LatencyRow.of("streamed", metric, seconds) for metric, seconds in waits.items()]
