"""Load test with thousands of streams and disconnects: ``python -m tests.server.load``.

It serves the tiny model in a process of its own to many concurrent clients, and fails if a
completion differs from the one served alone, if an error other than 429 occurs, if anything is held
after all clients have disconnected, or if the server's memory grows. Some requests ask for several
choices with the logprobs of long prompts, and some prompts are too long; many clients disconnect.
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
"""Number of additional prompts of some 600 characters."""
TOO_LONG = "x" * 40_000
"""Prompt that is rejected when it is tokenized, which takes a while."""
_TIMEOUT_S = 120.0
_ACCEPTED_ENDS = {"complete", "disconnected", "429", "rejected"}


@dataclass
class LoadClients:
    """Clients that speak plain HTTP, so that they cost little compared with the server."""

    url: str
    model: str
    rng: random.Random
    max_tokens: int = 32
    disconnect_share: float = 0.3
    """Share of the clients that disconnect early."""
    texts: list[str] = field(default_factory=list)
    """Completion of each prompt when served alone."""
    tokens: int = 0

    def __post_init__(self) -> None:
        self.host, _, port = self.url.removeprefix("http://").partition(":")
        self.port = int(port)
        stem = "It was a dark and stormy night, and the rain fell in torrents. "
        self.prompts = [f"{stem[: 3 * (at % 20)]}{at}" for at in range(PROMPTS)]
        self.prompts += [f"{stem * 9}{at}" for at in range(LONG)]

    async def record_completions(self) -> None:
        """Request each completion while no other request runs."""
        for prompt in range(len(self.prompts)):
            _, text = await self._stream(prompt, self.max_tokens, disconnect_after=None)
            self.texts.append(text)

    async def run(self, requests: int, together: int) -> Counter[str]:
        """Make this many requests, and keep at most ``together`` open at the same time."""
        ends: Counter[str] = Counter()
        pending = iter(range(requests))

        async def client() -> None:
            for _ in pending:
                ends[await asyncio.wait_for(self._request_once(), _TIMEOUT_S)] += 1

        await asyncio.gather(*(client() for _ in range(together)))
        return ends

    async def _request_once(self) -> str:
        rng = self.rng
        if rng.random() < 0.03:
            return await rng.choice((self._request_choices, self._request_too_long))()
        prompt = rng.randrange(PROMPTS)
        disconnect_after = rng.randrange(6) if rng.random() < self.disconnect_share else None
        end, text = await self._stream(prompt, self.max_tokens, disconnect_after=disconnect_after)
        if end == "complete" and text != self.texts[prompt]:
            return "incorrect"
        if not self.texts[prompt].startswith(text):
            return "incorrect"
        return end

    async def _stream(
        self, prompt: int, max_tokens: int, disconnect_after: int | None
    ) -> tuple[str, str]:
        """Request a stream; return how it ended and its text. 0 disconnects before any response."""
        body = {
            "model": self.model,
            "prompt": self.prompts[prompt],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        async with self._post(body) as reader:
            if disconnect_after == 0:
                return await self._disconnect(), ""
            status = await self._status(reader)
            return (status, "") if status != "200" else await self._read(reader, disconnect_after)

    async def _request_choices(self) -> str:
        """Request choices with the logprobs of a long prompt, and compare them."""
        rng = self.rng
        prompt = PROMPTS + rng.randrange(LONG)
        options = {"n": rng.randint(2, 8), "echo": True, "logprobs": rng.choice((0, 5))}
        body = {"prompt": self.prompts[prompt], "max_tokens": self.max_tokens, "temperature": 0}
        async with self._post({"model": self.model} | body | options) as reader:
            if rng.random() < self.disconnect_share:
                return await self._disconnect()
            status = await self._status(reader)
            if status != "200":
                return status
            response = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
        expected, length = self.prompts[prompt] + self.texts[prompt], len(self.prompts[prompt])
        first = response["choices"][0]["logprobs"]
        for choice in response["choices"]:
            lists = {
                name: values for name, values in choice["logprobs"].items() if values is not None
            }
            same = all(values[:length] == first[name][:length] for name, values in lists.items())
            if choice["text"] != expected or not same or len({*map(len, lists.values())}) > 1:
                return "incorrect"
        return "complete" if len(response["choices"]) == options["n"] else "incorrect"

    async def _request_too_long(self) -> str:
        async with self._post({"model": self.model, "prompt": TOO_LONG}) as reader:
            if self.rng.random() < 2 * self.disconnect_share:
                return await self._disconnect()
            status = await self._status(reader)
            return "rejected" if status == "400" else status

    @asynccontextmanager
    async def _post(self, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
        """Send a body, and disconnect when the block ends."""
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

    async def _disconnect(self) -> str:
        """Wait a little, so that the server has started its work."""
        await asyncio.sleep(self.rng.random() * 0.05)
        return "disconnected"

    @staticmethod
    async def _status(reader: asyncio.StreamReader) -> str:
        status = (await reader.readline()).split()
        return status[1].decode() if len(status) > 1 else "no response"

    async def _read(
        self, reader: asyncio.StreamReader, disconnect_after: int | None
    ) -> tuple[str, str]:
        text, chunks = "", 0
        async for line in reader:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return "complete", text
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return "error", text
            text += chunk["choices"][0]["text"]
            chunks += 1
            self.tokens += 1
            if chunks == disconnect_after:
                return "disconnected", text
        return "incomplete", text


def resident_bytes(process_id: int) -> int:
    """Return the resident bytes of a process and of its children."""
    folder = Path("/proc") / str(process_id)
    pages = int((folder / "statm").read_text().split()[1])
    started = (each.read_text().split() for each in (folder / "task").glob("*/children"))
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    return resident + sum(resident_bytes(int(child)) for children in started for child in children)


async def metrics(clients: LoadClients) -> dict[str, float]:
    """Return the samples of ``/metrics``, named with their labels."""
    reader, writer = await asyncio.open_connection(clients.host, clients.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return metrics_of(text.partition("\r\n\r\n")[2])


def metrics_of(page: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in page.splitlines()]
    return {name: float(value) for name, _, value in lines if not name.startswith("#")}


async def held_resources(clients: LoadClients) -> list[str]:
    """Return the resources still held some time after all clients have disconnected."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    end = time.monotonic() + 10
    while True:
        samples = await metrics(clients)
        nonzero = [
            name for name in samples if any(each in name for each in names) and samples[name]
        ]
        if not nonzero or time.monotonic() > end:
            return nonzero
        await asyncio.sleep(0.05)


