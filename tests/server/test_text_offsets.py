"""Offsets of tokens index the text that a completion returns, whatever makes its characters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from roseinfer.server.schemas.choices import TokenTexts
from roseinfer.server.schemas.completions import PromptOffsets, TextOffsets

if TYPE_CHECKING:
    from tests.server.served import Server

ROSES = "Röslein, 玫瑰 🌹."
END = "<|endoftext|>"


def told(server: Server, **asked: Any) -> dict[str, Any]:
    """Return the text of a completion, its tokens and their offsets, whole or put together."""
    answer = server.post("completions", logprobs=0, seed=1, **asked)
    found: dict[str, Any] = {"text": "", "tokens": [], "text_offset": []}
    for each in answer.events if asked.get("stream") else [answer.json]:
        (choice,) = each["choices"]
        found["text"] += choice["text"]
        for name in ("tokens", "text_offset"):
            found[name] += choice["logprobs"][name]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_a_token_stands_at_its_offset(server: Server, echo: bool, stream: bool) -> None:
    """Among those that the tiny model writes are many parts of characters."""
    found = told(server, prompt=ROSES, max_tokens=200, echo=echo, stream=stream)
    text, offsets = found["text"], found["text_offset"]
    assert sum(token.startswith("bytes:") for token in found["tokens"]) > 20
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(text)
    for token, offset in zip(found["tokens"], offsets, strict=True):
        shown = not token.startswith("bytes:") and token != END
        assert not shown or text.startswith(token, offset), (token, offset)


def test_the_parts_of_a_character_share_its_offset(server: Server) -> None:
    found = told(server, prompt=ROSES, max_tokens=1, echo=True)
    wanted = [at for at, character in enumerate(ROSES) for _ in character.encode()]
    assert found["text_offset"] == [*wanted, len(ROSES)]


def test_special_tokens_count_where_they_are_shown(server: Server) -> None:
    found = told(server, prompt=f"ab{END}c", max_tokens=1, echo=True)
    assert found["tokens"][:4] == ["a", "b", END, "c"]
    assert found["text_offset"] == [0, 1, 2, 2 + len(END), 3 + len(END)]


WORDS = ["<s>", "▁a", "b", "<0xC3>", "<0xA9>"]


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    """Return one as of Llama 2: words have a space before them, but not the first of a text."""
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(WORDS)}, []))
    made.add_special_tokens([AddedToken("<s>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def test_tokens_that_are_not_bytes_and_one_that_the_tokenizer_adds() -> None:
    texts = TokenTexts(tokenizer_of_words())
    prompt, offsets = PromptOffsets(texts, "abé a"), TextOffsets(texts, len("abé a"))
    assert prompt.of([0, 1, 2, 3]) + prompt.of([4, 1]) == [0, 0, 1, 2, 2, 4]
    assert offsets.of([1, 3, 4]) == [5, 6, 6]
    assert offsets.of([0, 2]) == [6, 7]
    assert [texts[token] for token in (3, 4)] == [("bytes:\\xc3", [0xC3]), ("bytes:\\xa9", [0xA9])]
