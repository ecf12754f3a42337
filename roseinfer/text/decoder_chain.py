"""Decodes tokens as they come, as the decoders of ``tokenizers`` decode all of them at once.

Each decoder is a step on the way from tokens to text, which holds back what later tokens may still
change, and nothing else. Decoders that may change all of a text are refused.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Regex, decoders

from roseinfer.errors import UnsupportedModel
from roseinfer.text.detokenizer import ByteLevelJoin, TokenPieces, WrittenPieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerFast

    from roseinfer.text.detokenizer import DecodesInPieces

# Joins tokens to one text, token by token. ``byte_level.py`` has the one for bytes.


class Join(Protocol):
    """Makes one text of the tokens of one request."""

    def add(self, token: str, /) -> str:
        """Take one more token, and return the text that became certain with it."""

    def flush(self) -> str:
        """Return the rest, now that no token follows."""


class PlainJoin:
    """Puts nothing between tokens."""

    def add(self, token: str) -> str:
        return token

    def flush(self) -> str:
        return ""


class SpacedJoin:
    """Puts a space between tokens, as a tokenizer without a decoder does."""

    def __init__(self) -> None:
        self._space = ""

    def add(self, token: str) -> str:
        space, self._space = self._space, " "
        return space + token

    def flush(self) -> str:
        return ""


class WordEndJoin:
    """Writes a space for the mark that ends a word (``BPEDecoder``), but none after the last."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._if_more, self._if_last = "", ""
        """What the newest token adds if another follows, and if none does."""

    def add(self, token: str) -> str:
        marked = token.find(self._mark)
        certain, rest = (token, "") if marked < 0 else (token[:marked], token[marked:])
        text = self._if_more + certain
        self._if_more, self._if_last = rest.replace(self._mark, " "), rest.replace(self._mark, "")
        return text

    def flush(self) -> str:
        text, self._if_more, self._if_last = self._if_last, "", ""
        return text


# What decoders do to a text after its tokens were joined, as it grows.


class TextStep(Protocol):
    """Changes the text of one request as it comes."""

    def add(self, text: str, /) -> str:
        """Take more text, and return what became certain with it."""

    def flush(self) -> str:
        """Return the rest, now that the text has ended."""


