"""Models of a known architecture with weights drawn by chance: no download, no network.

What a step costs depends on shapes and not on what was learnt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from roseinfer.errors import ConfigError
from roseinfer.models.loading import resolve_device, resolve_dtype
from roseinfer.models.tiny import END, draw_weights

if TYPE_CHECKING:
    from collections.abc import Callable

_SEED = 11


def _gpt2() -> Any:
    """The 124M one."""
    return GPT2Config(bos_token_id=END, eos_token_id=END)


def _llama_1b() -> Any:
    """Few, wide heads that share keys and values: 32 that ask, 8 that are kept."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=END,
        eos_token_id=END,
    )


ARCHITECTURES: dict[str, Callable[[], Any]] = {"gpt2": _gpt2, "llama-1b": _llama_1b}
"""Configurations by name; the end of a text is the byte-level tokenizer's."""


def architecture(name: str) -> Any:
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"--random-weights knows the architectures {', '.join(ARCHITECTURES)}, not {name!r}"
        )
    return ARCHITECTURES[name]()


def random_model(name: str, device: str | None, dtype: str | None) -> Any:
    """A transformers model, built where it will run; always the same weights on a device."""
    config = architecture(name)
    where = resolve_device(device)
    wanted = resolve_dtype(dtype, where)
    if isinstance(wanted, str):  # there is no checkpoint to go by
        wanted = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    states = [where] if where.type == "cuda" else []
    with torch.random.fork_rng(devices=states), where:
        model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    draw_weights(model, _SEED)
    return model.eval().requires_grad_(False)
