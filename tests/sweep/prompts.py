"""The prompts of the sweep: in one batch, in chunks, longer than the windows, and begun alike."""

from __future__ import annotations

import random

from tests.sweep.tiny_sizes import VOCABULARY

NEW_TOKENS = 6
PAD = 0
_LENGTHS = (2, 7, 13, 22, 41)
"""Of 4 tokens a block, 8 of a window, and 24 new prompt tokens of a step."""


def prompts(max_length: int | None) -> list[list[int]]:
    """Return prompts that leave room for new tokens, one of them with a padding token amid."""
    rng = random.Random(5)
    drawn = [[rng.randrange(6, VOCABULARY) for _ in range(length)] for length in _LENGTHS]
    drawn[2][5] = PAD
    if max_length is None:
        return drawn
    cut = [prompt[: max_length - NEW_TOKENS] for prompt in drawn]
    return [prompt for at, prompt in enumerate(cut) if prompt not in cut[:at]]


def begun_alike(asked: list[list[int]]) -> list[list[int]]:
    """Return the same prompts again, and one that begins as the longest does."""
    longest = asked[-1]
    return [*asked, [*longest[: len(longest) // 2], 11]]
