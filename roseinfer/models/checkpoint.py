"""Loads models from directories and the hub: no code, no pickles, no files from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import cached_file

from roseinfer.errors import UnsupportedModel, with_kind
from roseinfer.models.source import ADAPTER, WHY_NO_ADAPTER

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_GENERATION = "generation_config.json"
_POINTER = b"version https://git-lfs"
_LONGEST_HEADER = 100 << 20
"""Bytes that safetensors allows at the most."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_NUMBER = re.compile(r"\.\d+\.")


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
            ignore_mismatched_sizes=True,  # so that they are told, and refused below
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path!r} cannot be loaded: {error}") from error
    except Exception as error:  # of any kind, since transformers trusts what a config says
        raise UnsupportedModel(
            f"{path!r} cannot be loaded: transformers cannot make a model of its config and "
            f"weights: {with_kind(error)}"
        ) from error
    _check_weights(path, model, found)
    return model


def _check_weights(path: str, model: Any, found: Mapping[str, Any]) -> None:
    """Raise unless the checkpoint's weights are those that its config speaks of."""
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModel(
            f"the checkpoint {path!r} lacks {len(missing)} weights, {missing[0]} among them: "
            "transformers would make them up"
        )
    if wrong := sorted(found["mismatched_keys"]):
        name, there, due = wrong[0]
        raise UnsupportedModel(
            f"the checkpoint {path!r} has {len(wrong)} weights of other shapes than its config "
            f"says: {name} is {list(there)} and not {list(due)}"
        )
    layers = {_NUMBER.sub(".0.", name) for name in model.state_dict() if _NUMBER.search(name)}
    more = [name for name in found["unexpected_keys"] if _NUMBER.sub(".0.", name) in layers]
    if more:
        raise UnsupportedModel(
            f"the checkpoint {path!r} has {len(more)} weights of layers that its config does not "
            f"count, {min(more)} among them"
        )


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
    shards = {f"model{_WEIGHTS}", named or ""}
    for index in {f"model{_INDEX}", named or ""}:
        if index.endswith(_INDEX) and (found := file_of(path, index)) is not None:
            listed = set(json.loads(Path(found).read_text())["weight_map"].values())
            for shard in listed:
                _check_name(shard, _WEIGHTS)
            shards |= listed
    _check_kinds(path, shards)
    _check_generation_config(path)


def _check_kinds(path: str, shards: Iterable[str]) -> None:
    """Raise for weights that are not there yet, and for those that are codes of other numbers.

    What is not in a directory here is fetched later, and is not looked at.
    """
    there = [Path(path) / name for name in sorted(shards) if (Path(path) / name).is_file()]
    if not there and (Path(path) / _PICKLE).is_file():
        raise UnsupportedModel(
            f"its weights are in {_PICKLE}, and pickles are not read, since they may run code: "
            "load it by transformers, and save it by save_pretrained"
        )
    for file in there:
        for name, kind in _kinds_in(file).items():
            if name.endswith(".weight") and kind not in _FLOATS:
                raise UnsupportedModel(
                    f"{name} is of type {kind} and no quantization_config says what it stands "
                    "for; quantized weights are not supported"
                )


def _kinds_in(file: Path) -> dict[str, str]:
    """Return the types of a file's tensors, or none where transformers will say what is wrong."""
    with file.open("rb") as opened:
        begin = opened.read(len(_POINTER))
        if begin == _POINTER:
            raise UnsupportedModel(
                f"{file.name} is a pointer of git-lfs, and not what it points to: run git lfs pull "
                "in its folder"
            )
        opened.seek(8)
        size = int.from_bytes(begin[:8], "little")
        header = opened.read(size) if size <= _LONGEST_HEADER else b""
    try:
        told = json.loads(header)
        return {name: each["dtype"] for name, each in told.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _check_generation_config(path: str) -> None:
    """Raise if it cannot be read: transformers goes on without, and no text ends then."""
    found = file_of(path, _GENERATION)
    try:
        said = {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"its {_GENERATION} is no JSON: {error}") from None
    if not isinstance(said, dict):
        raise UnsupportedModel(f"its {_GENERATION} is no JSON object")


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
