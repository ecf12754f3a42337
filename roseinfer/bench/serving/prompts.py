"""The prompts of a benchmark, and how they reach the engine."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from roseinfer.config import SamplingParams
    from roseinfer.llm import Prompt

_SEED = 5


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and how each is to be continued."""

    prompts: tuple[Prompt, ...]
    params: SamplingParams


def repeated(prompt: str, repeats: Sequence[int], num_requests: int) -> tuple[str, ...]:
    """The prompt, so many times over: each request takes the next number, in turns."""
    return tuple(" ".join([prompt] * times) for times in islice(cycle(repeats), num_requests))


def random_prompts(num_requests: int, length: int, vocab_size: int) -> tuple[list[int], ...]:
    """Token ids that no two requests are likely to begin with alike; always the same ones."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(vocab_size, (num_requests, length), generator=generator)
    return tuple(drawn.tolist())


def tokenized(prompts: tuple[Prompt, ...], tokenizer: Any) -> tuple[Prompt, ...]:
    """Token ids for whatever is text."""
    return tuple(tokenizer.encode(each) if isinstance(each, str) else each for each in prompts)


@contextmanager
def coming(
    prompts: Sequence[Prompt], tokenizer: Any = None, workers: int = 0
) -> Iterator[list[Future[Prompt]]]:
    """The prompts as they are; with ``workers``, so many threads tokenize them from now on."""
    if not workers:
        yield [_there(prompt) for prompt in prompts]
        return
    pool = ThreadPoolExecutor(workers, "tokenize")
    try:
        yield [pool.submit(tokenizer.encode, prompt) for prompt in prompts]
    finally:
        pool.shutdown(cancel_futures=True)


def _there(prompt: Prompt) -> Future[Prompt]:
    future: Future[Prompt] = Future()
    future.set_result(prompt)
    return future
