"""Offsets of tokens: they index the text of a completion."""

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


def completion_with_offsets(server: Server, **options: Any) -> dict[str, Any]:
    """Return the text of a completion, its tokens and their offsets, whole or streamed."""
    answer = server.post("completions", logprobs=0, seed=1, **options)
    completion: dict[str, Any] = {"text": "", "tokens": [], "text_offset": []}
    for each in answer.events if options.get("stream") else [answer.json]:
        (choice,) = each["choices"]
        completion["text"] += choice["text"]
        for name in ("tokens", "text_offset"):
            completion[name] += choice["logprobs"][name]
    return completion


@pytest.mark.sampled_cases
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_token_is_at_its_offset(server: Server, echo: bool, stream: bool) -> None:
    """The tiny model generates many parts of characters."""
    completion = completion_with_offsets(
        server, prompt=ROSES, max_tokens=200, echo=echo, stream=stream
    )
    text, offsets = completion["text"], completion["text_offset"]
    assert sum(token.startswith("bytes:") for token in completion["tokens"]) > 20
    assert offsets == sorted(offsets)
    assert max(offsets) <= len(text)
    for token, offset in zip(completion["tokens"], offsets, strict=True):
        is_text = not token.startswith("bytes:") and token != END
        assert not is_text or text.startswith(token, offset), (token, offset)


def test_parts_of_a_character_share_its_offset(server: Server) -> None:
    completion = completion_with_offsets(server, prompt=ROSES, max_tokens=1, echo=True)
    expected = [at for at, character in enumerate(ROSES) for _ in character.encode()]
    assert completion["text_offset"] == [*expected, len(ROSES)]


def test_echoed_special_tokens_count(server: Server) -> None:
    completion = completion_with_offsets(server, prompt=f"ab{END}c", max_tokens=1, echo=True)
    assert completion["tokens"][:4] == ["a", "b", END, "c"]
    assert completion["text_offset"] == [0, 1, 2, 2 + len(END), 3 + len(END)]


WORDS = ["<s>", "▁a", "b", "<0xC3>", "<0xA9>"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of Llama 2, with a space before each word but the first."""
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(WORDS)}, []))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def test_offsets_with_word_and_added_tokens() -> None:
    texts = TokenTexts(word_tokenizer())
    prompt, offsets = PromptOffsets(texts, "abé a"), TextOffsets(texts, len("abé a"))
    assert prompt.of([0, 1, 2, 3]) + prompt.of([4, 1]) == [0, 0, 1, 2, 2, 4]
    assert offsets.of([1, 3, 4]) == [5, 6, 6]
    assert offsets.of([0, 2]) == [6, 7]
    assert [texts[token] for token in (3, 4)] == [("bytes:\\xc3", [0xC3]), ("bytes:\\xa9", [0xA9])]
