"""Soak test of an engine under faults: ``python -m tests.engine.soak``.

Readers are slow, stop reading, are cancelled, or have event loops that close; steps run out of
memory, logits are NaN, and detokenization fails. A request that completes has the correct text, and
after all requests have ended, no resource is held.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from roseinfer import (
    LLM,
    AsyncLLM,
    BadArgument,
    DetokenizationFailed,
    NoDistribution,
    SamplingParams,
    StepFailed,
    engine_thread,
    tiny_gpt2,
)
from roseinfer.text.completion_text import CompletionText
from tests.engine.continuations import text_of
from tests.engine.test_random_mixes import assert_no_block_is_lost, greedy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

MAX_NEW_TOKENS = 14
CONCURRENCY = 32
"""Streams that are open at the same time."""
STOPS = tuple("aeiou().,0123456789")
REPLACED = ("\N{REPLACEMENT CHARACTER}",)
"""A stop string completed by the end of a text whose last character is incomplete."""
BAD_PROMPTS: list[Any] = [[], [1, 9999], [1] * 200, "a\ud800", "x" * 200]
REQUESTS_PER_ROUND = 250
"""Requests of one event loop, which then closes with some streams open."""
MAX_UNREAD = 5
"""Maximum number of updates that an unread stream holds here, so that short texts exceed it."""
TIMEOUT_S = 60
"""Seconds within which a round must end: far more than one takes."""


class Panic(BaseException):
    """Rust panic as it reaches Python: not an ``Exception``."""


class Faults:
    """Faults injected into an engine. Failing steps never follow each other closely."""

    def __init__(self, llm: LLM, rng: random.Random) -> None:
        self._rng = rng
        self._model = llm.engine.sequence_runner.model
        self._logits = self._model.logits
        self._add = CompletionText.add
        self._passes_since_failure = 0
        """Forward passes since the last failing one."""

    @contextmanager
    def inject(self) -> Iterator[None]:
        with (
            patch.object(self._model, "logits", self._broken_logits),
            patch.object(CompletionText, "add", lambda text, token: self._broken_add(text, token)),
        ):
            yield

    def _broken_logits(self, *arguments: Any) -> torch.Tensor:
        self._passes_since_failure += 1
        if self._passes_since_failure > 9 and self._rng.random() < 0.004:
            self._passes_since_failure = 0
            raise torch.OutOfMemoryError("CUDA out of memory, as was drawn")
        logits = self._logits(*arguments)
        if self._rng.random() < 0.01:
            logits = logits.clone()
            logits[self._rng.randrange(len(logits))] = float("nan")
        return logits

    def _broken_add(self, text: CompletionText, token: int) -> tuple[str, bool]:
        if self._rng.random() < 0.001:
            raise Panic("unreachable")
        return self._add(text, token)


@cache
def continuations(device: str) -> list[tuple[list[int], list[int]]]:
    """Return prompts, many with shared prefixes, and their continuations by transformers."""
    rng = random.Random(7)
    stems = [[rng.randrange(256) for _ in range(20)] for _ in range(5)]
    prompts = [
        stems[rng.randrange(5)][: rng.randint(0, 20)]
        + [rng.randrange(256) for _ in range(rng.randint(1, 8))]
        for _ in range(60)
    ]
    continued, gaps = greedy(tiny_gpt2(device).model, prompts, MAX_NEW_TOKENS)
    return [
        (prompt, tokens)
        for prompt, tokens, gap in zip(prompts, continued, gaps, strict=True)
        if gap > 1e-3
    ]


class Soak:
    """A server with too few blocks, and its clients. Each run continues after the previous one."""

    def __init__(self, device: str, seed: int = 3) -> None:
        self.llm = LLM(
            "tiny",
            device=device,
            dtype="float32",
            block_size=4,
            kv_cache_tokens=120,
            max_length=48,  # so that attention in slots, which reads all of it, is quick
            max_batch_size=12,
            prefill_max_tokens=32,
            prefill_admission_policy="pack",
            resident_decode=True,
            run_ahead=2,
            cuda_graph=False,  # a graph would replay without the injected faults
        )
        self.ends: Counter[str] = Counter()
        self.num_pauses = 0
        """Number of pauses of requests whose streams were not read."""
        self._device = device
        self._continuations = continuations(device)
        self._rng = random.Random(seed)
        self._faults = Faults(self.llm, random.Random(seed))
        self._pause = self.llm.engine.pause

    def run(self, requests: int) -> None:
        """Serve this many more requests, then check that nothing is held."""
        served = AsyncLLM(self.llm)
        small: dict[str, Any] = {
            "MAX_UNREAD_UPDATES": MAX_UNREAD,
            "RESUME_UNREAD_UPDATES": MAX_UNREAD // 2,
            "_POLL_S": 0.02,
        }
        with ExitStack() as stack:
            stack.callback(served.close)
            stack.enter_context(patch.multiple(engine_thread, **small))
            stack.enter_context(self._faults.inject())
            stack.enter_context(patch.object(self.llm.engine, "pause", self._counted_pause))
            while requests:
                count = min(requests, REQUESTS_PER_ROUND)
                requests -= count
                loop = asyncio.new_event_loop()
                round_ = asyncio.wait_for(self._round(served, count), TIMEOUT_S)
                open_streams = loop.run_until_complete(round_)
                loop.close()
                self._await_idleness(served)
                del open_streams
                self._assert_nothing_held(served)

    def _counted_pause(self, request: Request) -> None:
        self.num_pauses += 1
        self._pause(request)

    async def _round(self, served: AsyncLLM, count: int) -> list[Any]:
        """Serve some requests, and return streams that are still open."""
        remaining = iter(range(count - 2))

        async def client() -> None:
            for _ in remaining:
                self.ends[await self._serve_and_maybe_cancel(served)] += 1

        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
        open_streams = [
            served.stream(self._continuations[at][0], self._params(MAX_NEW_TOKENS))
            for at in range(2)
        ]
        for stream in open_streams:
            self.ends["loop closed"] += 1
            with suppress(StepFailed, NoDistribution, DetokenizationFailed):
                await anext(stream)
        return open_streams

    def _params(self, count: int, **more: Any) -> SamplingParams:
        """Return parameters that sample, but can sample only the argmax."""
        temperature = self._rng.choice([0.0, 0.7])
        drawn = {"temperature": temperature, "top_k": 1, "ignore_eos": True} | more
        return SamplingParams(max_new_tokens=count, **drawn)

    async def _serve_and_maybe_cancel(self, served: AsyncLLM) -> str:
        task = asyncio.create_task(self._serve(served))
        if self._rng.random() < 0.06:
            await asyncio.sleep(self._rng.random() * 0.05)
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return "cancelled"

    async def _serve(self, served: AsyncLLM) -> str:
        """Read one stream, in one of many ways, and return how it ended."""
        rng = self._rng
        if rng.random() < 0.03:
            try:
                await anext(served.stream(rng.choice(BAD_PROMPTS)))
            except BadArgument:
                return "rejected"
            raise AssertionError("a bad prompt was served")
        prompt, tokens = rng.choice(self._continuations)
        count = rng.randint(1, MAX_NEW_TOKENS)
        stops = rng.choice([(), (), STOPS, REPLACED])
        params = self._params(count, logprobs=rng.random() < 0.3, stop=stops)
        last_read = rng.randint(1, count) if rng.random() < 0.06 else None
        pause = rng.choice([0.0] * 5 + [0.002, 0.02])
        stalls = rng.random() < 0.2
        read: list[Update] = []
        end = "disconnected"
        try:
            async for update in served.stream(prompt, params):
                read.append(update)
                if len(read) == last_read:
                    break
                if stalls:
                    await self._until_unread(update.request)
                if pause:
                    await asyncio.sleep(pause * rng.random())
            else:
                end = str(read[-1].finish_reason)
        except (StepFailed, NoDistribution, DetokenizationFailed) as error:
            end = type(error).__name__
        self._check(read, tokens[:count], stops, end)
        return end

    @staticmethod
    async def _until_unread(request: Request) -> None:
        """Wait until the request has more tokens than an unread stream holds, or has ended."""
        while request.finish_reason is None and request.num_generated <= MAX_UNREAD:
            await asyncio.sleep(0.001)

    def _check(self, read: list[Update], tokens: list[int], stops: Any, end: str) -> None:
        """Compare the updates read with the text served alone, up to its first stop string."""
        expected = text_of(self._device, tokens)
        at = next((at for at, character in enumerate(expected) if character in stops), None)
        text = "".join(update.text for update in read)
        received = [update.token_id for update in read if update.token_id is not None]
        assert received == tokens[: len(received)], f"{received} for {tokens}: {read[-1:]}"
        if end in ("length", "stop"):
            assert text == expected[:at], f"{read} for {tokens}"
            assert (end == "stop") == (at is not None)
        else:
            assert end == "DetokenizationFailed" or expected[:at].startswith(
                text.rstrip("\N{REPLACEMENT CHARACTER}")
            )

    def _await_idleness(self, served: AsyncLLM) -> None:
        thread, end = served._thread, time.monotonic() + TIMEOUT_S
        while thread._listeners or thread._tasks.qsize() or self.llm.engine.has_work:
            assert time.monotonic() < end, "streams without readers are served forever"
            time.sleep(0.001)

    def _assert_nothing_held(self, served: AsyncLLM) -> None:
        scheduler = self.llm.engine._scheduler
        for held in (served._thread._paused_listeners, scheduler.paused, scheduler._leaving):
            assert not held
        assert_no_block_is_lost(self.llm)


def objects_alive(kind: type) -> int:
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(options.device, options.seed)
    first = 0
    for tenth in range(1, 11):
        soak.run(options.requests // 10)
        now = resident_bytes()
        first = first or now
        growth = now / first - 1
        print(f"{tenth}0 %: {now >> 20} MiB resident, {growth:+.2%} since 10 %", flush=True)
    print(", ".join(f"{count} {end}" for end, count in sorted(soak.ends.items())))
    print(f"{soak.num_pauses} pauses of streams that were not read")
    return int(growth > 0.01)


if __name__ == "__main__":
    raise SystemExit(main())
