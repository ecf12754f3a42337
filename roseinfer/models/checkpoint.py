"""Loads models from directories and the hub: no code, no pickles, no files from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from roseinfer.errors import UnsupportedModel, with_kind
from roseinfer.models.source import ADAPTER, WHY_NO_ADAPTER

if TYPE_CHECKING:
    import torch

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"


def fetch(path: str, dtype: torch.dtype | str) -> Any:
    """Load a transformers model from what ``locate`` made of its name.

    It reads safetensors only, runs no remote code, and ignores kernels that a config names.
    """
    try:
        if file_of(path, ADAPTER) is not None:
            raise UnsupportedModel(WHY_NO_ADAPTER)
        config = _config(path)
        _check_files(path, config)
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path!r} cannot be loaded: {error}") from error
    except Exception as error:  # of any kind, since transformers trusts what a config says
        raise UnsupportedModel(
            f"{path!r} cannot be loaded: transformers cannot make a model of its config and "
            f"weights: {with_kind(error)}"
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModel(
            f"the checkpoint {path!r} lacks {len(missing)} weights, {missing[0]} among them: "
            "transformers would make them up"
        )
    return model


def _config(path: str) -> Any:
    """Load the model's config, without what it says about how to compute."""
    kind = type(AutoConfig.from_pretrained(path, trust_remote_code=False))
    settings, _ = kind.get_config_dict(path)
    return kind.from_dict(_without_choices(settings) | {"model_type": kind.model_type})


def _without_choices(settings: Any) -> Any:
    """Drop settings by which a config may choose kernels on the hub."""
    if isinstance(settings, list):
        return [_without_choices(each) for each in settings]
    if not isinstance(settings, dict):
        return settings
    if settings.get("quantization_config") is not None:
        raise UnsupportedModel("it is quantized (quantization_config), which is not supported")
    return {
        name: _without_choices(value)
        for name, value in settings.items()
        if not name.endswith("_implementation") and name != "fusion_config"
    }


def _check_files(path: str, config: Any) -> None:
    """Raise if the config or an index names files that are no safetensors or lie elsewhere."""
    named = getattr(config, "transformers_weights", None)
    if named is not None:
        _check_name(named, _WEIGHTS, _INDEX)
    for index in {f"model{_INDEX}", named or ""}:
        if index.endswith(_INDEX) and (found := file_of(path, index)) is not None:
            for shard in set(json.loads(Path(found).read_text())["weight_map"].values()):
                _check_name(shard, _WEIGHTS)


def file_of(path: str, name: str) -> str | None:
    """Return the path of one of the model's files, or None without it or without a network."""
    found: str | None = cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def _check_name(name: str, *endings: str) -> None:
    """Raise unless a name is that of a file in the model's own directory, with such an ending."""
    place = PurePosixPath(name)
    if not name.endswith(endings) or place.is_absolute() or ".." in place.parts or "\\" in name:
        raise UnsupportedModel(
            f"it names {name!r} for its weights, which must be a safetensors file in its own "
            "directory"
        )
