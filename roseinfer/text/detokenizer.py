"""Decodes tokens as they come, at a cost that does not grow with the text.

Tokens cannot be decoded one by one: a character may be spread over several of them, and
whether a space stands before a word depends on what came earlier. So a window of the latest
tokens is decoded together, and what was returned before is cut off the front.
"""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_BYTES = 4
"""The most bytes of a character. As many that complete none never will."""
_UNSURE = _CHARACTER_BYTES - 1
"""The most replacement characters that later bytes may still turn into one character."""
_LATEST = _UNSURE * _UNSURE + _UNSURE
"""So many tokens settle the last replacement characters, whatever stands before them: each of
these is up to three bytes, and after three bytes decoders agree on where a character begins."""
_MOST_PENDING = _CHARACTER_BYTES + _LATEST


class Decodes(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...

    def convert_ids_to_tokens(self, ids: int, /) -> str: ...


class Detokenizer:
    """Decodes one growing sequence of tokens. Special tokens add no text.

    The texts that are returned, joined, equal ``decode(tokens, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)``, with one exception. Tokenizers like that of Llama 2
    (``ByteFallback``) replace every byte of a run of byte tokens that is not UTF-8, also the bytes
    of characters that were complete, and returned, long before. Those characters stand; every
    later byte of the run is replaced as ``decode`` would.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._earlier: list[int] = []
        self._latest: list[int] = []
        """With ``_earlier``, the tokens of the two latest texts that ended in a whole character.
        One is not enough: a blank one would let the next stand at the beginning, where some
        decoders drop a space."""
        self._pending: list[int] = []
        """The tokens since then. Their last character may not be complete."""
        self._text = ""
        """The text of all these tokens."""
        self._returned = ""
        """The part of that text which was returned."""

    def add(self, token: int) -> str:
        """Take one more token, and return the text that became certain with it."""
        text = self._decode([*self._earlier, *self._latest, *self._pending, token])
        if text == self._text and not self._decode([token, token]):
            return ""  # a special token, or one beyond the vocabulary: it separates nothing
        self._pending.append(token)
        self._text = text
        if not text.startswith(self._returned):
            self._forget_earlier()
        return self._return_what_is_certain()

    def flush(self) -> str:
        """Return the rest after the last token, with U+FFFD for an incomplete character."""
        if not self._pending:
            return ""
        rest = self._text[len(self._returned) :]
        self._settle()
        return rest

    def _return_what_is_certain(self) -> str:
        returned = len(self._returned)
        # The next token may change so many characters.
        unsure = min(_UNSURE, len(self._text) - len(self._text.rstrip(_REPLACEMENT)))
        # The last token may spell a replacement character, which then replaces no bytes.
        if unsure and _REPLACEMENT in self._tokenizer.convert_ids_to_tokens(self._pending[-1]):
            unsure = 0
        self._returned = self._text[: max(returned, len(self._text) - unsure)]
        new = self._returned[returned:]
        if not unsure:
            self._settle()
        elif len(self._pending) > _MOST_PENDING:
            self._shorten()
        return new

    def _settle(self) -> None:
        """Shift the window: all text was returned, and the next token starts a character."""
        self._earlier, self._latest, self._pending = self._latest, self._pending, []
        self._text = self._returned = self._decode(self._earlier + self._latest)

    def _forget_earlier(self) -> None:
        """Decode the pending tokens alone. They are not UTF-8 (yet), and spoil the text before."""
        self._earlier, self._latest, self._returned = [], [], ""
        self._text = self._decode(self._pending)

    def _shorten(self) -> None:
        """Drop pending tokens in the middle. The first ones stay: they make a run of byte tokens
        invalid, with all its later bytes."""
        unsure = len(self._text) - len(self._returned)
        self._pending = self._pending[:_CHARACTER_BYTES] + self._pending[-_LATEST:]
        self._text = self._decode(self._earlier + self._latest + self._pending)
        self._returned = self._text[: len(self._text) - unsure]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
