"""A language model small enough for any test: a random GPT-2 with one token for every byte."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from roseinfer.text.detokenizer import BYTE_OF

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SEED = 20
_CHAT_TEMPLATE = """\
{% if tools %}{{ "tools: " + tools | tojson + "\n" }}{% endif %}
{% for message in messages %}
{% set calls = message.tool_calls | tojson if message.tool_calls else "" %}
{{ message.role }}: {{ message.content }}{{ calls }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
END = 256
"""End-of-text token, after those of the 256 bytes."""


@dataclass(frozen=True, slots=True)
class TinyGPT2:
    """A model in evaluation mode and its tokenizer, whose ids are the bytes of the text."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def tiny_gpt2(device: str = "cpu") -> TinyGPT2:
    """Build the model, always with the same weights."""
    return TinyGPT2(deepcopy(_tiny_network()).to(device), byte_tokenizer())


@cache
@torch.inference_mode(False)  # copies must also be usable outside of inference mode
def _tiny_network() -> PreTrainedModel:
    """Build the network once: transformers takes longer for that than a copy does."""
    config = GPT2Config(
        vocab_size=END + 1,
        n_positions=1024,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=END,
        eos_token_id=END,
        # With tied weights, the argmax would mostly be the last token again.
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):  # keeps torch's own random state
        model: PreTrainedModel = GPT2LMHeadModel(config)
    draw_weights(model, _SEED)
    return model.eval().requires_grad_(False)


def byte_tokenizer(vocab_size: int = END + 1) -> PreTrainedTokenizerBase:
    """Build a tokenizer of UTF-8 bytes. An id above them, never encoded, decodes to ``<300>``."""
    extra_tokens = {f"<{token}>": token for token in range(END + 1, vocab_size)}
    vocabulary = {**BYTE_OF, "<|endoftext|>": END, **extra_tokens}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_CHAT_TEMPLATE,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int, *, head: float = 5.0) -> None:
    """Draw large weights: attention is sharp, and the logits are far apart.

    With the weights that training starts from, all tokens are about equally probable: rounding
    decides. ``head`` is about the size of the logits, of a head that is not tied to the embedding.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        noise = torch.randn(parameter.shape, generator=generator, device=model.device)
        if type(module).__name__.endswith("Norm"):
            noise = 0.1 * noise + name.endswith("weight")
        elif name.endswith("bias"):
            noise *= 0.1
        elif not isinstance(module, nn.Embedding):
            inputs = parameter.shape[1 if isinstance(module, nn.Linear) else 0]
            noise *= (head if "lm_head" in name else 1.5) / inputs**0.5
        parameter.copy_(noise)
