"""What a request gets from its model alone: without a cache, batches, or any code of ours."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from pytest_roseinfer.targets.own import engine_models as models
from pytest_roseinfer.targets.own import model_shapes as shapes
from pytest_roseinfer.targets.own.roseinfer_draws import draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.mix import RequestMix, Sampling


@lru_cache(maxsize=4096)
def alone(name: str, device: str, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    """Compute each token from all that comes before it."""
    tokens = list(prompt)
    positions = shapes.LONG_POSITIONS if name in shapes.OF_MANY_SHAPES else shapes.POSITIONS
    while len(tokens) < positions and goes_on(tokens, len(prompt), sampling):
        logits = models.logits(name, device, tuple(tokens))
        tokens.append(draw(logits, sampling, tokens, len(prompt)))
    return tuple(tokens[len(prompt) :])


def goes_on(tokens: Sequence[int], prompted: int, sampling: Sampling) -> bool:
    """Return True if a request is not over with what follows its prompt in these tokens."""
    new = tokens[prompted:]
    ended = bool(new) and new[-1] == shapes.END and not sampling.ignore_eos
    return len(new) < sampling.max_new_tokens and not ended


def undecided(
    mix: RequestMix, tokens: tuple[int, ...], sampling: Sampling, rounding: float
) -> bool:
    """Return True if logits that are off by so much could lead to another token.

    The prompt is that of some request that begins as these tokens do.
    """
    prompts = {len(each.prompt) for each in mix.requests if begins(each.prompt, tokens)}
    logits = models.logits(mix.options["model"], mix.device, tokens)
    noise = np.random.default_rng(0).standard_normal((16, len(logits)))
    nearly = logits + noise * np.abs(logits).max() * rounding
    return any(
        len({draw(each, sampling, tokens, prompted) for each in (logits, *nearly)}) > 1
        for prompted in prompts
    )


def begins(prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    return tuple(tokens[: len(prompt)]) == tuple(prompt)
