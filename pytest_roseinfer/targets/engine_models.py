"""The small models that roseinfer's own engine is checked with, by name.

Transformers takes seconds to import, so that is done when the first model is built.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
from tokenizers import decoders

from pytest_roseinfer.engine_capabilities.sampling import distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, Sampling
    from pytest_roseinfer.engine_capabilities.capability import Floats

# The shapes and traits of the small models that roseinfer's own engine is checked with.


VOCABULARY = 32
END = 5
POSITIONS = 48
ODD = "odd llama"
"""This model has one token more than the others, so its head is padded."""
LONG_POSITIONS = 1300

SLOPED = "sloped bloom"
"""In this one a score loses something for each token between query and key (ALiBi)."""
_Shape = tuple[str, int, int, int]
"""A family, query heads, KV heads and the size of a head."""
_SHORT: dict[str, _Shape] = {
    "gpt2": ("gpt2", 2, 2, 12),
    "llama": ("llama", 4, 2, 6),
    ODD: ("llama", 4, 2, 6),
    "llama 10:2": ("llama", 10, 2, 6),
    "llama 24:3": ("llama", 24, 3, 6),
    "llama 32:2": ("llama", 32, 2, 6),
    SLOPED: ("bloom", 8, 8, 6),  # the more heads, the steeper
    "mixtral": ("mixtral", 4, 2, 6),
}
LONG: dict[str, _Shape] = {
    "gpt2 1x16": ("gpt2", 1, 1, 16),
    "llama 32:2x16": ("llama", 32, 2, 16),
    "qwen3 4:4x16": ("qwen3", 4, 4, 16),
    "gpt2 3x80": ("gpt2", 3, 3, 80),
    "gpt2 12x64": ("gpt2", 12, 12, 64),
    "llama 1:1x32": ("llama", 1, 1, 32),
    "llama 8:1x64": ("llama", 8, 1, 64),
    "llama 10:2x64": ("llama", 10, 2, 64),
    "llama 4:2x256": ("llama", 4, 2, 256),
    "llama 6:3x80": ("llama", 6, 3, 80),
    "qwen3 16:8x128": ("qwen3", 16, 8, 128),
    "qwen3 16:1x64": ("qwen3", 16, 1, 64),
}
HYBRID = "half windowed qwen3"
"""Of this model's two layers one attends to all tokens, and one to the last ``WINDOW``."""
CAPPED = "capped gemma2"
SINKING = "gpt-oss with sinks"
"""In these too every second layer has a window."""
_WINDOWED: dict[str, _Shape] = {
    "windowed mistral": ("mistral", 4, 2, 6),
    HYBRID: ("qwen3", 4, 2, 6),
    CAPPED: ("gemma2", 4, 2, 6),
    SINKING: ("gpt_oss", 4, 2, 6),
}
_FAMILY_TRAITS: dict[str, dict[str, Any]] = {
    # By default its scores are scaled for heads of 256, and so small that a cap does nothing.
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 6},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    # Steps of few rows visit fewer experts than there are, and those of more rows some twice.
    "mixtral": {"num_local_experts": 7, "num_experts_per_tok": 2},
}
SMALL = tuple(_SHORT)
WITH_WINDOWS_ALONE = ("windowed mistral", HYBRID)
WINDOWED = tuple(_WINDOWED)
"""Models whose layers, or every second of them, attend to the last ``WINDOW`` tokens."""
WINDOW = 5
_WINDOWS = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
OF_MANY_SHAPES = tuple(LONG)
"""Kernels depend on these shapes: one query head to 16 for each KV head, and heads of 16 to 256.
Models whose kernels compile soonest come first."""


def config(name: str) -> Any:
    """Return the config of a model. Importing transformers takes seconds."""
    from transformers import AutoConfig

    family, heads, kv_heads, head_dim = (_SHORT | _WINDOWED | LONG)[name]
    positions = LONG_POSITIONS if name in LONG else POSITIONS
    tokens = {"vocab_size": VOCABULARY + (name == ODD), "bos_token_id": END, "eos_token_id": END}
    if family == "gpt2":
        sizes = {"n_positions": positions, "n_embd": heads * head_dim, "n_head": heads}
        return AutoConfig.for_model(family, n_layer=2, **sizes, **tokens)
    if family == "bloom":
        sizes = {"seq_length": positions, "hidden_size": heads * head_dim, "n_head": heads}
        return AutoConfig.for_model(family, n_layer=2, **sizes, **tokens)
    return AutoConfig.for_model(
        family,
        hidden_size=24 if 24 % heads == 0 else 2 * heads,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        **tokens,
        **(_WINDOWS if name in _WINDOWED else {}),
        **_FAMILY_TRAITS.get(family, {}),
    )


_FELT_SINK = 8.0


