"""What the tokens of a request read as, up to a stop string if it has any."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from roseinfer.text.byte_level import ByteLevelDetokenizer, TokenPieces
from roseinfer.text.detokenizer import Detokenizer
from roseinfer.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.text.detokenizer import Decodes


def detokenizers(tokenizer: Decodes) -> Callable[[], Detokenizer | ByteLevelDetokenizer]:
    """Makes a detokenizer for each text of a tokenizer: the quickest that is right for it."""
    if TokenPieces.serve(tokenizer):
        return partial(ByteLevelDetokenizer, TokenPieces(tokenizer))
    return partial(Detokenizer, tokenizer)


class RequestText:
    """Grows token by token; what was returned once never changes."""

    def __init__(
        self, detokenizer: Detokenizer | ByteLevelDetokenizer, stops: Sequence[str]
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._parts: list[str] = []

    @property
    def so_far(self) -> str:
        return "".join(self._parts)

    def add(self, token: int) -> tuple[str, bool]:
        """The text that is certain now and was not before; whether a stop string ended it."""
        text, stopped = self._detokenizer.add(token), False
        if self._stops:
            text, stopped = self._stops.feed(text)
        self._parts.append(text)
        return text, stopped

    def finish(self) -> str:
        """The rest: no more tokens will come."""
        text = self._detokenizer.flush()
        if self._stops:
            text, stopped = self._stops.feed(text)
            if not stopped:
                text += self._stops.flush()
        self._parts.append(text)
        return text
