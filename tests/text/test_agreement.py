"""Tokenizers that decode by code of their own: served if their texts can come in pieces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import decoders
from transformers import CTRLTokenizer, GPTNeoXJapaneseTokenizer, PreTrainedTokenizerFast

from roseinfer import UnsupportedModel
from roseinfer.text.completion_text import new_detokenizer_factory
from roseinfer.text.detokenizer import ByteLevelJoiner
from tests.text.tokenizers import byte_level, words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def streamed(tokenizer: Any, written: Sequence[str]) -> list[str]:
    detokenizer = new_detokenizer_factory(tokenizer)()
    tokens = tokenizer.convert_tokens_to_ids(list(written))
    return [*map(detokenizer.add, tokens), detokenizer.flush()]


def japanese(folder: Path) -> Any:
    """It drops spaces and line ends around a text, but not within it."""
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


def test_blanks_are_shown_once_text_follows(tmp_path: Path) -> None:
    written = ["<BR>", "あ", "<BR>", "<BR>", "<SP>", "い", "<SP>"]
    assert streamed(japanese(tmp_path), written) == ["", "あ", "", "", "", "\n\n い", "", ""]


def test_one_whose_pieces_are_another_text_is_refused(tmp_path: Path) -> None:
    """What ends a word here is known when the next token comes: ``a@@`` and ``b`` are ``ab``."""
    vocabulary = ["<unk>", "a", "b", "a@@", "b@@"]
    numbered = {token: at for at, token in enumerate(vocabulary)}
    (tmp_path / "vocab.json").write_text(json.dumps(numbered))
    (tmp_path / "merges.txt").write_text("#version\na b\n")
    tokenizer = CTRLTokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    with pytest.raises(UnsupportedModel, match=r"\(CTRLTokenizer\) decodes tokens otherwise"):
        new_detokenizer_factory(tokenizer)


class Alike(PreTrainedTokenizerFast):  # type: ignore[misc]
    def decode(self, *arguments: Any, **options: Any) -> Any:
        return super().decode(*arguments, **options)


class Shouts(PreTrainedTokenizerFast):  # type: ignore[misc]
    def _decode(self, *arguments: Any, **options: Any) -> str:
        return str(super()._decode(*arguments, **options)).upper()


def test_one_that_changes_how_it_decodes_is_tried() -> None:
    backend = byte_level([bytes([byte]) for byte in range(256)]).backend_tokenizer
    assert isinstance(new_detokenizer_factory(Alike(tokenizer_object=backend))(), ByteLevelJoiner)
    with pytest.raises(UnsupportedModel, match=r"\(Shouts\) decodes tokens otherwise"):
        new_detokenizer_factory(Shouts(tokenizer_object=backend))


def test_one_that_panics_is_refused_with_its_reason() -> None:
    backend = words(["a", " "]).backend_tokenizer
    backend.decoder = decoders.Strip(" ", 0, 2)
    with pytest.raises(UnsupportedModel, match=r"\(Alike\) cannot decode tokens"):
        new_detokenizer_factory(Alike(tokenizer_object=backend))