def network(name: str, device: str) -> Any:
    """Build a model, always with the same weights, so large that the likeliest token is no tie."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config(name)).eval().requires_grad_(False)
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.4 * min(1, 96 / weight.shape[-1]) ** 0.5)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:  # they begin as biases of 0 and gains of 1
                weight.add_(0.2 * torch.randn(weight.shape))
            if name.endswith("sinks"):  # they weigh next to nothing beside such scores
                weight.add_(_FELT_SINK)
    return model.to(device)


# An engine may make the network that it serves its own, so the slow twin has another one.
@lru_cache(maxsize=16)
def _untouched(name: str, device: str) -> Any:
    model = network(name, device)
    model.set_attn_implementation("eager")  # torch's own attention leaves caps out
    return model


@lru_cache(maxsize=1 << 15)
def logits(name: str, device: str, tokens: tuple[int, ...]) -> Floats:
    """Compute the logits of the token after these from all of them anew, without a cache."""
    # A GPU that processes share keeps each of them waiting: small models do without it.
    device = device if name in LONG else "cpu"
    found = _untouched(name, device)(torch.tensor([tokens], device=device), use_cache=False)
    return np.asarray(found.logits[0, -1].double().cpu())


# Small tokenizers for the models that roseinfer's own engine is checked with.


_END = "<end>"
_BYTES = ("a", "b", "Ġ", "ab", "Ã", "©", "é", "â", "Ĥ", "¬", "âĤ", "ba", "Ġa", "ðŁ", "ĺ", "Ģ", "c")
"""As GPT-2 writes bytes: letters, a space, and characters of which tokens have a part each."""
_WORDS = ("▁a", "▁b", "a", "b", "▁", "ab", "▁ab", "é", "▁ba", "c")


@lru_cache
def tokenizer(*, byte_level: bool) -> Any:
    """Build one in which every token has a text of its own, or one in which words have spaces."""
    if byte_level:
        return _built(_BYTES, decoders.ByteLevel())
    return _built(_WORDS, decoders.Metaspace())


def text_of(tokens: Sequence[int], by: Any) -> str:
    """Return the text of a whole request's tokens, by one of these tokenizers alone."""
    text: str = by.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def _built(pieces: Sequence[str], decoder: Any) -> Any:
    from transformers import PreTrainedTokenizerFast  # it takes seconds

    others = (token for token in range(VOCABULARY) if token != END)
    written = {token: f"{pieces[at % len(pieces)]}" for at, token in enumerate(others)}
    for at, token in enumerate(sorted(written)[len(pieces) :]):
        written[token] = chr(ord("A") + at)
    vocabulary = {text: token for token, text in written.items()} | {_END: END}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=_END))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=_END, clean_up_tokenization_spaces=False
    )


# The draws of roseinfer's engine, anew in numpy: a token's noise is a hash of where it stands.


_WORD = (1 << 64) - 1


def draw(logits: Floats, sampling: Sampling, tokens: Sequence[int], prompted: int) -> int:
    """Return the token that comes after ``tokens``, the first of which are the prompt."""
    likely = distribution(logits, sampling, tokens, prompted)
    place = _scrambled(_scrambled(sampling.seed & _WORD) + len(tokens))
    hashes = [_scrambled(place + token) >> 40 for token in range(len(likely))]
    noise = -np.log(-np.log((np.array(hashes) + 0.5) / (1 << 24)))
    return int((likely + noise).argmax())


def _scrambled(number: int) -> int:
    """Scramble 64 bits as SplitMix64 does, which its authors publish with these numbers."""
    number = (number + 0x9E3779B97F4A7C15) & _WORD
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _WORD
    return number ^ (number >> 31)


# What a request gets from its model alone: without a cache, batches, or any code of ours.


@lru_cache(maxsize=4096)
def generate_alone(
    name: str, device: str, prompt: tuple[int, ...], sampling: Sampling
) -> tuple[int, ...]:
    """Compute each token from all that comes before it."""
    tokens = list(prompt)
    positions = LONG_POSITIONS if name in OF_MANY_SHAPES else POSITIONS
    while len(tokens) < positions and goes_on(tokens, len(prompt), sampling):
        row = logits(name, device, tuple(tokens))
        tokens.append(draw(row, sampling, tokens, len(prompt)))
    return tuple(tokens[len(prompt) :])


def goes_on(tokens: Sequence[int], prompted: int, sampling: Sampling) -> bool:
    """Return True if a request is not over with what follows its prompt in these tokens."""
    new = tokens[prompted:]
    ended = bool(new) and new[-1] == END and not sampling.ignore_eos
    return len(new) < sampling.max_new_tokens and not ended


def is_near_tie(
    mix: RequestMix, tokens: tuple[int, ...], sampling: Sampling, rounding: float
) -> bool:
    """Return True if logits that are off by so much could lead to another token.

    The prompt is that of some request that begins as these tokens do.
    """
    prompts = {len(each.prompt) for each in mix.requests if begins(each.prompt, tokens)}
    row = logits(mix.options["model"], mix.device, tokens)
    noise = np.random.default_rng(0).standard_normal((16, len(row)))
    nearly = row + noise * np.abs(row).max() * rounding
    return any(
        len({draw(each, sampling, tokens, prompted) for each in (row, *nearly)}) > 1
        for prompted in prompts
    )


def begins(prompt: Sequence[int], tokens: Sequence[int]) -> bool:
    return tuple(tokens[: len(prompt)]) == tuple(prompt)
