"""Incremental detokenization with the decoders of the ``tokenizers`` library.

The result equals that of decoding all tokens at once. Each decoder is a step from tokens to text
that holds back only text that later tokens may still change. Decoders that may change all of a text
raise ``TextMayChange``.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Regex, decoders

from roseinfer.text.detokenizer import (
    ByteLevelJoiner,
    PiecesByTokenId,
    PiecesByTokenString,
    TextMayChange,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerFast

    from roseinfer.text.detokenizer import IncrementalDetokenizer

# Joiners: tokens to one text, token by token. ``detokenizer.py`` has ``ByteLevelJoiner``.


class TokenJoiner(Protocol):
    """A step that joins the tokens of one request to one text."""

    def add(self, token: str, /) -> str:
        """Add a token, and return the text that became final with it."""

    def flush(self) -> str:
        """Return the rest after the last token."""


class ConcatenatingJoiner:
    """A joiner that puts nothing between tokens."""

    def add(self, token: str) -> str:
        return token

    def flush(self) -> str:
        return ""


class SpacingJoiner:
    """A joiner that puts a space between tokens, as a tokenizer without a decoder does."""

    def __init__(self) -> None:
        self._space = ""

    def add(self, token: str) -> str:
        space, self._space = self._space, " "
        return space + token

    def flush(self) -> str:
        return ""


class WordEndJoiner:
    """A joiner that replaces end-of-word marks by spaces, except at the end (``BPEDecoder``)."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._text_if_continued, self._text_if_last = "", ""
        """Text of the newest token if another follows, and if it is the last."""

    def add(self, token: str) -> str:
        marked = token.find(self._mark)
        certain, remainder = (token, "") if marked < 0 else (token[:marked], token[marked:])
        text = self._text_if_continued + certain
        self._text_if_continued, self._text_if_last = (
            remainder.replace(self._mark, " "),
            remainder.replace(self._mark, ""),
        )
        return text

    def flush(self) -> str:
        text, self._text_if_continued, self._text_if_last = self._text_if_last, "", ""
        return text


# Text transforms: steps after the tokens were joined.


class TextTransform(Protocol):
    """A step that changes the growing text of one request."""

    def add(self, text: str, /) -> str:
        """Add text, and return the text that became final with it."""

    def flush(self) -> str:
        """Return the rest after the end of the text."""


class Replacement:
    """A step that replaces every occurrence of a string."""

    def __init__(self, find: str, by: str) -> None:
        self._find = find
        self._by = by
        self._held_text = ""
        """End of the text that is a prefix of ``find``, held back."""

    def add(self, text: str) -> str:
        *before, remainder = (self._held_text + text).split(self._find)
        partial_match = min(len(remainder), len(self._find) - 1)
        while not remainder.endswith(self._find[:partial_match]):
            partial_match -= 1
        certain = len(remainder) - partial_match
        self._held_text = remainder[certain:]
        return self._by.join([*before, remainder[:certain]])

    def flush(self) -> str:
        held_text, self._held_text = self._held_text, ""
        return held_text


class Strip:
    """A step that strips at most ``left`` leading and ``right`` trailing copies of a character."""

    def __init__(self, character: str, num_left: int, num_right: int) -> None:
        self._character = character
        self._num_left = num_left
        self._num_right = num_right
        self._has_begun = False
        """True once the beginning of the text was stripped."""
        self._held_text = ""

    def add(self, text: str) -> str:
        self._held_text += text
        if not self._has_begun:
            stripped = self._held_text.lstrip(self._character)
            if not stripped and len(self._held_text) < self._num_left + self._num_right:
                return ""
            self._has_begun = True
            self._held_text = self._held_text[
                min(self._num_left, len(self._held_text) - len(stripped)) :
            ]
        strippable = len(self._held_text) - len(self._held_text.rstrip(self._character))
        certain = len(self._held_text) - min(self._num_right, strippable)
        text, self._held_text = self._held_text[:certain], self._held_text[certain:]
        return text

    def flush(self) -> str:
        held_text, self._held_text = self._held_text, ""
        if self._has_begun:  # all text held back is stripped from the end
            return ""
        # Both ends meet. tokenizers panics at some of these texts.
        text: str = decoders.Strip(self._character, self._num_left, self._num_right).decode(
            [held_text]
        )
        return text


# Token transforms: steps before the tokens are joined.


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
"""Pattern of tokens that stand for a byte. Rust accepts a plus sign in a number."""


class TokenTransform(Protocol):
    """A step that changes the tokens of one request."""

    def add(self, token: str, /) -> Sequence[str]:
        """Add a token, and return the tokens that became final with it."""

    def flush(self) -> Sequence[str]:
        """Return the rest after the last token."""


