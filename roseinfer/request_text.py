"""What the tokens of a request read as, up to a stop string if it has any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.detokenizer import Detokenizer
from roseinfer.stop_strings import StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.detokenizer import Decodes


class RequestText:
    """Grows token by token; what was returned once never changes."""

    def __init__(self, tokenizer: Decodes, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._parts: list[str] = []

    @property
    def so_far(self) -> str:
        return "".join(self._parts)

    def add(self, token_ids: Sequence[int]) -> tuple[str, bool]:
        """The text that is certain now and was not before; whether a stop string ended it."""
        text, stopped = self._stops.feed(self._detokenizer.add(token_ids))
        self._parts.append(text)
        return text, stopped

    def finish(self) -> str:
        """The rest: no more tokens will come."""
        text, stopped = self._stops.feed(self._detokenizer.flush())
        if not stopped:
            text += self._stops.flush()
        self._parts.append(text)
        return text
