"""The model of a benchmark, named in a way that another process understands.

With ``--random-weights`` it is a known architecture whose weights are drawn by chance: no
download, no network. What a step costs depends on shapes and not on what was learnt.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

from roseinfer.errors import ConfigError
from roseinfer.llm import LLM
from roseinfer.models.checkpoint import fetch
from roseinfer.models.loading import resolve_device, resolve_dtype
from roseinfer.models.tiny import END, byte_tokenizer, draw_weights, tiny_gpt2

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

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


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str
    random_weights: bool
    device: str | None
    dtype: str | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> ModelSource:
        return cls(args.hf_model_id, args.random_weights, args.device, args.dtype)

    def described(self, dtype: torch.dtype) -> dict[str, str]:
        return {
            "model": self.name,
            "weights": "random" if self.random_weights else "loaded",
            "dtype": str(dtype).removeprefix("torch."),
        }

    def llm(self, settings: Mapping[str, Any]) -> LLM:
        """A model of its own for every engine: what one does to the weights no other finds."""
        if not self.random_weights:
            return LLM(self.name, device=self.device, dtype=self.dtype, **settings)
        network = self.network()
        tokenizer = byte_tokenizer(network.config.vocab_size)
        return LLM(network, tokenizer=tokenizer, device=self.device, **settings)

    def network(self) -> Any:
        """A transformers model on its device, for whoever runs it without our engine."""
        if self.random_weights:
            return random_model(self.name, self.device, self.dtype)
        device = resolve_device(self.device)
        dtype = resolve_dtype(self.dtype, device)
        if self.name == "tiny":
            return tiny_gpt2(str(device)).model.to(torch.float32 if dtype == "auto" else dtype)
        return fetch(self.name, dtype).to(device)

    def skeleton(self) -> Any:
        """The network without weights, as transformers makes it."""
        if self.name == "tiny" and not self.random_weights:
            return tiny_gpt2().model
        config = (
            architecture(self.name)
            if self.random_weights
            else AutoConfig.from_pretrained(self.name, trust_remote_code=False)
        )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)


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


def collect() -> None:
    """After an engine was let go of: give its memory back before the next one asks for it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
