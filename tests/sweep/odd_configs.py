"""Values that some configs need besides sizes for a model to be built."""

from __future__ import annotations

from typing import Any

DEFAULT: Any = object()
"""Marks a value as left at its default."""

_ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
ODD: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {
        "rope_parameters": {"full_attention": _ROTATION, "sliding_attention": _ROTATION}
    },
    "DbrxConfig": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "DeepseekV2Config": {"num_experts_per_tok": 2, "head_dim": 8},
    "Dots3NoteVisionConfig": {"mlp_layer_types": ["dense", "dense"]},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"head_dim": 16, "num_heads": 4},
    "ReformerConfig": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [8, 8],
    },
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "num_hidden_layers": 3,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "head_dim": DEFAULT,
    },
    "Zamba2Config": {"layers_block_type": ["linear_attention", "hybrid"]},
    "ZayaConfig": {"num_experts_per_tok": 1},
}
"""Values by names of config classes; other classes need none."""
