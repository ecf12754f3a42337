"""Requests of all kinds come and go for a long time, and nothing is left of them."""

from __future__ import annotations

import gc
import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from roseinfer import LLM, EnginePath, RequestTooLarge, SamplingParams, tiny_gpt2
from roseinfer.engine.request import Request
from tests.engine.test_random_mixes import assert_no_block_is_lost, greedy

REQUESTS = 800
"""How many the test serves; any number works."""
MOST_NEW = 14
TOGETHER = 14
"""Requests that wait or run at the same time, at most."""
STOPS = tuple("aeiou().,0123456789")
OLDEST = 400
"""Steps within which a request must have ended: far more than all of them together need."""
GROWTH = 24 << 20
"""Bytes of noise in the size of a process. A block's worth lost with each request, or an output
kept, would be more after a few thousand of them."""


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
    """An engine with too few blocks, and those who use it. Every run goes on where one ended."""

    def __init__(self, device: str) -> None:
        self.llm = LLM(
            "tiny",
            device=device,
            dtype="float32",
            block_size=4,
            kv_cache_tokens=120,
            max_batch_size=8,
            prefill_max_tokens=24,
            prefill_admission_policy="pack",
        )
        self.ends: Counter[str] = Counter()
        self._known = conversations(device)
        self._rng = random.Random(3)
        self._live: dict[Request, tuple[list[int] | None, int]] = {}
        """What each must generate, if that is known, and when it came."""
        self._now = 0

    def run(self, requests: int) -> None:
        """Serve so many more requests, to the end of the last."""
        todo = requests
        while todo or self._live:
            while todo and len(self._live) < TOGETHER and self._rng.random() < 0.5:
                todo -= 1
                self._submit()
            if self._live and self._rng.random() < 0.06:
                self.llm.engine.cancel(self._rng.choice([*self._live]))
            self.llm.engine.step()
            self._now += 1
            for request in [each for each in self._live if each.finish_reason is not None]:
                self._check_end(request)
            for request, (_, came) in self._live.items():
                assert self._now - came < OLDEST, f"request {request.id} is stuck"

    def _submit(self) -> None:
        rng, engine = self._rng, self.llm.engine
        prompt, continuation = rng.choice(self._known)
        if rng.random() < 0.03:
            with pytest.raises(RequestTooLarge):
                engine.submit([1] * 110, SamplingParams())
            self.ends["refused"] += 1
            return
        count = rng.randint(1, MOST_NEW)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]),
            max_new_tokens=count,
            ignore_eos=True,
            logprobs=rng.random() < 0.3,
            stop=rng.choice([(), (), STOPS]),
        )
        sure = params.temperature == 0 and not params.stop
        request = engine.submit(prompt, params)
        self._live[request] = (continuation[:count] if sure else None, self._now)

    def _check_end(self, request: Request) -> None:
        want, _ = self._live.pop(request)
        reason = str(request.finish_reason)
        self.ends[reason] += 1
        assert request.error is None
        if reason == "cancelled":
            want = want and want[: request.num_generated]
        if want is not None:
            assert request.token_ids == want


def resident() -> int:
    """Return the bytes of main memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def requests_alive() -> int:
    gc.collect()
    return sum(type(each) is Request for each in gc.get_objects())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_long_run_leaves_nothing_behind(device: str) -> None:
    alive_before = requests_alive()
    soak = Soak(device)
    soak.run(REQUESTS // 4)
    before = resident()
    device_before = torch.cuda.memory_allocated() if device.startswith("cuda") else 0
    soak.run(REQUESTS - REQUESTS // 4)

    assert soak.ends.total() == REQUESTS
    assert min(soak.ends[end] for end in ("length", "stop", "cancelled", "refused")) > 0
    paths = soak.llm.engine.path_counts
    assert min(
        paths[path] for path in (EnginePath.RESUMED, EnginePath.PREFIX_HIT, EnginePath.OVERTAKEN)
    )
    assert requests_alive() <= alive_before, "requests that have ended are kept"
    assert resident() - before < GROWTH
    if device.startswith("cuda"):
        assert torch.cuda.memory_allocated() - device_before < 1 << 20
    assert_no_block_is_lost(soak.llm)
