"""Text from tokens as they come, at a cost that does not grow with the text.

Tokens cannot be decoded one by one: a character may be spread over several of them, and
whether a space stands before a word depends on what came earlier. So a window of the latest
tokens is decoded together, and what was returned before is taken off the front.
"""

from __future__ import annotations

from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_BYTES = 4
"""So many bytes that complete no character never will."""
_UNSURE = _CHARACTER_BYTES - 1
"""Replacement characters at the end of a text that later bytes may turn into a character."""
_LATEST = _UNSURE * _UNSURE + _UNSURE
"""Tokens whose last replacement characters, each for up to three bytes, do not depend on what
stands before: three bytes in, decoders of UTF-8 agree on where a character begins."""
_MOST_PENDING = _CHARACTER_BYTES + _LATEST


class Decodes(Protocol):
    """What is asked of a tokenizer; those of transformers do it."""

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...

    def convert_ids_to_tokens(self, ids: int, /) -> str: ...


class Detokenizer:
    """The text of one growing sequence of tokens. Special tokens have none.

    All that is returned, joined, is ``decode(tokens, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)``. One thing is impossible: tokenizers in the manner
    of Llama 2 (``ByteFallback``), on meeting a run of byte tokens that is not UTF-8, replace
    every byte of it, also those of characters that were complete, and returned, long before.
    Such characters stand; of the rest of the run every byte is replaced as ``decode`` would.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._earlier: list[int] = []
        self._latest: list[int] = []
        """The tokens of the two latest texts that ended in a whole character. With one only,
        a blank text would leave the next at the beginning, where some decoders drop a space."""
        self._pending: list[int] = []
        """Tokens since then: they end in a character that may not be complete."""
        self._text = ""
        """What all these tokens decode to."""
        self._returned = ""
        """The part of it that was returned."""

    def add(self, token: int) -> str:
        """The text that became certain with one more token."""
        text = self._decode([*self._earlier, *self._latest, *self._pending, token])
        if text == self._text and not self._decode([token, token]):
            return ""  # a special token, or one beyond the vocabulary: it separates nothing
        self._pending.append(token)
        self._text = text
        if not text.startswith(self._returned):
            self._forget_earlier()
        return self._return_what_is_certain()

    def flush(self) -> str:
        """The rest, once all tokens were added: what is incomplete, as replacement characters."""
        if not self._pending:
            return ""
        rest = self._text[len(self._returned) :]
        self._settle()
        return rest

    def _return_what_is_certain(self) -> str:
        returned = len(self._returned)
        unsure = _unsure(self._text)
        if unsure and self._ends_in_a_piece_of_text():
            unsure = 0
        self._returned = self._text[: max(returned, len(self._text) - unsure)]
        new = self._returned[returned:]
        if not unsure:
            self._settle()
        elif len(self._pending) > _MOST_PENDING:
            self._shorten()
        return new

    def _ends_in_a_piece_of_text(self) -> bool:
        """A vocabulary may have the replacement character itself: it replaces no bytes."""
        return _REPLACEMENT in self._tokenizer.convert_ids_to_tokens(self._pending[-1])

    def _settle(self) -> None:
        """All of the text is returned, and the next token starts a new character."""
        self._earlier, self._latest, self._pending = self._latest, self._pending, []
        self._text = self._returned = self._decode(self._earlier + self._latest)

    def _forget_earlier(self) -> None:
        """The pending byte tokens are not UTF-8, or not yet, and took what is before with them."""
        self._earlier, self._latest, self._returned = [], [], ""
        self._text = self._decode(self._pending)

    def _shorten(self) -> None:
        """Drop tokens in the middle. The first ones stay, for they show that a run of byte
        tokens is invalid, and all its later bytes with it."""
        unsure = len(self._text) - len(self._returned)
        self._pending = self._pending[:_CHARACTER_BYTES] + self._pending[-_LATEST:]
        self._text = self._decode(self._earlier + self._latest + self._pending)
        self._returned = self._text[: len(self._text) - unsure]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _unsure(text: str) -> int:
    """How many characters at the end may become others with the next token."""
    return min(_UNSURE, len(text) - len(text.rstrip(_REPLACEMENT)))