@dataclass(slots=True)
class EachToken:
    """A step that changes every token by itself; the first one may be changed differently."""

    _first: Callable[[str], str]
    _later: Callable[[str], str]
    _has_begun: bool = False

    def add(self, token: str) -> Sequence[str]:
        if self._has_begun:
            return (self._later(token),)
        self._has_begun = True
        return (self._first(token),)

    def flush(self) -> Sequence[str]:
        return ()


class ByteRuns:
    """A step that decodes runs of byte tokens, like ``<0xC3>`` ``<0xA9>`` (``ByteFallback``).

    One byte that is not UTF-8 makes its whole run invalid: each byte of it becomes U+FFFD. So a run
    is held back until it ends, or is invalid.
    """

    def __init__(self) -> None:
        self._run = b""
        self._is_invalid = False

    def add(self, token: str) -> Sequence[str]:
        if not (match := BYTE_TOKEN.fullmatch(token)):
            return (*self.flush(), token)
        if self._is_invalid:
            return (_REPLACEMENT,)
        self._run += bytes([int(match[1], 16)])
        try:
            utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            run, self._run, self._is_invalid = self._run, b"", True
            return (_REPLACEMENT,) * len(run)
        return ()

    def flush(self) -> Sequence[str]:
        run, self._run, self._is_invalid = self._run, b"", False
        try:
            return (run.decode(),) if run else ()
        except UnicodeDecodeError:  # the last character is incomplete
            return (_REPLACEMENT,) * len(run)


@dataclass(slots=True)
class Repeats:
    """A step that drops tokens equal to the previous one, and then those without text (``CTC``)."""

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
    """A step that replaces end-of-word marks by spaces, except in the last token (``BPEDecoder``).

    The last token loses its mark.
    """

    _mark: str
    _newest: str | None = None

    def add(self, token: str) -> Sequence[str]:
        before, self._newest = self._newest, token
        return () if before is None else (before.replace(self._mark, " "),)

    def flush(self) -> Sequence[str]:
        last, self._newest = self._newest, None
        return () if last is None else (last.replace(self._mark, ""),)


# Token strings: the vocabulary's entry of each token.


class TokenStrings(dict[int, str | None]):
    """The string of each token id, computed at first use; None for tokens that add no text."""

    def __init__(self, backend: Any, changes: Sequence[Callable[[str], str]]) -> None:
        """Create an empty mapping. ``changes`` apply to every token string by itself."""
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


if TYPE_CHECKING:
    Decoder = dict[str, Any]
    """JSON of a saved decoder."""


_JOINS = ("Fuse", "ByteLevel")
_PER_TOKEN_DECODERS = ("Replace", "Strip")
"""Types of decoders that change every token by itself."""
_CLEANUP_REPLACEMENTS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""Replacements of ``cleanup``, in order."""


class ChainDetokenizer:
    """A detokenizer that runs the steps of a decoder chain. Special tokens add no text."""

    def __init__(
        self,
        written: TokenStrings,
        token_steps: Sequence[TokenTransform],
        join: TokenJoiner,
        text_steps: Sequence[TextTransform],
    ) -> None:
        self._token_strings = written
        self._token_steps = token_steps
        self._join = join
        self._text_steps = text_steps

    def add(self, token: int) -> str:
        """Add a token, and return the text that became final with it."""
        written = self._token_strings[token]
        if written is None:
            return ""
        tokens: Sequence[str] = (written,)
        for step in self._token_steps:
            tokens = [out for each in tokens for out in step.add(each)]
        text = "".join([self._join.add(each) for each in tokens])
        for text_step in self._text_steps:
            text = text_step.add(text)
        return text

    def flush(self) -> str:
        """Return the rest after the last token."""
        tokens: list[str] = []
        for step in self._token_steps:
            tokens = [out for each in tokens for out in step.add(each)] + [*step.flush()]
        text = "".join([self._join.add(each) for each in tokens]) + self._join.flush()
        for text_step in self._text_steps:
            text = text_step.add(text) + text_step.flush()
        return text


class DecoderChain:
    """The decoders of a tokenizer. Every text gets its own steps."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = tokenizer.backend_tokenizer
        chain = _chain(backend.decoder)
        token_decoders, before, join, after = _parts(chain)
        self._token_strings = TokenStrings(
            backend, [_token_decoder(each) for each in token_decoders]
        )
        self._token_steps = [_token_step(each) for each in before]
        self._join = join
        self._text_steps = [step for each in after for step in _text_steps(each)]
        self._pieces: PiecesByTokenId | None = None
        """Pieces of byte-level tokens, if the join is the only step; None otherwise."""
        if isinstance(join(), ByteLevelJoiner) and not before and not after:
            self._pieces = PiecesByTokenId(self._token_strings)

    def detokenizer(self) -> IncrementalDetokenizer:
        if self._pieces is not None:
            return ByteLevelJoiner(self._pieces)
        return ChainDetokenizer(
            self._token_strings,
            [make() for make in self._token_steps],
            self._join(),
            [make() for make in self._text_steps],
        )


