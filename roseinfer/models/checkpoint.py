"""Loading of checkpoints from directories, GGUF files and the hub, without code or pickles."""

from __future__ import annotations

import json
import logging
import re
import threading
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import cached_file

from roseinfer.errors import UnsupportedModel, error_with_type, short_repr
from roseinfer.models.locate_model import ADAPTER_CONFIG, ADAPTER_UNSUPPORTED, GGUF

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_LOG = logging.getLogger(__name__)
_WEIGHTS = ".safetensors"
_INDEX = ".safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_GENERATION = "generation_config.json"
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100 << 20
"""Largest header, in bytes, that safetensors allows."""
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_MAX_MODULE_COUNTS = {re.compile(r"(^|_)layers?$"): 128, re.compile(r"(^|_)experts$"): 1024}
"""Settings that count modules to build, with the number that any checkpoint may have."""
_MAX_LAYERS_WITHOUT_WEIGHTS = 1024
"""Largest number of layers of a model whose tensors are not local, and cannot be counted."""
_MAX_UNSAVED_ELEMENTS = 1 << 28
"""Elements that a small model may have besides its weights, in tables of positions and masks."""
_LAYER_INDEX = re.compile(r"\.\d+\.")


_HEADER_LOCK = threading.Lock()
"""Held while ``read_header_once`` replaces the reader of GGUF files."""


class _TensorHeader(NamedTuple):
    """A tensor's dtype and shape, as in the header of its file."""

    dtype: str
    shape: list[int]


def load_checkpoint(path: str, dtype: torch.dtype | str) -> Any:
    """Load a transformers model from a path that ``locate`` returned.

    It reads safetensors and GGUF files only, runs no remote code, and ignores kernels that a config
    names.
    """
    try:
        if path.endswith(GGUF):
            return _load_gguf(Path(path), dtype)
        if find_model_file(path, ADAPTER_CONFIG) is not None:
            raise UnsupportedModel(ADAPTER_UNSUPPORTED)
        settings, _ = PreTrainedConfig.get_config_dict(path)
        files = _weight_files(path, settings.get("transformers_weights"))
        tensors = {
            name: each for file in files for name, each in _read_tensor_headers(file).items()
        }
        _check_counts(settings, len(tensors) or _MAX_LAYERS_WITHOUT_WEIGHTS)
        config = _load_config(path)
        _check_weight_formats(path, files, tensors)
        _check_generation_config(path)
        _check_size(config, tensors)
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported, and refused below
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{path!r} cannot be loaded: {error}") from error
    except Exception as error:  # of any kind, since transformers trusts configs
        raise UnsupportedModel(
            f"{path!r} cannot be loaded: transformers cannot make a model of its config and "
            f"weights: {error_with_type(error)}"
        ) from error
    _check_weights(path, model, loading_info)
    return model


@contextmanager
def read_header_once(path: str) -> Iterator[None]:
    """Parse the header of a GGUF file once, however many readers of it are made.

    Transformers makes one for the config, one for the weights and one for the tokenizer. A header
    with a large vocabulary takes longer to parse than the weights to dequantise.
    """
    if not path.endswith(GGUF):
        yield
        return
    gguf: Any = import_module("gguf")
    original, readers = gguf.GGUFReader, dict[str, Any]()

    def read(file: Any, *arguments: Any) -> Any:
        if str(file) != path or arguments:
            return original(file, *arguments)
        if path not in readers:
            readers[path] = original(path)
        return readers[path]

    with _HEADER_LOCK:
        gguf.GGUFReader = read
        try:
            yield
        finally:
            gguf.GGUFReader = original


