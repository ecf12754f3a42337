"""The small models that this distribution's engine is checked with, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

VOCABULARY = 32
END = 5
POSITIONS = 48
ODD = "odd llama"
"""A model with one token more, whose head is therefore padded."""
LONG_POSITIONS = 1300


@dataclass(frozen=True, slots=True)
class _Heads:
    """A shape; the names of models say it as query heads, KV heads and the size of a head."""

    kind: str
    query: int
    kv: int
    dim: int
    positions: int = LONG_POSITIONS


_SHAPES = {
    "gpt2": _Heads("gpt2", 2, 2, 12, POSITIONS),
    "llama": _Heads("llama", 4, 2, 6, POSITIONS),
    ODD: _Heads("llama", 4, 2, 6, POSITIONS),
    "llama 10:2": _Heads("llama", 10, 2, 6, POSITIONS),
    "llama 24:3": _Heads("llama", 24, 3, 6, POSITIONS),
    "llama 32:2": _Heads("llama", 32, 2, 6, POSITIONS),
    "gpt2 1x16": _Heads("gpt2", 1, 1, 16),
    "llama 32:2x16": _Heads("llama", 32, 2, 16),
    "qwen3 4:4x16": _Heads("qwen3", 4, 4, 16),
    "gpt2 3x80": _Heads("gpt2", 3, 3, 80),
    "gpt2 12x64": _Heads("gpt2", 12, 12, 64),
    "llama 1:1x32": _Heads("llama", 1, 1, 32),
    "llama 8:1x64": _Heads("llama", 8, 1, 64),
    "llama 10:2x64": _Heads("llama", 10, 2, 64),
    "llama 4:2x256": _Heads("llama", 4, 2, 256),
    "llama 6:3x80": _Heads("llama", 6, 3, 80),
    "qwen3 16:8x128": _Heads("qwen3", 16, 8, 128),
    "qwen3 16:1x64": _Heads("qwen3", 16, 1, 64),
}
OF_MANY_SHAPES = tuple(name for name, heads in _SHAPES.items() if heads.positions > POSITIONS)
"""From one query head to 16 for each KV head, and heads of 16 to 256: what kernels depend on. Those
whose kernels are compiled soonest come first."""


def network(name: str, device: str) -> Any:
    """The same weights every time, large enough that the likeliest token is no tie."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(_config(name))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.normal_(std=0.4 * min(1, 96 / weight.shape[-1]) ** 0.5)
            for weight in model.parameters():
                if weight.dim() == 1:  # they begin as biases of 0 and gains of 1
                    weight.add_(0.2 * torch.randn(weight.shape))
    return model.eval().requires_grad_(False).to(device)


def _config(name: str) -> Any:
    heads = _SHAPES[name]
    tokens = {"vocab_size": VOCABULARY + (name == ODD), "bos_token_id": END, "eos_token_id": END}
    if heads.kind == "gpt2":
        width = heads.query * heads.dim
        return GPT2Config(
            n_positions=heads.positions, n_embd=width, n_layer=2, n_head=heads.query, **tokens
        )
    kind = LlamaConfig if heads.kind == "llama" else Qwen3Config
    return kind(
        hidden_size=24 if 24 % heads.query == 0 else 2 * heads.query,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=heads.query,
        num_key_value_heads=heads.kv,
        head_dim=heads.dim,
        max_position_embeddings=heads.positions,
        **tokens,
    )
