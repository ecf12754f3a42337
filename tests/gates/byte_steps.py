"""Decode steps that begin with equal contexts each time, and whose memory is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from pytest_roseinfer.gates.step_work import Step
from roseinfer import LLM, SamplingParams
from tests.models.families import POSITIONS, VOCABULARY, scale_weights_up, tiny

if TYPE_CHECKING:
    from collections.abc import Callable

CONTEXTS = (3, 5, 9)
"""Lengths of the prompts."""
FUSED: dict[str, Any] = {
    "fused_model": True,
    "resident_decode": True,
    "run_ahead": 1,
    "paged_attention": True,
}
"""Settings with which a step runs only roseinfer's kernels."""
_NARROW = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": POSITIONS,
}
_LONG = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class ByteStep:
    """A step and the memory arguments of ``check_bytes``."""

    step: Step
    weights: torch.nn.Module
    cache: tuple[torch.Tensor, torch.Tensor]
    context_bytes: Callable[[], int]


def llama(device: str) -> Any:
    return tiny("llama", device).to(torch.bfloat16)


def narrow_gpt2(device: str) -> Any:
    """Return a model of one layer, whose many kernels are slow under the interpreter."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=POSITIONS
    )
    return scale_weights_up(transformers.GPT2LMHeadModel(config)).to(device, torch.bfloat16)


def narrow_llama(device: str) -> Any:
    return _narrow(transformers.LlamaConfig(**_NARROW), device)


def narrow_qwen3(device: str) -> Any:
    """Return a model that normalises queries and keys together with their rotation."""
    return _narrow(transformers.Qwen3Config(**_NARROW, head_dim=8), device)


def narrow_olmo2(device: str) -> Any:
    """Return a model whose norms come after the linear layers."""
    config = transformers.Olmo2Config(**_NARROW, pad_token_id=None, eos_token_id=None)
    return _narrow(config, device)


def narrow_mixtral(device: str) -> Any:
    """Return a model with experts, each of which gets at least one token."""
    return _narrow(transformers.MixtralConfig(**_NARROW, num_local_experts=3), device)


def _narrow(config: Any, device: str) -> Any:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return scale_weights_up(model).to(device, torch.bfloat16)


NARROW: dict[str, Callable[[str], Any]] = {
    "gpt2": narrow_gpt2,
    "llama": narrow_llama,
    "qwen3": narrow_qwen3,
    "olmo2": narrow_olmo2,
    "mixtral": narrow_mixtral,
}
"""A model of every family that has a path of its own through the fused kernels."""


def second_token(model: Any, device: str, **config: Any) -> ByteStep:
    """Return the first step after prefill, or the second with tokens read back a step later."""
    config = {"kv_cache_tokens": 512, "block_size": 16, "prefix_cache": False, **config}
    config["pad_head"] = False  # the weights of a padded head are no parameter of the model
    engine = LLM(model, device=device, **config).engine
    kv = engine.sequence_runner.kv
    running: list[Any] = []

    def begin() -> None:
        for request in running:
            engine.cancel(request)
        prompts = [[*range(1, length + 1)] for length in CONTEXTS]
        running[:] = [engine.submit(prompt, _LONG) for prompt in prompts]
        while not all(request.sequence.num_stored >= request.prompt_length for request in running):
            engine.step()

    def context_bytes() -> int:
        one = kv.keys[:, 0, :, 0]
        token = 2 * one.numel() * one.element_size()
        stored: int = sum(request.sequence.num_stored for request in running)
        return token * stored

    step = Step(engine.step, len(CONTEXTS), begin)
    return ByteStep(step, model, (kv.keys, kv.values), context_bytes)
