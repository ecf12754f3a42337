"""What decoders do to tokens before these are joined, token by token."""

from __future__ import annotations

import re
from codecs import utf_8_decode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
"""One that stands for a byte. Rust reads a plus sign in a number."""


class TokenStep(Protocol):
    """Changes the tokens of one request as they come."""

    def add(self, token: str, /) -> Sequence[str]:
        """Take one more token, and return those that became certain with it."""

    def flush(self) -> Sequence[str]:
        """Return the rest, now that no token follows."""


@dataclass(slots=True)
class EachToken:
    """Changes every token by itself; the first one may be changed otherwise."""

    _first: Callable[[str], str]
    _later: Callable[[str], str]
    _begun: bool = False

    def add(self, token: str) -> Sequence[str]:
        if self._begun:
            return (self._later(token),)
        self._begun = True
        return (self._first(token),)

    def flush(self) -> Sequence[str]:
        return ()


class ByteRuns:
    """Makes a text of every run of byte tokens, like ``<0xC3>`` and ``<0xA9>`` (``ByteFallback``).

    One byte that is not UTF-8 spoils its whole run: each byte of it becomes U+FFFD. So a run is
    held back until it ends, or is spoilt.
    """

    def __init__(self) -> None:
        self._run = b""
        self._spoilt = False

    def add(self, token: str) -> Sequence[str]:
        if not (found := BYTE_TOKEN.fullmatch(token)):
            return (*self.flush(), token)
        if self._spoilt:
            return (_REPLACEMENT,)
        self._run += bytes([int(found[1], 16)])
        try:
            utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            run, self._run, self._spoilt = self._run, b"", True
            return (_REPLACEMENT,) * len(run)
        return ()

    def flush(self) -> Sequence[str]:
        run, self._run, self._spoilt = self._run, b"", False
        try:
            return (run.decode(),) if run else ()
        except UnicodeDecodeError:  # the last character is incomplete
            return (_REPLACEMENT,) * len(run)


@dataclass(slots=True)
class Repeats:
    """Drops a token that repeats the one before it, and then those without text (``CTC``)."""

    _text: Callable[[str], str]
    _before: str | None = None

    def add(self, token: str) -> Sequence[str]:
        repeated = token == self._before
        self._before = token
        text = "" if repeated else self._text(token)
        return (text,) if text else ()

    def flush(self) -> Sequence[str]:
        return ()


@dataclass(slots=True)
class WordEnds:
    """Writes a space for the mark that ends a word (``BPEDecoder``), but none in the last token."""

    _mark: str
    _newest: str | None = None

    def add(self, token: str) -> Sequence[str]:
        before, self._newest = self._newest, token
        return () if before is None else (before.replace(self._mark, " "),)

    def flush(self) -> Sequence[str]:
        last, self._newest = self._newest, None
        return () if last is None else (last.replace(self._mark, ""),)
