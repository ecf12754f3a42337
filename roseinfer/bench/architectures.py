"""The architectures that ``--random-weights`` knows, by name, without torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from roseinfer.errors import ConfigError, did_you_mean


class _Architecture(NamedTuple):
    config: str
    """A class of transformers."""
    sizes: dict[str, Any]
    """What differs from its defaults."""


ARCHITECTURES = {
    "gpt2": _Architecture("GPT2Config", {}),
    "llama-1b": _Architecture(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "llama-8b": _Architecture(
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-0.6b": _Architecture(
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2-1b": _Architecture(
        "Olmo2Config",
        {
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    ),
    # Each token visits 8 of 64 experts.
    "olmoe-1b-7b": _Architecture(
        "OlmoeConfig",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "max_position_embeddings": 4096,
        },
    ),
    # One of a family for which there are no fused kernels.
    "pythia-410m": _Architecture(
        "GPTNeoXConfig",
        {
            "vocab_size": 50304,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
        },
    ),
}


def architecture(name: str) -> Any:
    """Configure a model, whose texts end with the token of the byte-level tokenizer."""
    require_architecture(name)
    import transformers

    from roseinfer.models.tiny import END

    kind, sizes = ARCHITECTURES[name]
    return getattr(transformers, kind)(**sizes, bos_token_id=END, eos_token_id=END)


def require_architecture(name: str) -> None:
    if name not in ARCHITECTURES:
        known, alike = ", ".join(ARCHITECTURES), did_you_mean(name, ARCHITECTURES)
        raise ConfigError(f"--random-weights knows the architectures {known}, not {name!r}{alike}")