async def run_load(server: Serving, options: argparse.Namespace) -> list[str]:
    """Make the requests in tenths, and return the failures."""
    clients = LoadClients(server.url, "tiny", random.Random(options.seed))
    await clients.record_completions()
    ends: Counter[str] = Counter()
    memory: list[int] = []
    began = time.monotonic()
    for tenth in range(1, 11):
        ends += await clients.run(options.requests // 10, options.together)
        memory.append(resident_bytes(server.process.pid))
        growth = memory[-1] / memory[0] - 1
        size = f"{memory[-1] >> 20} MiB resident, {growth:+.2%} since 10 %"
        print(f"{tenth}0 %: {size}, {dict(sorted(ends.items()))}", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{options.requests / seconds:.0f} requests, {clients.tokens / seconds:.0f} chunks a second"
    )
    failures = [f"{count} ended: {end}" for end, count in ends.items() if end not in _ACCEPTED_ENDS]
    failures += [f"held at the end: {name}" for name in await held_resources(clients)]
    if growth > options.max_growth:
        failures.append(f"memory grew by {growth:.2%}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--together", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--max-growth", type=float, default=0.02)
    options = parser.parse_args()
    with serving("--no-access-log") as server:
        failures = asyncio.run(run_load(server, options))
        server.process.terminate()
        status = server.process.wait(60)
    if status:
        failures.append(f"it ended with status {status}")
    print("\n".join(failures) or "no failures")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
