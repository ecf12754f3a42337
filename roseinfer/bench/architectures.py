"""The architectures that ``--random-weights`` knows, by name, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roseinfer.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable


def _gpt2() -> Any:
    """Configure a model of 124M parameters."""
    from transformers import GPT2Config

    from roseinfer.models.tiny import END

    return GPT2Config(bos_token_id=END, eos_token_id=END)


def _llama_1b() -> Any:
    from transformers import LlamaConfig

    from roseinfer.models.tiny import END

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


def _llama_8b() -> Any:
    from transformers import LlamaConfig

    from roseinfer.models.tiny import END

    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=END,
        eos_token_id=END,
    )


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama-1b": _llama_1b,
    "llama-8b": _llama_8b,
}
"""What makes the configuration of each; the end of a text is the byte-level tokenizer's."""


def architecture(name: str) -> Any:
    require_architecture(name)
    return ARCHITECTURES[name]()


def require_architecture(name: str) -> None:
    if name not in ARCHITECTURES:
        known, alike = ", ".join(ARCHITECTURES), did_you_mean(name, ARCHITECTURES)
        raise ConfigError(f"--random-weights knows the architectures {known}, not {name!r}{alike}")
