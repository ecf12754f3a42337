"""``endpoint``: what a server streams to many clients, and how long they wait."""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch

from roseinfer.bench.driving import LatencyRow
from roseinfer.bench.report import Report, Table
from roseinfer.config import ServerConfig
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from http.client import HTTPResponse

# One text, asked of a server and streamed, with the moments at which its parts came.


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


# Many clients at once, in threads of several processes, so that none holds up another.


_COMING = 2.0
"""Seconds in which the processes start."""
_TOKENS = range(4, 256)
"""Ids that prompts are drawn from: all vocabularies have them, and most have others before."""


@dataclass(frozen=True, slots=True)
class Visit:
    """What each client does: it asks for text after text, and reads the last one to its end."""

    client: Client
    prompt_tokens: int
    opens: float
    closes: float
    """Nobody asks later. Both are of ``time.monotonic``."""

    def answers(self, seed: int) -> list[Answer]:
        rng = random.Random(seed)
        time.sleep(max(0.0, self.opens - time.monotonic()))
        found = []
        while time.monotonic() < self.closes:
            found.append(self.client.ask(rng.choices(_TOKENS, k=self.prompt_tokens)))
        return found


def _some(visit: Visit, seeds: range) -> list[Answer]:
    """Have some clients visit, each in a thread of this process."""
    with ThreadPoolExecutor(len(seeds)) as threads:
        return [answer for found in threads.map(visit.answers, seeds) for answer in found]


def visiting(
    client: Client, *, clients: int, processes: int, prompt_tokens: int, seconds: float
) -> tuple[Visit, list[Answer]]:
    """Return when so many clients visited, and what all of them got."""
    opens = time.monotonic() + _COMING
    visit = Visit(client, prompt_tokens, opens, opens + seconds)
    groups = [range(first, clients, processes) for first in range(min(clients, processes))]
    # No fork: this process may have threads, and torch.
    with ProcessPoolExecutor(len(groups), multiprocessing.get_context("spawn")) as pool:
        found = [pool.submit(_some, visit, seeds) for seeds in groups]
        return visit, [answer for each in found for answer in each.result()]


_TEXTS = """\
What came in the measured time. As many clients had come and gone before. A part is what a server
sends at once: one token or several."""
_WAITS = """\
Of the texts asked for in that time. TTFT: from asking to the first part. TPOT: (last part - first
part) / (tokens - 1). ITL: between one part and the next. latency: from asking to the last part."""
_ASKED = ("url", "model", "in_flight", "prompt_tokens", "max_new_tokens", "seconds", "processes")


@dataclass(frozen=True, slots=True)
class StreamedRow:
    texts: int
    tok_per_s: float
    parts_per_s: float
    tokens_per_part: float


def run(args: argparse.Namespace) -> Report:
    client = Client(args.url, args.model, ServerConfig().api_key, args.max_new_tokens)
    sizes = {"processes": args.processes, "prompt_tokens": args.prompt_tokens}
    visiting(client, clients=args.in_flight, seconds=args.warmup_seconds, **sizes)
    visit, answers = visiting(client, clients=args.in_flight, seconds=args.seconds, **sizes)
    tables = [
        Table("streamed", _TEXTS, [_streamed(visit, answers)]),
        Table("latencies", _WAITS, _waits(answers)),
    ]
    asked = {name: getattr(args, name) for name in _ASKED}
    return Report("endpoint", args.command, torch.device("cpu"), asked, tables)


def _streamed(visit: Visit, answers: Sequence[Answer]) -> StreamedRow:
    seconds = visit.closes - visit.opens
    tokens = sum(answer.tokens_within(visit.opens, visit.closes) for answer in answers)
    parts = sum(visit.opens <= part < visit.closes for each in answers for part in each.parts)
    return StreamedRow(len(answers), tokens / seconds, parts / seconds, tokens / max(1, parts))


def _waits(answers: Sequence[Answer]) -> list[LatencyRow]:
    whole = [each for each in answers if each.tokens > 1]
    waits: dict[str, list[float]] = {
        "TTFT": [each.parts[0] - each.asked for each in answers],
        "TPOT": [(each.parts[-1] - each.parts[0]) / (each.tokens - 1) for each in whole],
        "ITL": [gap for each in answers for gap in each.gaps],
        "latency": [each.parts[-1] - each.asked for each in answers],
    }
    return [LatencyRow.of("streamed", what, seconds) for what, seconds in waits.items()]
