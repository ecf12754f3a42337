"""Decodes tokens as they come, as the decoders of ``tokenizers`` decode all of them at once.

Each decoder is a step on the way from tokens to text, which holds back what later tokens may still
change, and nothing else. Decoders that may change all of a text are refused.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, decoders

from roseinfer.errors import UnsupportedModel
from roseinfer.text.byte_level import ByteLevelJoin, TokenPieces, WrittenPieces
from roseinfer.text.joins import PlainJoin, SpacedJoin, WordEndJoin
from roseinfer.text.text_steps import Replacement, Strip
from roseinfer.text.token_steps import ByteRuns, EachToken, Repeats, WordEnds
from roseinfer.text.written import WrittenTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerFast

    from roseinfer.text.detokenizer import DecodesInPieces
    from roseinfer.text.joins import Join
    from roseinfer.text.text_steps import TextStep
    from roseinfer.text.token_steps import TokenStep

    Decoder = dict[str, Any]
    """A decoder as it is saved."""

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
