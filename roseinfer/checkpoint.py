"""Models from directories and the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModelForCausalLM

from roseinfer.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch


def fetch(path: str, dtype: torch.dtype | str) -> Any:
    """A transformers model from a local directory or a hub id, with all of its weights.

    Safetensors only, never remote code.
    """
    if _looks_like_a_path(path) and not Path(path).is_dir():
        raise UnsupportedModel(f"{path!r} cannot be loaded: there is no such directory")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # of any kind, since transformers believes what a config says
        raise UnsupportedModel(f"{path!r} cannot be loaded: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModel(
            f"the checkpoint {path!r} lacks {len(missing)} weights, {missing[0]} among them: "
            "transformers would make them up"
        )
    return model


def _looks_like_a_path(name: str) -> bool:
    """No hub id begins so, or has more than two parts."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1
