"""How many there are of something, in words."""

from __future__ import annotations


def some(count: int, what: str) -> str:
    """Return a number and its noun, as in "1 token" and "2 tokens"."""
    return f"{count} {what}{'s' * (count != 1)}"
