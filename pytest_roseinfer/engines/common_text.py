"""The text that prompts are made of."""

from __future__ import annotations


def common_text(length: int, vocabulary: int, branch: int = 0) -> tuple[int, ...]:
    """Return tokens that look like any others and are the same every time."""
    return tuple((at * at * 7 + at * 3 + branch * 11 + 5) % vocabulary for at in range(length))
