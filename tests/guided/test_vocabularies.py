"""Guides with tokenizers of several kinds, and with heads wider than a vocabulary."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from roseinfer import LLM, Guide, SamplingParams
from roseinfer.models.tiny import draw_weights
from tests.text.tokenizers import byte_level, metaspace, word_ends, word_pieces

if TYPE_CHECKING:
    from collections.abc import Callable

PIECES = ["a", "b", "ab", "▁a", "▁b", "▁", "é", "1", "12", "▁1", "{", "}", '"', ":", '{"', '":']


def pieces_and_bytes() -> PreTrainedTokenizerFast:
    """Build a vocabulary like those of SentencePiece, with byte fallback."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    model = tokenizers.models.BPE(
        {name: at for at, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(names[:3])
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(chain)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def cut_characters() -> PreTrainedTokenizerFast:
    """Build tokens of one byte to a few, some of which begin or end within a character."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    backend.train_from_iterator(["".join(rng.choices("é好😀b", k=200))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@cache
def network(outputs: int) -> Any:
    config = GPT2Config(
        vocab_size=outputs, n_positions=256, n_embd=32, n_layer=1, n_head=2,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        model = GPT2LMHeadModel(config)
    draw_weights(model, 3)
    return model.eval().requires_grad_(False)


def finished_texts(
    device: str, tokenizer: Any, more: int, guide: Guide, **config: Any
) -> list[str]:
    """Return the finished ones of 20 completions by a model with some more outputs than tokens."""
    model = network(len(tokenizer) + more).to(device)
    llm = LLM(model, tokenizer=tokenizer, device=device, dtype="float32", **config)
    params = [SamplingParams(1.0, seed=seed, max_new_tokens=120, guide=guide) for seed in range(20)]
    outputs = llm.generate([[1, 5]] * 20, params, progress=False)
    assert [output.error for output in outputs] == [None] * 20
    assert max(token for output in outputs for token in output.token_ids) < len(tokenizer)
    return [str(output.text) for output in outputs if output.finish_reason == "stop"]


@pytest.mark.sampled_cases
@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("more", [0, 37])
@pytest.mark.parametrize("build", [pieces_and_bytes, cut_characters])
def test_completions_match_their_guide(
    device: str, build: Callable[[], Any], more: int, resident: bool
) -> None:
    for pattern in ("(é|好|😀|b){2,6}", "[a-z]é?(😀[0-9]){1,3}"):
        completions = finished_texts(
            device, build(), more, Guide(regex=pattern), resident_decode=resident
        )
        assert len(set(completions)) > 3
        assert all(re.fullmatch(pattern, text) for text in completions), completions


def test_head_narrower_than_the_vocabulary(device: str) -> None:
    """Tokens without logits are never generated."""
    tokenizer = pieces_and_bytes()
    completions = finished_texts(
        device, tokenizer, -4, Guide(regex="(ab|12){1,4}"), resident_decode=True
    )
    assert completions
    assert all(re.fullmatch("(ab|12){1,4}", text) for text in completions)


def unsupported_byte_level(pieces: list[str]) -> Any:
    return byte_level([piece.encode() for piece in pieces])


@pytest.mark.parametrize("build", [metaspace, word_ends, word_pieces, unsupported_byte_level])
def test_unsupported_tokenizer_is_rejected_by_name(
    device: str, build: Callable[[list[str]], Any]
) -> None:
    tokenizer = build(["a", "b"])
    llm = LLM(network(len(tokenizer)).to(device), tokenizer=tokenizer, device=device)
    params = SamplingParams(guide=Guide(regex="a"))
    guided, free = llm.generate([[1], [1]], [params, SamplingParams()], progress=False)
    assert free.error is None
    assert guided.error is not None
    assert guided.error.startswith(f"guides do not work with {type(tokenizer).__name__}: ")
