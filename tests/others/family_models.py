"""Small models of transformers' families, and their logits without a cache."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Mapping

VOCABULARY = 32
PADDING = 0
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": PADDING,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
_MIXED = ["linear_attention", "full_attention"]
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 5},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Qwen3Next": {
        "layer_types": _MIXED,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "MiniMax": {"layer_types": _MIXED, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "RecurrentGemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 5,
        "lru_width": 32,
    },
    "DiffLlama": {},
    "Phi3": {
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    },
    "Mistral with a window of one": {"sliding_window": 1},
}
"""Fields of each model's config, besides those of ``_SHAPE``; a name begins with its family."""


@lru_cache
def model_of(name: str, *, twin: bool = False) -> Any:  # noqa: ARG001
    """Return a model whose weights are large, so that each token depends on the earlier ones.

    The slow twin has a model of its own, since some models keep states.
    """
    family = name.partition(" ")[0]
    config = getattr(transformers, f"{family}Config")(**{**_SHAPE, **_MODELS[name]})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            if weight.ndim > 1 and "A_log" not in parameter:
                weight.normal_(0, 2 / weight.shape[-1] ** 0.5)
    model.generation_config.eos_token_id = None
    return model


@lru_cache(maxsize=20_000)
def logits_of(name: str, tokens: tuple[int, ...]) -> Any:
    """Return the logits after the last token, computed without a cache."""
    with torch.no_grad():
        model = model_of(name, twin=True)
        return model(torch.tensor([tokens]), use_cache=False).logits[0, -1].numpy()
