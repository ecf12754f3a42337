"""Loads a checkpoint's tokenizer. One that has files, but cannot be read, is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from roseinfer.errors import UnsupportedModel, with_kind
from roseinfer.models.checkpoint import file_of

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "added_tokens.json",
    "special_tokens_map.json",
)


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of what ``locate`` found, or None if it has no file of one."""
    for file in _FILES:
        path = Path(name) / file
        if path.is_dir():
            raise _refused(name, f"{file} is a directory")
        if path.is_file() and not path.stat().st_size:
            raise _refused(name, f"{file} is empty")
    found = [file for file in _FILES if file_of(name, file)]
    if not found:  # some families would make one up
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        # With files that it cannot read, some families have an empty vocabulary.
        if tokenizer.vocab_size > 1:
            return tokenizer
        why: Exception = ValueError("there is no vocabulary")
    except Exception as error:  # of any kind, since tokenizers trusts what a file says
        why = error
    raise _refused(name, f"from {', '.join(found)}: {with_kind(why)}") from why


def _refused(name: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer of {name!r} cannot be loaded: {why}: get its files anew, or remove them "
        "and give token ids"
    )