def _load_gguf(file: Path, dtype: torch.dtype | str) -> Any:
    """Load the model of a GGUF file, whose weights transformers dequantises."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise UnsupportedModel(
            f"transformers {transformers.__version__} reads no GGUF file of the family "
            f"{architecture!r}"
        )
    tensors = {
        each.name: _TensorHeader(each.tensor_type.name, [int(size) for size in each.shape])
        for each in reader.tensors
    }
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
    }
    config = AutoConfig.from_pretrained(**place)
    _check_counts(config.to_dict(), len(tensors))
    _check_size(config, tensors)
    if dtype == "auto":
        dtype = torch.bfloat16
    model, loading_info = AutoModelForCausalLM.from_pretrained(
        **place, config=config, dtype=dtype, output_loading_info=True
    )
    _check_weights(str(file), model, loading_info)
    formats = ", ".join(sorted({each.dtype for each in tensors.values()}))
    _LOG.warning(
        "%s: %s with %d weights, dequantised from %s to %s",
        *(file.name, type(model).__name__, len(tensors), formats, str(dtype).partition(".")[2]),
    )
    return model


def _check_weights(path: str, model: Any, loading_info: Mapping[str, Any]) -> None:
    """Raise unless the checkpoint's weights match its config."""
    if missing := sorted(loading_info["missing_keys"]):
        raise UnsupportedModel(
            f"the checkpoint {path!r} lacks {len(missing)} weights, {missing[0]} among them: "
            "transformers would draw them at random"
        )
    if mismatched := sorted(loading_info["mismatched_keys"]):
        name, actual, expected = mismatched[0]
        raise UnsupportedModel(
            f"the checkpoint {path!r} has {len(mismatched)} weights of other shapes than in its "
            f"config: {name} is {list(actual)} and not {list(expected)}"
        )
    layers = {
        _LAYER_INDEX.sub(".0.", name) for name in model.state_dict() if _LAYER_INDEX.search(name)
    }
    unexpected = [
        name for name in loading_info["unexpected_keys"] if _LAYER_INDEX.sub(".0.", name) in layers
    ]
    if unexpected:
        raise UnsupportedModel(
            f"the checkpoint {path!r} has {len(unexpected)} weights of layers that its config "
            f"does not count, {min(unexpected)} among them"
        )


def _load_config(path: str) -> Any:
    """Load the model's config, without its choices of kernels."""
    kind = type(AutoConfig.from_pretrained(path, trust_remote_code=False))
    settings, _ = kind.get_config_dict(path)
    return kind.from_dict(_drop_kernel_choices(settings) | {"model_type": kind.model_type})


def _drop_kernel_choices(settings: Any) -> Any:
    """Drop settings that let a config choose kernels on the hub."""
    if isinstance(settings, list):
        return [_drop_kernel_choices(each) for each in settings]
    if not isinstance(settings, dict):
        return settings
    if settings.get("quantization_config") is not None:
        raise UnsupportedModel("it is quantized (quantization_config), which is not supported")
    return {
        name: _drop_kernel_choices(value)
        for name, value in settings.items()
        if not name.endswith("_implementation") and name != "fusion_config"
    }


def _weight_files(path: str, named: str | None) -> list[Path]:
    """Return the weight files of a local directory; hub files are fetched later.

    Raise if the config or an index names files that are not safetensors or lie elsewhere.
    """
    if named is not None:
        _check_name(named, _WEIGHTS, _INDEX)
    shards = {f"model{_WEIGHTS}", named or ""}
    for index in {f"model{_INDEX}", named or ""}:
        if index.endswith(_INDEX) and (file_found := find_model_file(path, index)) is not None:
            file_names = set(json.loads(Path(file_found).read_text())["weight_map"].values())
            for shard in file_names:
                _check_name(shard, _WEIGHTS)
            shards |= file_names
    return [file for name in sorted(shards - {""}) if (file := Path(path) / name).is_file()]


def _check_counts(settings: Any, num_tensors: int) -> None:
    """Raise if a config counts more layers or experts than there are tensors, before building any.

    Some settings are larger than the model needs, and experts may share a tensor.
    """
    for name, value in _iterate_settings(settings):
        for pattern, minimum in _MAX_MODULE_COUNTS.items():
            limit = max(minimum, num_tensors)
            if isinstance(value, int) and value > limit and pattern.search(name):
                raise UnsupportedModel(
                    f"its config has {name}={short_repr(value)}, and a model of its weights has at "
                    f"most {limit}"
                )


