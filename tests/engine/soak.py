"""Requests of all kinds, served while much goes wrong: ``python -m tests.engine.soak``.

Readers are slow, leave, are cancelled, or have event loops that close; steps run out of memory,
logits are no numbers, and texts cannot be written. Whoever gets to the end of a text has the
right one, and when all have left, nothing is held.
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

MOST_NEW = 14
TOGETHER = 32
"""Streams that are open at the same time."""
STOPS = tuple("aeiou().,0123456789")
REPLACED = ("\N{REPLACEMENT CHARACTER}",)
"""A stop string that the end of a text can complete, where its last character is a part of one."""
BAD_PROMPTS: list[Any] = [[], [1, 9999], [1] * 200, "a\ud800", "x" * 200]
OF_A_ROUND = 250
"""Requests of one event loop, which then closes with some streams open."""
UNREAD = 5
"""The most updates that an unread stream holds here, so that short texts exceed it."""
PATIENCE = 60
"""Seconds within which a round must have ended: far more than one takes."""


class Panic(BaseException):
    """A panic in Rust reaches Python like this: it is no ``Exception``."""


class Mishaps:
    """What goes wrong in an engine. Steps that break off never follow each other closely."""

    def __init__(self, llm: LLM, rng: random.Random) -> None:
        self._rng = rng
        self._model = llm.engine.sequence_runner.model
        self._logits = self._model.logits
        self._add = CompletionText.add
        self._since = 0
        """How many forward passes went well since one did not."""

    @contextmanager
    def happen(self) -> Iterator[None]:
        with (
            patch.object(self._model, "logits", self._broken_logits),
            patch.object(CompletionText, "add", lambda text, token: self._broken_add(text, token)),
        ):
            yield

    def _broken_logits(self, *arguments: Any) -> torch.Tensor:
        self._since += 1
        if self._since > 9 and self._rng.random() < 0.004:
            self._since = 0
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
def conversations(device: str) -> list[tuple[list[int], list[int]]]:
    """Prompts, many of which begin alike, with what transformers continues them with."""
    rng = random.Random(7)
    stems = [[rng.randrange(256) for _ in range(20)] for _ in range(5)]
    prompts = [
        stems[rng.randrange(5)][: rng.randint(0, 20)]
        + [rng.randrange(256) for _ in range(rng.randint(1, 8))]
        for _ in range(60)
    ]
    continued, gaps = greedy(tiny_gpt2(device).model, prompts, MOST_NEW)
    return [
        (prompt, tokens)
        for prompt, tokens, gap in zip(prompts, continued, gaps, strict=True)
        if gap > 1e-3
    ]


class Soak:
    """A server with too few blocks, and those who use it. Every run goes on where one ended."""

    def __init__(self, device: str, seed: int = 3) -> None:
        self.llm = LLM(
            "tiny",
            device=device,
            dtype="float32",
            block_size=4,
            kv_cache_tokens=120,
            max_length=48,  # so that attention in slots, which looks at all of it, is quick
            max_batch_size=12,
            prefill_max_tokens=32,
            prefill_admission_policy="pack",
            resident_decode=True,
            run_ahead=2,
            cuda_graph=False,  # a graph would not remember what goes wrong
        )
        self.ends: Counter[str] = Counter()
        self.paused = 0
        """How often a request was paused since its stream was not read."""
        self._device = device
        self._known = conversations(device)
        self._rng = random.Random(seed)
        self._mishaps = Mishaps(self.llm, random.Random(seed))
        self._pause = self.llm.engine.pause

    def run(self, requests: int) -> None:
        """Serve so many more requests, and then look that nothing of them is held."""
        served = AsyncLLM(self.llm)
        small: dict[str, Any] = {
            "MAX_UNREAD_UPDATES": UNREAD,
            "RESUME_UNREAD_UPDATES": UNREAD // 2,
            "_POLL_S": 0.02,
        }
        with ExitStack() as stack:
            stack.callback(served.close)
            stack.enter_context(patch.multiple(engine_thread, **small))
            stack.enter_context(self._mishaps.happen())
            stack.enter_context(patch.object(self.llm.engine, "pause", self._counted_pause))
            while requests:
                count = min(requests, OF_A_ROUND)
                requests -= count
                loop = asyncio.new_event_loop()
                round_ = asyncio.wait_for(self._round(served, count), PATIENCE)
                kept = loop.run_until_complete(round_)
                loop.close()
                self._await_idleness(served)
                del kept
                self._assert_nothing_is_held(served)

    def _counted_pause(self, request: Request) -> None:
        self.paused += 1
        self._pause(request)

    async def _round(self, served: AsyncLLM, count: int) -> list[Any]:
        """Serve some requests, and return streams that are open still."""
        due = iter(range(count - 2))

        async def user() -> None:
            for _ in due:
                self.ends[await self._one_that_may_be_cancelled(served)] += 1

        await asyncio.gather(*(user() for _ in range(TOGETHER)))
        kept = [served.stream(self._known[at][0], self._params(MOST_NEW)) for at in range(2)]
        for stream in kept:
            self.ends["loop closed"] += 1
            with suppress(StepFailed, NoDistribution, DetokenizationFailed):
                await anext(stream)
        return kept

    def _params(self, count: int, **more: Any) -> SamplingParams:
        """Parameters that draw, and can draw the likeliest token only."""
        temperature = self._rng.choice([0.0, 0.7])
        drawn = {"temperature": temperature, "top_k": 1, "ignore_eos": True} | more
        return SamplingParams(max_new_tokens=count, **drawn)

    async def _one_that_may_be_cancelled(self, served: AsyncLLM) -> str:
        task = asyncio.create_task(self._one(served))
        if self._rng.random() < 0.06:
            await asyncio.sleep(self._rng.random() * 0.05)
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return "cancelled"

    async def _one(self, served: AsyncLLM) -> str:
        """Read one stream, in one of many ways, and return how it ended."""
        rng = self._rng
        if rng.random() < 0.03:
            try:
                await anext(served.stream(rng.choice(BAD_PROMPTS)))
            except BadArgument:
                return "refused"
            raise AssertionError("a bad prompt is served")
        prompt, tokens = rng.choice(self._known)
        count = rng.randint(1, MOST_NEW)
        stops = rng.choice([(), (), STOPS, REPLACED])
        params = self._params(count, logprobs=rng.random() < 0.3, stop=stops)
        leaves = rng.randint(1, count) if rng.random() < 0.06 else None
        pause = rng.choice([0.0] * 5 + [0.002, 0.02])
        stalls = rng.random() < 0.2
        read: list[Update] = []
        end = "left"
        try:
            async for update in served.stream(prompt, params):
                read.append(update)
                if len(read) == leaves:
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
        while request.finish_reason is None and request.num_generated <= UNREAD:
            await asyncio.sleep(0.001)

    def _check(self, read: list[Update], tokens: list[int], stops: Any, end: str) -> None:
        """Compare what was read with the text alone, up to its first stop string."""
        whole = text_of(self._device, tokens)
        at = next((at for at, character in enumerate(whole) if character in stops), None)
        text = "".join(update.text for update in read)
        got = [update.token_id for update in read if update.token_id is not None]
        assert got == tokens[: len(got)], f"{got} for {tokens}: {read[-1:]}"
        if end in ("length", "stop"):
            assert text == whole[:at], f"{read} for {tokens}"
            assert (end == "stop") == (at is not None)
        else:
            assert end == "DetokenizationFailed" or whole[:at].startswith(
                text.rstrip("\N{REPLACEMENT CHARACTER}")
            )

    def _await_idleness(self, served: AsyncLLM) -> None:
        thread, end = served._thread, time.monotonic() + PATIENCE
        while thread._listeners or thread._tasks.qsize() or self.llm.engine.has_work:
            assert time.monotonic() < end, "streams that nobody can read are served for ever"
            time.sleep(0.001)

    def _assert_nothing_is_held(self, served: AsyncLLM) -> None:
        scheduler = self.llm.engine._scheduler
        for held in (served._thread._paused_listeners, scheduler.paused, scheduler._leaving):
            assert not held
        assert_no_block_is_lost(self.llm)


def objects_alive(kind: type) -> int:
    gc.collect()
    return sum(type(each) is kind for each in gc.get_objects())


def resident() -> int:
    """Return the bytes of main memory that this process has."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(asked.device, asked.seed)
    first = 0
    for tenth in range(1, 11):
        soak.run(asked.requests // 10)
        now = resident()
        first = first or now
        growth = now / first - 1
        print(f"{tenth}0 %: {now >> 20} MiB resident, {growth:+.2%} since 10 %", flush=True)
    print(", ".join(f"{count} {end}" for end, count in sorted(soak.ends.items())))
    print(f"{soak.paused} pauses of streams that were not read")
    return int(growth > 0.01)


if __name__ == "__main__":
    raise SystemExit(main())
