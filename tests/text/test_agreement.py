"""Tokenizers with decoders of their own: supported if their texts can be streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import decoders
from transformers import CTRLTokenizer, GPTNeoXJapaneseTokenizer, PreTrainedTokenizerFast

from roseinfer import UnsupportedModel
from roseinfer.text.completion_text import new_detokenizer_factory
from roseinfer.text.detokenizer import ByteLevelJoiner, WholeTextDetokenizer
from tests.text.tokenizers import byte_level, words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def stream_pieces(tokenizer: Any, tokens_text: Sequence[str]) -> list[str]:
    detokenizer = new_detokenizer_factory(tokenizer)()
    tokens = tokenizer.convert_tokens_to_ids(list(tokens_text))
    return [*map(detokenizer.add, tokens), detokenizer.flush()]


def build_japanese(folder: Path) -> Any:
    """Build a tokenizer that strips spaces and line ends around a text, but not within it."""
    vocabulary = [
        "<|endoftext|>",
        "<SP>",
        "<BR>",
        "あ",
        "い",
        *(f"<|byte{n}|>" for n in range(256)),
    ]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    (folder / "emoji.json").write_text(json.dumps({"emoji": {}, "emoji_inv": {}}))
    return GPTNeoXJapaneseTokenizer(folder / "vocab.txt", folder / "emoji.json")


def test_blanks_are_streamed_once_text_follows(tmp_path: Path) -> None:
    tokens_text = ["<BR>", "あ", "<BR>", "<BR>", "<SP>", "い", "<SP>"]
    assert stream_pieces(build_japanese(tmp_path), tokens_text) == [
        "",
        "あ",
        "",
        "",
        "",
        "\n\n い",
        "",
        "",
    ]


def test_text_of_words_that_grow_is_returned_at_its_end(tmp_path: Path) -> None:
    """The end of a word is known only with the next token: ``a@@`` and ``b`` are ``ab``."""
    vocabulary = ["<unk>", "a", "b", "a@@", "b@@"]
    ids = {token: at for at, token in enumerate(vocabulary)}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version\na b\n")
    tokenizer = CTRLTokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    reasons: list[str] = []
    new_detokenizer_factory(tokenizer, reasons.append)
    assert "(CTRLTokenizer) decodes tokens otherwise when more follow" in reasons[0]
    assert stream_pieces(tokenizer, ["a@@", "b"]) == ["", "", "ab"]


class SameDecoding(PreTrainedTokenizerFast):  # type: ignore[misc]
    def decode(self, *arguments: Any, **options: Any) -> Any:
        return super().decode(*arguments, **options)


class UppercaseDecoding(PreTrainedTokenizerFast):  # type: ignore[misc]
    def _decode(self, *arguments: Any, **options: Any) -> str:
        return str(super()._decode(*arguments, **options)).upper()


def test_overridden_decoding_is_checked() -> None:
    backend = byte_level([bytes([byte]) for byte in range(256)]).backend_tokenizer
    assert isinstance(
        new_detokenizer_factory(SameDecoding(tokenizer_object=backend))(), ByteLevelJoiner
    )
    uppercase = UppercaseDecoding(tokenizer_object=backend)
    assert isinstance(new_detokenizer_factory(uppercase)(), WholeTextDetokenizer)


def test_panicking_tokenizer_is_rejected_with_its_reason() -> None:
    backend = words(["a", " "]).backend_tokenizer
    backend.decoder = decoders.Strip(" ", 0, 2)
    with pytest.raises(UnsupportedModel, match=r"\(SameDecoding\) cannot decode tokens"):
        new_detokenizer_factory(SameDecoding(tokenizer_object=backend))
