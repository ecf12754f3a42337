"""A checkpoint's tokenizer is read, or refused: only one without any file of one has none."""

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
    """A model, and a tokenizer in two files, as GPT-2's first came."""
    tiny_gpt2().model.config.save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text(VOCABULARY)
    (tmp_path / "merges.txt").write_text(MERGES)
    return tmp_path


def put(file: Path, text: str | None) -> None:
    """Write a text, or make a directory of that name."""
    file.unlink(missing_ok=True)
    if text is None:
        file.mkdir()
    else:
        file.write_text(text)


def test_a_tokenizer_in_two_files_is_read(checkpoint: Path) -> None:
    assert load_tokenizer(str(checkpoint)).encode("hehe") == [257, 257]


def test_a_checkpoint_without_files_has_none(checkpoint: Path) -> None:
    for file in ("vocab.json", "merges.txt"):
        (checkpoint / file).unlink()
    assert load_tokenizer(str(checkpoint)) is None


BROKEN = ["", "[]", "{}", "null", "{", VOCABULARY[:100], '{"a": "b"}', None]
UNREADABLE = ["", "x", "a b c", "h zz\n", "h e\nh", "\0", None]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_vocabulary(checkpoint: Path, text: str | None) -> None:
    put(checkpoint / "vocab.json", text)
    with pytest.raises(UnsupportedModel, match=r"the tokenizer of .* loaded: .*vocab\.json"):
        load_tokenizer(str(checkpoint))


@pytest.mark.parametrize("text", UNREADABLE)
def test_broken_merges(checkpoint: Path, text: str | None) -> None:
    put(checkpoint / "merges.txt", text)
    with pytest.raises(UnsupportedModel, match=r"the tokenizer of .* loaded: .*merges\.txt"):
        load_tokenizer(str(checkpoint))


@pytest.mark.parametrize("missing", ["vocab.json", "merges.txt"])
def test_half_of_two_files(checkpoint: Path, missing: str) -> None:
    (checkpoint / missing).unlink()
    (there,) = {"vocab.json", "merges.txt"} - {missing}
    with pytest.raises(UnsupportedModel, match=f"cannot be loaded: from {there}: ValueError"):
        load_tokenizer(str(checkpoint))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "vocab.txt"])
@pytest.mark.parametrize("text", ["", None], ids=["empty", "a directory"])
def test_another_file_that_is_none(checkpoint: Path, file: str, text: str | None) -> None:
    """Though what is beside it could be read."""
    put(checkpoint / file, text)
    with pytest.raises(
        UnsupportedModel, match=f"{file} is (a directory|empty): download its files again"
    ):
        load_tokenizer(str(checkpoint))


def test_a_checkpoint_with_settings_of_a_tokenizer_alone(checkpoint: Path) -> None:
    for file in ("vocab.json", "merges.txt"):
        (checkpoint / file).unlink()
    put(checkpoint / "tokenizer_config.json", "{}")
    with pytest.raises(UnsupportedModel, match=r"tokenizer_config.json: .*no vocabulary"):
        load_tokenizer(str(checkpoint))


@pytest.mark.parametrize("text", ["[]", "{}", "null", "{"])
def test_a_broken_tokenizer_json(checkpoint: Path, text: str) -> None:
    put(checkpoint / "tokenizer.json", text)
    with pytest.raises(UnsupportedModel, match=r"Error: .*: download its files again"):
        load_tokenizer(str(checkpoint))


def test_the_llm_of_such_a_checkpoint(checkpoint: Path) -> None:
    tiny_gpt2().model.save_pretrained(checkpoint)
    put(checkpoint / "vocab.json", "{")
    with pytest.raises(UnsupportedModel, match="the tokenizer of"):
        LLM(checkpoint, device="cpu")
    llm = LLM(checkpoint, device="cpu", tokenizer=tiny_gpt2().tokenizer, kv_cache_tokens=64)
    assert llm.tokenizer is not None
