"""What a benchmark asks for: prompts, and how each is to be continued."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.config import SamplingParams
    from roseinfer.llm import Prompt

_SEED = 5


@dataclass(frozen=True, slots=True)
class Work:
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
