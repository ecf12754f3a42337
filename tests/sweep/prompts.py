"""Prompts of the sweep: in one batch, in chunks, longer than windows, and with a shared prefix."""

from __future__ import annotations

import random

from tests.sweep.tiny_sizes import VOCABULARY

NEW_TOKENS = 6
PAD = 0
_LENGTHS = (2, 7, 13, 22, 41)
"""Prompt lengths, for blocks of 4 tokens, windows of 8, and steps of 24 prompt tokens."""


def prompts(max_length: int | None) -> list[list[int]]:
    """Return prompts that leave room for new tokens, one of them with a padding token inside."""
    rng = random.Random(5)
    drawn = [[rng.randrange(6, VOCABULARY) for _ in range(length)] for length in _LENGTHS]
    drawn[2][5] = PAD
    if max_length is None:
        return drawn
    cut = [prompt[: max_length - NEW_TOKENS] for prompt in drawn]
    return [prompt for at, prompt in enumerate(cut) if prompt not in cut[:at]]


def with_shared_prefix(tokens: list[list[int]]) -> list[list[int]]:
    """Return the same prompts, and one that shares a prefix with the longest."""
    longest = tokens[-1]
    return [*tokens, [*longest[: len(longest) // 2], 11]]
