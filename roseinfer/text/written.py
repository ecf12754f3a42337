"""What a tokenizer's vocabulary has for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class WrittenTokens(dict[int, str | None]):
    """Maps each token to what it is written as, or to None if it adds nothing to a text.

    That is found when a token is first asked for.
    """

    def __init__(self, backend: Any, changes: Sequence[Callable[[str], str]]) -> None:
        """``changes`` are made to every token by itself, whatever stands before or behind it."""
        super().__init__()
        self._backend = backend
        self._changes = changes
        added = backend.get_added_tokens_decoder().values()
        self._special = {each.content for each in added if each.special}

    def __missing__(self, token: int) -> str | None:
        written: str | None = self._backend.id_to_token(token)  # None beyond the vocabulary
        if written in self._special:
            written = None
        if written is not None:
            for change in self._changes:
                written = change(written)
        self[token] = written
        return written
