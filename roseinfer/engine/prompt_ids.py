"""Prompts as token ids, from a text or from ids of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Set
from operator import index
from typing import TYPE_CHECKING, Any

from roseinfer.errors import BadArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_PROMPTS = (bytes, bytearray, memoryview, Mapping, Set)
"""These are iterable, and yet no token ids: what they yield are bytes, names, or in no order."""


def token_ids_of(prompt: str | Sequence[int], tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt, and raise for what is none."""
    if isinstance(prompt, str) and tokenizer is None:
        raise BadArgument(
            "a text prompt needs a tokenizer, and this model came without one: give token ids"
        )
    if isinstance(prompt, NO_PROMPTS):
        raise BadArgument(f"a prompt is a text or token ids in a list, not {prompt!r}")
    try:
        token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return list(map(index, token_ids))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        raise BadArgument(
            "a prompt is a text that the tokenizer can read, or token ids: "
            f"{type(error).__name__}: {error}"
        ) from error