def _iterate_settings(settings: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield name, value
            yield from _iterate_settings(value)
    elif isinstance(settings, list):
        for each in settings:
            yield from _iterate_settings(each)


def _check_size(config: Any, tensors: Mapping[str, _TensorHeader]) -> None:
    """Raise if the config's model is far larger than its weights, before allocating it."""
    if not tensors:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    stored = sum(prod(each.shape) for each in tensors.values())
    for kind, tensors_of_kind, limit in (
        ("weights", model.parameters(), 2 * stored),
        ("tables beside its weights", model.buffers(), 2 * stored + _MAX_UNSAVED_ELEMENTS),
    ):
        num_elements = sum(each.numel() for each in tensors_of_kind)
        if num_elements > limit:
            raise UnsupportedModel(
                f"its config describes {num_elements:,} numbers of {kind}, and its files have "
                f"{stored:,}"
            )


def _check_weight_formats(
    path: str, files: Sequence[Path], tensors: Mapping[str, _TensorHeader]
) -> None:
    """Raise for pickled weights, and for quantised ones."""
    if not files and (Path(path) / _PICKLE).is_file():
        raise UnsupportedModel(
            f"its weights are in {_PICKLE}, and pickles are not read, since they may run code: "
            "load it by transformers, and save it by save_pretrained"
        )
    for name, each in tensors.items():
        if name.endswith(".weight") and each.dtype not in _FLOAT_DTYPES:
            raise UnsupportedModel(
                f"{name} is of type {each.dtype}, without a quantization_config; quantized "
                "weights are not supported"
            )


def _read_tensor_headers(file: Path) -> dict[str, _TensorHeader]:
    """Return a file's tensors; empty where transformers will report the error of the file."""
    with file.open("rb") as opened:
        begin = opened.read(len(_LFS_POINTER))
        if begin == _LFS_POINTER:
            raise UnsupportedModel(
                f"{file.name} is a pointer of git-lfs, not the file itself: run git lfs pull in "
                "its folder"
            )
        opened.seek(8)
        size = int.from_bytes(begin[:8], "little")
        header = opened.read(size) if size <= _MAX_HEADER_BYTES else b""
    try:
        tensors = json.loads(header)
        return {
            name: _TensorHeader(each["dtype"], [int(size) for size in each["shape"]])
            for name, each in tensors.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _check_generation_config(path: str) -> None:
    """Raise if the file cannot be read: transformers ignores that, and no completion ends."""
    file = find_model_file(path, _GENERATION)
    try:
        settings = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"its {_GENERATION} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise UnsupportedModel(f"its {_GENERATION} is not a JSON object")


def find_model_file(path: str, name: str) -> str | None:
    """Return the path of one of the model's files; None without the file or without a network."""
    file: str | None = cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return file


def _check_name(name: str, *endings: str) -> None:
    """Raise unless the name is a file in the model's own directory, with one of the endings."""
    place = PurePosixPath(name)
    if not name.endswith(endings) or place.is_absolute() or ".." in place.parts or "\\" in name:
        raise UnsupportedModel(
            f"it names {name!r} for its weights, which must be a safetensors file in its own "
            "directory"
        )


# The checkpoint's tokenizer. One with files that cannot be read is refused.


_TOKENIZER_FILES = (
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
    """Return the tokenizer at a path from ``locate``; None if it has no tokenizer file."""
    if name.endswith(GGUF):
        try:
            return AutoTokenizer.from_pretrained(Path(name).parent, gguf_file=Path(name).name)
        except Exception as error:  # of any kind, since transformers trusts files
            raise _tokenizer_error(name, error_with_type(error)) from error
    for file in _TOKENIZER_FILES:
        path = Path(name) / file
        if path.is_dir():
            raise _tokenizer_error(name, f"{file} is a directory")
        if path.is_file() and not path.stat().st_size:
            raise _tokenizer_error(name, f"{file} is empty")
    files = [file for file in _TOKENIZER_FILES if find_model_file(name, file)]
    if not files:  # some families would make one up
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        # With files that it cannot read, some families have an empty vocabulary.
        if tokenizer.vocab_size > 1:
            return tokenizer
        cause: Exception = ValueError("it has no vocabulary")
    except Exception as error:  # of any kind, since tokenizers trusts files
        cause = error
    raise _tokenizer_error(name, f"from {', '.join(files)}: {error_with_type(cause)}") from cause


def _tokenizer_error(name: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer of {name!r} cannot be loaded: {reason}: download its files again, or "
        "remove them and pass token ids"
    )
