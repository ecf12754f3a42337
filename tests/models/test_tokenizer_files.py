"""Tokenizer files: broken ones are rejected, and only a checkpoint without any has no tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from roseinfer import LLM, UnsupportedModel, tiny_gpt2
from roseinfer.models.checkpoint import load_tokenizer
from roseinfer.text.detokenizer import BYTE_OF

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = json.dumps({**BYTE_OF, "<|endoftext|>": 256, "he": 257})
MERGES = "#version: 0.2\nh e\n"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Directory with a config and a tokenizer in two files, as the original GPT-2 has."""
    tiny_gpt2().model.config.save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(VOCABULARY)
    (tmp_path / "merges.txt").write_text(MERGES)
    return tmp_path


def put(file: Path, text: str | None) -> None:
    """Write a file, or create a directory of that name."""
    file.unlink(missing_ok=True)
    if text is None:
        file.mkdir()
    else:
        file.write_text(text)


def test_tokenizer_in_two_files_is_loaded(checkpoint: Path) -> None:
    assert load_tokenizer(str(checkpoint)).encode("hehe") == [257, 257]


def test_checkpoint_without_tokenizer_files_has_no_tokenizer(checkpoint: Path) -> None:
    for file in ("vocab.json", "merges.txt"):
        (checkpoint / file).unlink()
    assert load_tokenizer(str(checkpoint)) is None


BROKEN_VOCABULARIES = ["", "[]", "{}", "null", "{", VOCABULARY[:100], '{"a": "b"}', None]
BROKEN_MERGES = ["", "x", "a b c", "h zz\n", "h e\nh", "\0", None]


@pytest.mark.parametrize("text", BROKEN_VOCABULARIES)
def test_broken_vocabulary_is_rejected(checkpoint: Path, text: str | None) -> None:
    put(checkpoint / "vocab.json", text)
    with pytest.raises(UnsupportedModel, match=r"the tokenizer of .* loaded: .*vocab\.json"):
        load_tokenizer(str(checkpoint))


@pytest.mark.parametrize("text", BROKEN_MERGES)
def test_broken_merges_are_rejected(checkpoint: Path, text: str | None) -> None:
    put(checkpoint / "merges.txt", text)
    with pytest.raises(UnsupportedModel, match=r"the tokenizer of .* loaded: .*merges\.txt"):
        load_tokenizer(str(checkpoint))


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_one_of_two_files_is_rejected(checkpoint: Path, missing: str) -> None:
    (checkpoint / missing).unlink()
    (remaining,) = {"vocab.json", "merges.txt"} - {missing}
    with pytest.raises(UnsupportedModel, match=f"cannot be loaded: from {remaining}: ValueError"):
        load_tokenizer(str(checkpoint))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "vocab.txt"])
@pytest.mark.parametrize("text", ["", None], ids=["empty", "a directory"])
def test_empty_file_or_directory_is_rejected(checkpoint: Path, file: str, text: str | None) -> None:
    """The file is rejected although others could be read."""
    put(checkpoint / file, text)
    with pytest.raises(
        UnsupportedModel, match=f"{file} is (a directory|empty): download its files again"
    ):
        load_tokenizer(str(checkpoint))


def test_tokenizer_config_without_a_vocabulary_is_rejected(checkpoint: Path) -> None:
    for file in ("vocab.json", "merges.txt"):
        (checkpoint / file).unlink()
    put(checkpoint / "tokenizer_config.json", "{}")
    with pytest.raises(UnsupportedModel, match=r"tokenizer_config.json: .*no vocabulary"):
        load_tokenizer(str(checkpoint))


@pytest.mark.parametrize("text", ["[]", "{}", "null", "{"])
def test_broken_tokenizer_json_is_rejected(checkpoint: Path, text: str) -> None:
    put(checkpoint / "tokenizer.json", text)
    with pytest.raises(UnsupportedModel, match=r"Error: .*: download its files again"):
        load_tokenizer(str(checkpoint))


def test_llm_rejects_a_broken_tokenizer_unless_one_is_passed(checkpoint: Path) -> None:
    tiny_gpt2().model.save_pretrained(checkpoint)
    put(checkpoint / "vocab.json", "{")
    with pytest.raises(UnsupportedModel, match="the tokenizer of"):
        LLM(checkpoint, device="cpu")
    llm = LLM(checkpoint, device="cpu", tokenizer=tiny_gpt2().tokenizer, kv_cache_tokens=64)
    assert llm.tokenizer is not None
