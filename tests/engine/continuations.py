"""Continuations of the tiny model by this engine and by transformers."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from roseinfer import LLM, SamplingParams, tiny_gpt2

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer import RequestOutput

TEXTS = ["Once upon a time", "a", "The answer: 42", "Once upon a dime", "zü\n"]
END = 256
"""The token that ends a completion of the tiny model."""


def greedy(count: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=count, **more)


def small_llm(device: str, model: Any = "tiny", **config: Any) -> LLM:
    sizes = {"block_size": 4, "kv_cache_tokens": 400} | config
    return LLM(model, device=device, dtype="float32", **sizes)


def one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate([prompt], params, progress=False)
    return output


@cache
def original(device: str) -> Any:
    return tiny_gpt2(device)


def transformers_continuation(
    device: str, prompt: str | list[int], count: int, **how: Any
) -> list[int]:
    """Continue a prompt greedily, past tokens that end a text."""
    model, tokenizer = original(device).model, original(device).tokenizer
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    row = torch.tensor([ids], device=device)
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": END} | how
    tokens = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=count, **how)
    continuation: list[int] = tokens[0, len(ids) :].tolist()
    return continuation


@contextmanager
def during_a_stream(device: str, llm: LLM) -> Iterator[None]:
    """Check that a stream begun before the block continues after it as if the block had not run."""
    stream = llm.stream(TEXTS[0], greedy())
    tokens = [next(stream).token_id]
    yield
    tokens += [update.token_id for update in stream]
    assert tokens == transformers_continuation(device, TEXTS[0], 16)


def text_of(device: str, tokens: list[int]) -> str:
    text: str = original(device).tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text
