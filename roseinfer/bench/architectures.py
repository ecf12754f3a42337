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


def _qwen3_06b() -> Any:
    from transformers import Qwen3Config

    from roseinfer.models.tiny import END

    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        bos_token_id=END,
        eos_token_id=END,
    )


def _olmo2_1b() -> Any:
    from transformers import Olmo2Config

    from roseinfer.models.tiny import END

    return Olmo2Config(
        vocab_size=100352,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=END,
        eos_token_id=END,
    )


def _pythia_410m() -> Any:
    """Configure a model of a family for which there are no fused kernels."""
    from transformers import GPTNeoXConfig

    from roseinfer.models.tiny import END

    return GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        max_position_embeddings=2048,
        bos_token_id=END,
        eos_token_id=END,
    )


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "llama-1b": _llama_1b,
    "llama-8b": _llama_8b,
    "qwen3-0.6b": _qwen3_06b,
    "olmo2-1b": _olmo2_1b,
    "pythia-410m": _pythia_410m,
}
"""What makes the configuration of each; the end of a text is the byte-level tokenizer's."""


def architecture(name: str) -> Any:
    require_architecture(name)
    return ARCHITECTURES[name]()


def require_architecture(name: str) -> None:
    if name not in ARCHITECTURES:
        known, alike = ", ".join(ARCHITECTURES), did_you_mean(name, ARCHITECTURES)
        raise ConfigError(f"--random-weights knows the architectures {known}, not {name!r}{alike}")
