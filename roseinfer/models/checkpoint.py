"""Loads models from directories and the hub: no code, no pickles, no files from elsewhere."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import cached_file

from roseinfer.errors import UnsupportedModel, short_repr, with_kind
from roseinfer.models.source import ADAPTER, WHY_NO_ADAPTER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_GENERATION = "generation_config.json"
_POINTER = b"version https://git-lfs"
_LONGEST_HEADER = 100 << 20
"""Bytes that safetensors allows at the most."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_COUNTED = {re.compile(r"(^|_)layers?$"): 128, re.compile(r"(^|_)experts$"): 1024}
"""Settings that say how many modules to build, and how many any checkpoint may have."""
_MOST_LAYERS_UNSEEN = 1024
"""Layers of a model whose tensors are not here to be counted."""
_MOST_UNSAVED = 1 << 28
"""Numbers that a small model may have beside its weights, in tables of positions and masks."""
_NUMBER = re.compile(r"\.\d+\.")


class _Tensor(NamedTuple):
    """A tensor's type and shape, as the header of its file has them."""

    kind: str
    shape: list[int]


def fetch(path: str, dtype: torch.dtype | str) -> Any:
    """Load a transformers model from what ``locate`` made of its name.

    It reads safetensors only, runs no remote code, and ignores kernels that a config names.
    """
    try:
        if file_of(path, ADAPTER) is not None:
            raise UnsupportedModel(WHY_NO_ADAPTER)
        settings, _ = PreTrainedConfig.get_config_dict(path)
        files = _files(path, settings.get("transformers_weights"))
        tensors = {name: each for file in files for name, each in _tensors_in(file).items()}
        _check_counts(settings, len(tensors) or _MOST_LAYERS_UNSEEN)
        config = _config(path)
        _check_kinds(path, files, tensors)
        _check_generation_config(path)
        _check_size(config, tensors)
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


def _files(path: str, named: str | None) -> list[Path]:
    """Return the files of weights that are in a directory here: hub files are fetched later.

    Raise if the config or an index names files that are no safetensors or lie elsewhere.
    """
    if named is not None:
        _check_name(named, _WEIGHTS, _INDEX)
    shards = {f"model{_WEIGHTS}", named or ""}
    for index in {f"model{_INDEX}", named or ""}:
        if index.endswith(_INDEX) and (found := file_of(path, index)) is not None:
            listed = set(json.loads(Path(found).read_text())["weight_map"].values())
            for shard in listed:
                _check_name(shard, _WEIGHTS)
            shards |= listed
    return [file for name in sorted(shards - {""}) if (file := Path(path) / name).is_file()]


def _check_counts(settings: Any, num_tensors: int) -> None:
    """Raise if a config counts more layers or experts than there are tensors, before any is built.

    Some settings are larger than the model needs, and experts may share a tensor.
    """
    for name, value in _settings_in(settings):
        for pattern, few in _COUNTED.items():
            most = max(few, num_tensors)
            if isinstance(value, int) and value > most and pattern.search(name):
                raise UnsupportedModel(
                    f"its config says {name}={short_repr(value)}, and a model of its weights has "
                    f"{most} at most"
                )


def _settings_in(settings: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield name, value
            yield from _settings_in(value)
    elif isinstance(settings, list):
        for each in settings:
            yield from _settings_in(each)


def _check_size(config: Any, tensors: Mapping[str, _Tensor]) -> None:
    """Raise if the config's model is far larger than its weights, before memory is taken for it."""
    if not tensors:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    stored = sum(prod(each.shape) for each in tensors.values())
    for what, own, most in (
        ("weights", model.parameters(), 2 * stored),
        ("tables beside its weights", model.buffers(), 2 * stored + _MOST_UNSAVED),
    ):
        wanted = sum(each.numel() for each in own)
        if wanted > most:
            raise UnsupportedModel(
                f"its config describes {wanted:,} numbers of {what}, and its files have {stored:,}"
            )


def _check_kinds(path: str, files: Sequence[Path], tensors: Mapping[str, _Tensor]) -> None:
    """Raise for weights that are pickled, and for those that are codes of other numbers."""
    if not files and (Path(path) / _PICKLE).is_file():
        raise UnsupportedModel(
            f"its weights are in {_PICKLE}, and pickles are not read, since they may run code: "
            "load it by transformers, and save it by save_pretrained"
        )
    for name, each in tensors.items():
        if name.endswith(".weight") and each.kind not in _FLOATS:
            raise UnsupportedModel(
                f"{name} is of type {each.kind} and no quantization_config says what it stands "
                "for; quantized weights are not supported"
            )


def _tensors_in(file: Path) -> dict[str, _Tensor]:
    """Return a file's tensors, or none where transformers will say what is wrong with it."""
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
        return {
            name: _Tensor(each["dtype"], [int(size) for size in each["shape"]])
            for name, each in told.items()
            if name != "__metadata__"
        }
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


# Loads a checkpoint's tokenizer. One that has files, but cannot be read, is refused.


_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "added_tokens.json",
    "special_tokens_map.json",
)


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of what ``locate`` found, or None if it has no file of one."""
    for file in _FILES:
        path = Path(name) / file
        if path.is_dir():
            raise _refused(name, f"{file} is a directory")
        if path.is_file() and not path.stat().st_size:
            raise _refused(name, f"{file} is empty")
    found = [file for file in _FILES if file_of(name, file)]
    if not found:  # some families would make one up
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        # With files that it cannot read, some families have an empty vocabulary.
        if tokenizer.vocab_size > 1:
            return tokenizer
        why: Exception = ValueError("there is no vocabulary")
    except Exception as error:  # of any kind, since tokenizers trusts what a file says
        why = error
    raise _refused(name, f"from {', '.join(found)}: {with_kind(why)}") from why


def _refused(name: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer of {name!r} cannot be loaded: {why}: get its files anew, or remove them "
        "and give token ids"
    )
