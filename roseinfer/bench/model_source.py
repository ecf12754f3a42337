"""Where a benchmark's model comes from, said in a way that another process understands."""

from __future__ import annotations

import gc
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roseinfer.bench.random_models import architecture, random_model
from roseinfer.config import EngineConfig
from roseinfer.errors import ConfigError
from roseinfer.llm import LLM
from roseinfer.models.checkpoint import fetch
from roseinfer.models.loading import resolve_device, resolve_dtype
from roseinfer.models.tiny import byte_tokenizer, tiny_gpt2

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping


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
        check_settings(settings)
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
        if self.name == "tiny":
            dtype = resolve_dtype(self.dtype, device)
            return tiny_gpt2(str(device)).model.to(torch.float32 if dtype == "auto" else dtype)
        return fetch(self.name, resolve_dtype(self.dtype, device)).to(device)

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


def has_switch(name: str) -> bool:
    """Whether the engine of this build has such a setting."""
    return name in {field.name for field in fields(EngineConfig)}


def check_settings(settings: Mapping[str, Any]) -> None:
    missing = [name for name in settings if not has_switch(name)]
    if missing:
        raise ConfigError(f"the engine of this build has no switch {', '.join(missing)}")


def collect() -> None:
    """After an engine was let go of: give its memory back before the next one asks for it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
