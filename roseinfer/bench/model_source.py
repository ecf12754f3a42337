"""The model of a benchmark, named so that another process can load the same one.

``--random-weights`` takes a known architecture and draws its weights, so nothing is downloaded.
The cost of a step depends on shapes and not on what was learnt.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roseinfer.bench.cases import architecture
from roseinfer.llm import LLM
from roseinfer.models.checkpoint import fetch
from roseinfer.models.loading import resolve_device, resolve_dtype
from roseinfer.models.source import locate
from roseinfer.models.tiny import byte_tokenizer, draw_weights, tiny_gpt2

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_SEED = 11
_HEAD = 8.0
"""Logits are about so large where the head is not the embedding: the likeliest stands out."""


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
        """Load the model anew, since an engine may rearrange its weights.

        Each rank draws random weights on a GPU of its own.
        """
        if not self.random_weights:
            return LLM(self.name, device=self.device, dtype=self.dtype, **settings)
        tokenizer = byte_tokenizer(architecture(self.name).vocab_size)
        draw = partial(random_model, self.name, dtype=self.dtype)
        return LLM(draw, tokenizer=tokenizer, device=self.device, **settings)

    def network(self) -> Any:
        """Load the transformers model on its device, to be run without our engine."""
        if self.random_weights:
            return random_model(self.name, self.device, self.dtype)
        device = resolve_device(self.device)
        dtype = resolve_dtype(self.dtype, device)
        if self.name == "tiny":
            return tiny_gpt2(str(device)).model.to(torch.float32 if dtype == "auto" else dtype)
        return fetch(locate(self.name), dtype).to(device)

    def skeleton(self) -> Any:
        """Build the network as transformers makes it, without weights."""
        if self.name == "tiny" and not self.random_weights:
            return tiny_gpt2().model
        config = (
            architecture(self.name)
            if self.random_weights
            else AutoConfig.from_pretrained(locate(self.name), trust_remote_code=False)
        )
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)


def random_model(name: str, device: torch.device | str | None, dtype: str | None) -> Any:
    """Build a transformers model where it will run, with the same weights every time."""
    config = architecture(name)
    where = resolve_device(None if device is None else str(device))
    wanted = resolve_dtype(dtype, where)
    if isinstance(wanted, str):  # there is no checkpoint to go by
        wanted = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    states = [where] if where.type == "cuda" else []
    with torch.random.fork_rng(devices=states), where:
        model = AutoModelForCausalLM.from_config(config, dtype=wanted)
    draw_weights(model, _SEED, head=_HEAD)
    return model.eval().requires_grad_(False)


def collect() -> None:
    """Give back the memory of an engine that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
