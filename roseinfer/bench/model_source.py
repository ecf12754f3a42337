"""Source of a benchmark's model, which lets several processes load the same model.

``--random-weights`` builds a known architecture with random weights, so nothing is downloaded.
The cost of a step depends on shapes, not on the values of weights.
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
from roseinfer.models.checkpoint import load_checkpoint
from roseinfer.models.loading import resolve_device, resolve_dtype
from roseinfer.models.locate_model import locate
from roseinfer.models.tiny import byte_tokenizer, draw_weights, tiny_gpt2

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

_SEED = 11
_HEAD = 8.0
"""Approximate size of logits if the head is not tied to the embedding, for a clear argmax."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Name, weights, device and dtype of a model, which can be pickled."""

    name: str
    random_weights: bool
    device: str | None
    dtype: str | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> ModelSource:
        return cls(args.hf_model_id, args.random_weights, args.device, args.dtype)

    def describe(self, dtype: torch.dtype) -> dict[str, str]:
        return {
            "model": self.name,
            "weights": "random" if self.random_weights else "loaded",
            "dtype": str(dtype).removeprefix("torch."),
        }

    def llm(self, settings: Mapping[str, Any]) -> LLM:
        """Load a new instance of the model, since an engine may rearrange its weights.

        Each rank draws the random weights on its own GPU.
        """
        if not self.random_weights:
            return LLM(self.name, device=self.device, dtype=self.dtype, **settings)
        tokenizer = byte_tokenizer(architecture(self.name).vocab_size)
        draw = partial(random_model, self.name, dtype=self.dtype)
        return LLM(draw, tokenizer=tokenizer, device=self.device, **settings)

    def network(self) -> Any:
        """Load the transformers model on its device, for use without the engine."""
        if self.random_weights:
            return random_model(self.name, self.device, self.dtype)
        device = resolve_device(self.device)
        dtype = resolve_dtype(self.dtype, device)
        if self.name == "tiny":
            return tiny_gpt2(str(device)).model.to(torch.float32 if dtype == "auto" else dtype)
        return load_checkpoint(locate(self.name), dtype).to(device)

    def skeleton(self) -> Any:
        """Build the transformers model on the meta device, without weights."""
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
    """Build a transformers model on its device, with the same random weights every time."""
    config = architecture(name)
    target_device = resolve_device(None if device is None else str(device))
    model_dtype = resolve_dtype(dtype, target_device)
    if isinstance(model_dtype, str):  # "auto", but without a checkpoint
        model_dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    rng_devices = [target_device] if target_device.type == "cuda" else []
    with torch.random.fork_rng(devices=rng_devices), target_device:
        model = AutoModelForCausalLM.from_config(config, dtype=model_dtype)
    draw_weights(model, _SEED, head=_HEAD)
    return model.eval().requires_grad_(False)


def free_memory() -> None:
    """Free the memory of objects that are no longer referenced, also on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
