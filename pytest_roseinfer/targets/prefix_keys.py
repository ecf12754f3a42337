"""Fake model for engines, which checks what attention would read.

The key of a token depends on the token, its position and the previous keys, and the next token
depends on the key. If a key is missing or wrong, all following tokens differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEYS = (1 << 31) - 1


def key_of(token: int, position: int, before: Sequence[int]) -> int:
    return hash((token, position, *before)) % _KEYS


def argmax_token(key: int, vocabulary: int) -> int:
    """Return the next token after the one with this key."""
    return key % vocabulary


def logits_of(tokens: Sequence[int], vocabulary: int) -> list[float]:
    """Return the logits of the next token."""
    keys: list[int] = []
    for token in tokens:
        keys.append(key_of(token, len(keys), keys))
    chosen = argmax_token(keys[-1], vocabulary)
    return [float(token == chosen) for token in range(vocabulary)]