class Replacement:
    """Replaces a text wherever it stands."""

    def __init__(self, find: str, by: str) -> None:
        self._find = find
        self._by = by
        self._held = ""
        """The end of the text, if it begins what is to be replaced."""

    def add(self, text: str) -> str:
        *before, rest = (self._held + text).split(self._find)
        begun = min(len(rest), len(self._find) - 1)
        while not rest.endswith(self._find[:begun]):
            begun -= 1
        certain = len(rest) - begun
        self._held = rest[certain:]
        return self._by.join([*before, rest[:certain]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Strip:
    """Drops a character up to ``left`` times at the beginning, and ``right`` times at the end."""

    def __init__(self, character: str, left: int, right: int) -> None:
        self._character = character
        self._left = left
        self._right = right
        self._begun = False
        """True when it is known which of the text is dropped at the beginning."""
        self._held = ""

    def add(self, text: str) -> str:
        self._held += text
        if not self._begun:
            rest = self._held.lstrip(self._character)
            if not rest and len(self._held) < self._left + self._right:
                return ""
            self._begun = True
            self._held = self._held[min(self._left, len(self._held) - len(rest)) :]
        strippable = len(self._held) - len(self._held.rstrip(self._character))
        certain = len(self._held) - min(self._right, strippable)
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, ""
        if self._begun:  # what is held back is what is dropped at the end
            return ""
        # Both ends meet. tokenizers panics at some of these texts.
        text: str = decoders.Strip(self._character, self._left, self._right).decode([held])
        return text


# What decoders do to tokens before these are joined, token by token.


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


# What a tokenizer's vocabulary has for each token.


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


if TYPE_CHECKING:
    Decoder = dict[str, Any]


if TYPE_CHECKING:
    "A decoder as it is saved."


_JOINS = ("Fuse", "ByteLevel")
_ALONE = ("Replace", "Strip")
"""These change every token by itself."""
_TIDIED = (
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
"""What ``cleanup`` replaces, in this order."""


class ChainDetokenizer:
    """Decodes one growing sequence of tokens. Special tokens add no text."""

    def __init__(
        self,
        written: WrittenTokens,
        token_steps: Sequence[TokenStep],
        join: Join,
        text_steps: Sequence[TextStep],
    ) -> None:
        self._written = written
        self._token_steps = token_steps
        self._join = join
        self._text_steps = text_steps

    def add(self, token: int) -> str:
        """Take one more token, and return the text that became certain with it."""
        written = self._written[token]
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
    """The decoders of a tokenizer. Every text gets steps of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = tokenizer.backend_tokenizer
        chain = _chain(backend.decoder)
        alone, before, join, after = _parts(chain)
        self._written = WrittenTokens(backend, [_decode_alone(each) for each in alone])
        self._token_steps = [_token_step(each) for each in before]
        self._join = join
        self._text_steps = [step for each in after for step in _text_steps(each)]
        self._pieces: TokenPieces | None = None
        """What byte-level tokens add, where nothing but the join makes a text of them."""
        if isinstance(join(), ByteLevelJoin) and not before and not after:
            self._pieces = TokenPieces(self._written)

    def detokenizer(self) -> DecodesInPieces:
        if self._pieces is not None:
            return ByteLevelJoin(self._pieces)
        return ChainDetokenizer(
            self._written,
            [make() for make in self._token_steps],
            self._join(),
            [make() for make in self._text_steps],
        )


def _chain(decoder: Any) -> list[Decoder] | None:
    """Return the decoders that a tokenizer uses one after the other, or None if it has none."""
    if decoder is None:
        return None
    try:
        return _flat(json.loads(decoder.__getstate__()))
    except Exception as error:  # tokenizers raises no other for one that it cannot save
        raise _refused("a decoder in Python") from error


def _flat(decoder: Decoder) -> list[Decoder]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [inner for each in decoder["decoders"] for inner in _flat(each)]


def _parts(
    chain: list[Decoder] | None,
) -> tuple[list[Decoder], list[Decoder], Callable[[], Join], list[Decoder]]:
    """Return what changes tokens by themselves, what else changes them, the join, and the rest."""
    if chain is None:
        return [], [], SpacedJoin, []
    at = next((at for at, each in enumerate(chain) if each["type"] in _JOINS), len(chain))
    before, after = chain[:at], chain[at + 1 :]
    join: Callable[[], Join] = PlainJoin
    if chain[at:] and chain[at]["type"] == "ByteLevel":
        join = partial(ByteLevelJoin, WrittenPieces())
    elif before and before[-1]["type"] == "BPEDecoder":
        join = partial(WordEndJoin, before.pop()["suffix"])
    begun = next((at for at, each in enumerate(before) if each["type"] not in _ALONE), len(before))
    return before[:begun], before[begun:], join, after


def _decode_alone(decoder: Decoder) -> Callable[[str], str]:
    made = _made(decoder)
    return lambda token: str(made.decode([token]))


def _decode_later(decoder: Decoder) -> Callable[[str], str]:
    made = _made(decoder)
    return lambda token: str(made.decode(["", token]))


def _made(decoder: Decoder) -> Any:
    """Build one of the decoders that change every token by itself, or all but the first alike."""
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
    raise _refused(str(decoder["type"]))


def _token_step(decoder: Decoder) -> Callable[[], TokenStep]:
    kind = decoder["type"]
    if kind == "ByteFallback":
        return ByteRuns
    if kind == "BPEDecoder":
        return partial(WordEnds, decoder["suffix"])
    alone = _decode_alone(decoder)
    if kind == "CTC":
        return partial(Repeats, alone)
    return partial(EachToken, alone, alone if kind in _ALONE else _decode_later(decoder))


def _text_steps(decoder: Decoder) -> list[Callable[[], TextStep]]:
    """Return the steps of a decoder to which the whole text is a single token, the first one."""
    found: list[tuple[str, str]] = []
    match decoder:
        case {"type": "Fuse"}:
            return []
        case {"type": "Strip", "content": content, "start": left, "stop": right}:
            return [partial(Strip, content, left, right)]
        case {"type": "Replace", "pattern": {"String": text}, "content": content}:
            found = [(text, content)]
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            found = [(mark, " " if scheme == "never" else "")]
        case {"type": "BPEDecoder", "suffix": mark}:
            found = [(mark, "")]
        case {"type": "WordPiece", "cleanup": cleanup}:
            found = [*_TIDIED] if cleanup else []
        case {
            "type": "CTC",
            "pad_token": pad,
            "word_delimiter_token": delimiter,
            "cleanup": cleanup,
        }:
            found = [(pad, ""), *([*_TIDIED, (delimiter, " ")] if cleanup else [])]
        case _:
            raise _refused(f"{decoder['type']} after tokens were joined")
    if not all(text for text, _ in found):
        raise _refused(f"{decoder['type']} of an empty text after tokens were joined")
    return [partial(Replacement, text, content) for text, content in found]


def _refused(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer has {what}, so that a later token may change all of a text that was shown: "
        "give a tokenizer with other decoders, or a model without one and token ids"
    )
