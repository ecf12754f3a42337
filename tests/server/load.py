"""Thousands of streams, many of which are left early: ``python -m tests.server.load``.

It serves the tiny model in a process of its own, has many users ask it at the same time, and fails
if any text is not the one that a request alone gets, if there is an error but 429, if anything is
held when all have left, or if the server's memory grows. Some ask for choices with the
log-probabilities of long prompts, and some send prompts that are too long; many of them hang up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.server.serve_process import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.server.serve_process import Serving

PROMPTS = 40
LONG = 4
"""Prompts besides, of some 600 characters."""
TOO_LONG = "x" * 40_000
"""A prompt that is refused when it is tokenised, which takes a while."""
_PATIENCE = 120.0
_RIGHT = {"whole", "left", "429", "refused"}


@dataclass
class Users:
    """Clients that speak plain HTTP, so that they cost little beside the server."""

    url: str
    model: str
    rng: random.Random
    most_tokens: int = 32
    leave: float = 0.3
    """The share of those who hang up early."""
    texts: list[str] = field(default_factory=list)
    """What each prompt is continued with, alone."""
    tokens: int = 0

    def __post_init__(self) -> None:
        self.host, _, port = self.url.removeprefix("http://").partition(":")
        self.port = int(port)
        stem = "It was a dark and stormy night, and the rain fell in torrents. "
        self.prompts = [f"{stem[: 3 * (at % 20)]}{at}" for at in range(PROMPTS)]
        self.prompts += [f"{stem * 9}{at}" for at in range(LONG)]

    async def learn(self) -> None:
        """Ask for each text while nobody else does."""
        for prompt in range(len(self.prompts)):
            _, text = await self._ask(prompt, self.most_tokens, leave_after=None)
            self.texts.append(text)

    async def come(self, requests: int, together: int) -> Counter[str]:
        """Have so many requests made, so many of them open at the same time."""
        ends: Counter[str] = Counter()
        due = iter(range(requests))

        async def user() -> None:
            for _ in due:
                ends[await asyncio.wait_for(self._one(), _PATIENCE)] += 1

        await asyncio.gather(*(user() for _ in range(together)))
        return ends

    async def _one(self) -> str:
        rng = self.rng
        if rng.random() < 0.03:
            return await rng.choice((self._ask_for_all, self._ask_too_much))()
        prompt = rng.randrange(PROMPTS)
        leaves = rng.randrange(6) if rng.random() < self.leave else None
        end, text = await self._ask(prompt, self.most_tokens, leave_after=leaves)
        if end == "whole" and text != self.texts[prompt]:
            return "wrong"
        if not self.texts[prompt].startswith(text):
            return "wrong"
        return end

    async def _ask(self, prompt: int, most: int, leave_after: int | None) -> tuple[str, str]:
        """Ask for a stream, and return how it ended and its text. 0 leaves before any answer."""
        body = {
            "model": self.model,
            "prompt": self.prompts[prompt],
            "max_tokens": most,
            "temperature": 0,
            "stream": True,
        }
        async with self._posted(body) as reader:
            if leave_after == 0:
                return await self._leave(), ""
            status = await self._status(reader)
            return (status, "") if status != "200" else await self._read(reader, leave_after)

    async def _ask_for_all(self) -> str:
        """Ask for choices with the log-probabilities of a long prompt, and compare them."""
        rng = self.rng
        prompt = PROMPTS + rng.randrange(LONG)
        asked = {"n": rng.randint(2, 8), "echo": True, "logprobs": rng.choice((0, 5))}
        body = {"prompt": self.prompts[prompt], "max_tokens": self.most_tokens, "temperature": 0}
        async with self._posted({"model": self.model} | body | asked) as reader:
            if rng.random() < self.leave:
                return await self._leave()
            status = await self._status(reader)
            if status != "200":
                return status
            answer = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        whole, length = self.prompts[prompt] + self.texts[prompt], len(self.prompts[prompt])
        first = answer["choices"][0]["logprobs"]
        for choice in answer["choices"]:
            lists = {name: told for name, told in choice["logprobs"].items() if told is not None}
            same = all(told[:length] == first[name][:length] for name, told in lists.items())
            if choice["text"] != whole or not same or len({*map(len, lists.values())}) > 1:
                return "wrong"
        return "whole" if len(answer["choices"]) == asked["n"] else "wrong"

    async def _ask_too_much(self) -> str:
        async with self._posted({"model": self.model, "prompt": TOO_LONG}) as reader:
            if self.rng.random() < 2 * self.leave:
                return await self._leave()
            status = await self._status(reader)
            return "refused" if status == "400" else status

    @asynccontextmanager
    async def _posted(self, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
        """Send a body, and hang up when the block ends."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            await writer.drain()
            yield reader
        finally:
            writer.close()

    async def _leave(self) -> str:
        """Wait a little, so that the server has begun with whatever it does."""
        await asyncio.sleep(self.rng.random() * 0.05)
        return "left"

    @staticmethod
    async def _status(reader: asyncio.StreamReader) -> str:
        status = (await reader.readline()).split()
        return status[1].decode() if len(status) > 1 else "no answer"

    async def _read(self, reader: asyncio.StreamReader, leave_after: int | None) -> tuple[str, str]:
        text, chunks = "", 0
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return "whole", text
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return "error", text
            text += chunk["choices"][0]["text"]
            chunks += 1
            self.tokens += 1
            if chunks == leave_after:
                return "left", text
        return "broken off", text