def _chain(decoder: Any) -> list[Decoder] | None:
    """Return the decoders of a tokenizer in order, or None if it has no decoder."""
    if decoder is None:
        return None
    try:
        return _flat(json.loads(decoder.__getstate__()))
    except Exception as error:  # tokenizers raises a bare Exception if it cannot save one
        raise _unsupported_decoder("a decoder in Python") from error


def _flat(decoder: Decoder) -> list[Decoder]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [inner for each in decoder["decoders"] for inner in _flat(each)]


def _parts(
    chain: list[Decoder] | None,
) -> tuple[list[Decoder], list[Decoder], Callable[[], TokenJoiner], list[Decoder]]:
    """Return the per-token decoders, the other token transforms, the join, and the decoders after.

    The join is a factory; a chain without a decoder for it joins tokens with nothing between.
    """
    if chain is None:
        return [], [], SpacingJoiner, []
    at = next((at for at, each in enumerate(chain) if each["type"] in _JOINS), len(chain))
    before, after = chain[:at], chain[at + 1 :]
    join: Callable[[], TokenJoiner] = ConcatenatingJoiner
    if chain[at:] and chain[at]["type"] == "ByteLevel":
        join = partial(ByteLevelJoiner, PiecesByTokenString())
    elif before and before[-1]["type"] == "BPEDecoder":
        join = partial(WordEndJoiner, before.pop()["suffix"])
    num_per_token = next(
        (at for at, each in enumerate(before) if each["type"] not in _PER_TOKEN_DECODERS),
        len(before),
    )
    return before[:num_per_token], before[num_per_token:], join, after


def _token_decoder(decoder: Decoder) -> Callable[[str], str]:
    built = _build_decoder(decoder)
    return lambda token: str(built.decode([token]))


def _later_token_decoder(decoder: Decoder) -> Callable[[str], str]:
    built = _build_decoder(decoder)
    return lambda token: str(built.decode(["", token]))


def _build_decoder(decoder: Decoder) -> Any:
    """Build a decoder that changes every token by itself, or all but the first in the same way."""
    match decoder:
        case {"type": "Replace", "pattern": {"String": text}, "content": content}:
            return decoders.Replace(text, content)
        case {"type": "Replace", "pattern": {"Regex": regex}, "content": content}:
            return decoders.Replace(Regex(regex), content)
        case {"type": "Strip", "content": content, "start": left, "stop": right}:
            return decoders.Strip(content, left, right)
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return decoders.Metaspace(mark, scheme)
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return decoders.WordPiece(prefix, cleanup)
        case {
            "type": "CTC",
            "pad_token": pad,
            "word_delimiter_token": delimiter,
            "cleanup": cleanup,
        }:
            return decoders.CTC(pad, delimiter, cleanup)
    raise _unsupported_decoder(str(decoder["type"]))


def _token_step(decoder: Decoder) -> Callable[[], TokenTransform]:
    kind = decoder["type"]
    if kind == "ByteFallback":
        return ByteRuns
    if kind == "BPEDecoder":
        return partial(WordEnds, decoder["suffix"])
    token_decoder = _token_decoder(decoder)
    if kind == "CTC":
        return partial(Repeats, token_decoder)
    return partial(
        EachToken,
        token_decoder,
        token_decoder if kind in _PER_TOKEN_DECODERS else _later_token_decoder(decoder),
    )


def _text_steps(decoder: Decoder) -> list[Callable[[], TextTransform]]:
    """Return the text transforms of a decoder that comes after the join.

    To such a decoder the whole text is a single token, the first one.
    """
    replacements: list[tuple[str, str]] = []
    match decoder:
        case {"type": "Fuse"}:
            return []
        case {"type": "Strip", "content": content, "start": left, "stop": right}:
            return [partial(Strip, content, left, right)]
        case {"type": "Replace", "pattern": {"String": text}, "content": content}:
            replacements = [(text, content)]
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            replacements = [(mark, " " if scheme == "never" else "")]
        case {"type": "BPEDecoder", "suffix": mark}:
            replacements = [(mark, "")]
        case {"type": "WordPiece", "cleanup": cleanup}:
            replacements = [*_CLEANUP_REPLACEMENTS] if cleanup else []
        case {
            "type": "CTC",
            "pad_token": pad,
            "word_delimiter_token": delimiter,
            "cleanup": cleanup,
        }:
            replacements = [
                (pad, ""),
                *([*_CLEANUP_REPLACEMENTS, (delimiter, " ")] if cleanup else []),
            ]
        case _:
            raise _unsupported_decoder(f"{decoder['type']} after tokens were joined")
    if not all(text for text, _ in replacements):
        raise _unsupported_decoder(f"{decoder['type']} of an empty text after tokens were joined")
    return [partial(Replacement, text, content) for text, content in replacements]


def _unsupported_decoder(part: str) -> TextMayChange:
    return TextMayChange(f"the tokenizer has {part}")
