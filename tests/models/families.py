"""Tiny random models of every family, with weights large enough that argmax has no ties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.engine.runner import SequenceRunner
    from roseinfer.kv.sequence import CachedSequence

VOCABULARY = 97
POSITIONS = 96
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4, n_positions=POSITIONS
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=20),
    "mistral": lambda: transformers.MistralConfig(**SHAPE),
    "mistral window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE,
        head_dim=12,
        sliding_window=5,
        attn_logit_softcapping=4.0,
        attn_implementation="eager",  # sdpa, the default of transformers 5.17, ignores softcaps
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SHAPE, head_dim=12, sliding_window=5, num_local_experts=2, num_experts_per_tok=1
    ),
}
WINDOWED = ("mistral window", "gemma2", "gpt-oss")
"""Families with windows: in every layer, and in every other one with softcaps or with sinks."""


def tiny(family: str, device: str) -> Any:
    """Build a family's model; its weights are the same each time."""
    torch.manual_seed(1)
    return scale_weights_up(transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())).to(
        device
    )


def scale_weights_up(model: Any) -> Any:
    """Scale up a model's weights."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
        for module in model.modules():
            if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
                module.sinks.copy_(torch.arange(len(module.sinks)) - 1)
    return model.eval()


def flatten_attention(model: Any, factor: float) -> Any:
    """Divide the weights of queries, since with large weights attention sees one token only."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_proj.weight"):
                weight.div_(factor)
            elif name.endswith("c_attn.weight"):
                weight[:, : weight.shape[0]].div_(factor)
    return model


def greedy_step(runner: SequenceRunner, sessions: Sequence[CachedSequence]) -> None:
    """Store the unstored tokens of sequences, and append the argmax to each."""
    tokens = runner.extend(sessions).argmax(-1).tolist()
    for session, token in zip(sessions, tokens, strict=True):
        session.token_ids.append(token)