def resident(process_id: int) -> int:
    """Return the bytes of main memory that a process and those it started have."""
    folder = Path("/proc") / str(process_id)
    pages = int((folder / "statm").read_text().split()[1])
    started = (each.read_text().split() for each in (folder / "task").glob("*/children"))
    own = pages * os.sysconf("SC_PAGE_SIZE")
    return own + sum(resident(int(child)) for children in started for child in children)


async def metrics(users: Users) -> dict[str, float]:
    """Return the numbers of ``/metrics``, each with its labels in its name."""
    reader, writer = await asyncio.open_connection(users.host, users.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return metrics_of(text.partition("\r\n\r\n")[2])


def metrics_of(page: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in page.splitlines()]
    return {name: float(value) for name, _, value in lines if not name.startswith("#")}


async def held(users: Users) -> list[str]:
    """Return what the server still holds some moments after everybody has left."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    end = time.monotonic() + 10
    while True:
        found = await metrics(users)
        left = [name for name in found if any(each in name for each in names) and found[name]]
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.05)


async def load(server: Serving, asked: argparse.Namespace) -> list[str]:
    """Make the requests in tenths, and return what went wrong."""
    users = Users(server.url, "tiny", random.Random(asked.seed))
    await users.learn()
    ends: Counter[str] = Counter()
    memory: list[int] = []
    began = time.monotonic()
    for tenth in range(1, 11):
        ends += await users.come(asked.requests // 10, asked.together)
        memory.append(resident(server.process.pid))
        growth = memory[-1] / memory[0] - 1
        size = f"{memory[-1] >> 20} MiB resident, {growth:+.2%} since 10 %"
        print(f"{tenth}0 %: {size}, {dict(sorted(ends.items()))}", flush=True)
    seconds = time.monotonic() - began
    print(f"{asked.requests / seconds:.0f} requests, {users.tokens / seconds:.0f} chunks a second")
    wrong = [f"{count} ended: {end}" for end, count in ends.items() if end not in _RIGHT]
    wrong += [f"held at the end: {name}" for name in await held(users)]
    if growth > asked.most_growth:
        wrong.append(f"memory grew by {growth:.2%}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--together", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--most-growth", type=float, default=0.02)
    asked = parser.parse_args()
    with serving("--no-access-log") as server:
        wrong = asyncio.run(load(server, asked))
        server.process.terminate()
        status = server.process.wait(60)
    if status:
        wrong.append(f"it ended with status {status}")
    print("\n".join(wrong) or "nothing went wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
