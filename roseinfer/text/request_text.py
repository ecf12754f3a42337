"""The text of a request's tokens, up to a stop string if it has any."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from roseinfer.text.agreement import decodes_by_its_own_code, require_agreement
from roseinfer.text.decoder_chain import DecoderChain
from roseinfer.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from roseinfer.text.detokenizer import Decodes, DecodesInPieces
    from roseinfer.text.stop_strings import StopStrings


def detokenizers(tokenizer: Decodes) -> Callable[[], DecodesInPieces]:
    """Return what makes a detokenizer for each text, and raise if none would decode it exactly."""
    make: Callable[[], DecodesInPieces] = partial(Detokenizer, tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        make = DecoderChain(tokenizer).detokenizer
    if decodes_by_its_own_code(tokenizer):
        require_agreement(tokenizer, make)
    return make


@dataclass(slots=True)
class RequestText:
    """A text that grows token by token. What was returned once never changes."""

    _new_detokenizer: Callable[[], DecodesInPieces]
    """Called when the first token comes."""
    _stops: StopStrings | None
    _detokenizer: DecodesInPieces | None = None
    _parts: list[str] = field(default_factory=list)

    @property
    def so_far(self) -> str:
        return "".join(self._parts)

    def add(self, token: int) -> tuple[str, bool]:
        """Return the text that became certain, and whether a stop string ended it."""
        if self._detokenizer is None:
            self._detokenizer = self._new_detokenizer()
        text, stopped = self._detokenizer.add(token), False
        if self._stops:
            text, stopped = self._stops.feed(text)
        self._parts.append(text)
        return text, stopped

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text after the last token, and whether a stop string ended it."""
        if self._detokenizer is None:
            return "", False
        text, stopped = self._detokenizer.flush(), False
        if self._stops:
            text, stopped = self._stops.feed(text)
            if not stopped:
                text += self._stops.flush()
        self._parts.append(text)
        return text, stopped
