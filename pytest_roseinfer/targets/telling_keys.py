"""A stand-in for a model, for engines whose own part is what attention finds.

The key of a token follows from the token, its place and the keys before it, and so does the next
token. If one of them was not found, or another was, all that comes differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEYS = (1 << 31) - 1


def key_of(token: int, position: int, before: Sequence[int]) -> int:
    return hash((token, position, *before)) % _KEYS


def likeliest(key: int, vocabulary: int) -> int:
    """Return the token after the one with this key."""
    return key % vocabulary


def logits_of(tokens: Sequence[int], vocabulary: int) -> list[float]:
    """Return the logits of the token after these."""
    keys: list[int] = []
    for token in tokens:
        keys.append(key_of(token, len(keys), keys))
    chosen = likeliest(keys[-1], vocabulary)
    return [float(token == chosen) for token in range(vocabulary)]
