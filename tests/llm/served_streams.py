"""Streams of a small model by ``AsyncLLM``, and their expected tokens."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from roseinfer import LLM, AsyncLLM, SamplingParams
from tests.engine.test_random_mixes import assert_no_block_is_lost

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from roseinfer.engine.engine import Update

TEXTS = [f"The {word} fox" for word in ("quick", "brown", "lazy", "red", "old", "grey", "third")]
PATIENCE = 20
"""Seconds after which a wait fails."""


def greedy(count: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, **more)


def small_llm(device: str, **config: Any) -> LLM:
    return LLM("tiny", device=device, dtype="float32", **{"kv_cache_tokens": 1024} | config)


@contextmanager
def serving(llm: LLM) -> Iterator[AsyncLLM]:
    """Yield a server and close it; then check that its engine holds nothing."""
    served = AsyncLLM(llm)
    try:
        yield served
    finally:
        served.close()
    assert not llm.engine.has_work
    assert_no_block_is_lost(llm)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


@cache
def expected(device: str, text: str, count: int = 12) -> list[int]:
    """Generate a completion alone; another test compares the result with transformers."""
    (output,) = small_llm(device, prefix_cache=False).generate(text, greedy(count), progress=False)
    return output.token_ids


async def collect(
    served: AsyncLLM, prompt: Any, params: SamplingParams | None = None
) -> list[Update]:
    return [update async for update in served.stream(prompt, params or greedy())]


def tokens_of(updates: list[Update]) -> list[int | None]:
    return [update.token_id for update in updates]
