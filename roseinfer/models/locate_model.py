"""Resolution of a model's name to a directory, a file, the hub or its cache, without torch."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from pathlib import Path

from roseinfer.errors import UnsupportedModel, did_you_mean

_CONFIG = "config.json"
GGUF = ".gguf"
"""Ending of files that hold a whole model: its weights, mostly quantised, and its tokenizer."""
_GGUF_PACKAGES = ("gguf", "accelerate")
"""Packages without which transformers reads no GGUF file."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_UNSUPPORTED = (
    f"it has an adapter ({ADAPTER_CONFIG}), which is not supported: merge the adapter into its "
    "model and save that"
)
_HUB_TIMEOUT_S = 2.0
"""Seconds for the hub to connect, and as many to answer, before it counts as unreachable."""


def locate(name: str) -> str:
    """Return a directory, a GGUF file, or the name itself where the hub has a model of that name.

    A directory that has one GGUF file and no config stands for that file. Where the hub cannot be
    reached this is the directory of the local cache. Raise where nothing can be loaded by that
    name.
    """
    if name == "tiny":
        return name
    if not name:
        raise _model_error(
            name, "it is not a name: give a directory, a GGUF file, a hub id, or 'tiny'"
        )
    if name.startswith("~"):
        name = str(Path(name).expanduser())
    if Path(name).is_file() and name.endswith(GGUF):
        return _gguf_file(name)
    if Path(name).is_file():
        raise _model_error(name, f"it is a file: give the directory, {str(Path(name).parent)!r}")
    # No hub id begins like this or has more than two parts.
    if Path(name).is_dir() or name.startswith((".", "/")) or name.count("/") > 1:
        return _local_checkpoint(name)
    return _from_hub(name)


def _gguf_file(name: str) -> str:
    if missing := [package for package in _GGUF_PACKAGES if find_spec(package) is None]:
        reason = f"it is a GGUF file, which needs {' and '.join(missing)}"
        raise _model_error(name, f"{reason}: run pip install 'roseinfer[gguf]'")
    return name


def _local_checkpoint(name: str) -> str:
    folder = Path(name)
    if not folder.is_dir():
        raise _model_error(name, f"there is no such directory{_suggest_directory(folder)}")
    if (folder / ADAPTER_CONFIG).is_file():
        raise _model_error(name, ADAPTER_UNSUPPORTED)
    if not (folder / _CONFIG).is_file():
        if ggufs := sorted(str(each) for each in folder.glob(f"*{GGUF}") if each.is_file()):
            if len(ggufs) > 1:
                reason = f"it has no {_CONFIG} and several GGUF files: name one, as {ggufs[0]}"
                raise _model_error(name, reason)
            return _gguf_file(ggufs[0])
        within = sorted(each for each in _subfolders(folder) if (each / _CONFIG).is_file())
        suggestion = f"; did you mean {within[-1]}?" if within else ""
        raise _model_error(name, f"it has no {_CONFIG}{suggestion}")
    return name


def _model_error(name: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name!r} cannot be loaded: {reason}")


def _suggest_directory(folder: Path) -> str:
    """Return a question that names a directory with a similar name; empty without one."""
    names = [each.name for each in _subfolders(folder.parent)]
    return did_you_mean(folder.name, names, str(folder).removesuffix(folder.name))


def _subfolders(folder: Path) -> list[Path]:
    try:
        return [each for each in folder.iterdir() if each.is_dir()]
    except OSError:
        return []


def _from_hub(name: str) -> str:
    from huggingface_hub import constants, errors, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, _CONFIG)
    except errors.HFValidationError:
        suggestion = _suggest_directory(Path(name))
        reason = f"there is no such directory, and the hub has no such names{suggestion}"
        raise _model_error(name, reason) from None
    error = _query_hub(name)
    if error is None:
        return name
    if isinstance(cached, str):
        return str(Path(cached).parent)
    hub = f"the hub ({constants.ENDPOINT})"
    if isinstance(error, errors.RepositoryNotFoundError):
        reason = f"there is no such directory, and {hub} has no model of that name"
    elif isinstance(error, errors.EntryNotFoundError):
        reason = f"on {hub} it has no {_CONFIG}; an adapter must be merged into its model"
    else:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        reason = f"it is not in the local cache, and {hub} cannot be reached: {reason}"
    raise _model_error(name, f"{reason}{_suggest_directory(Path(name))}")


def _query_hub(name: str) -> Exception | None:
    """Query the hub once for the model's config; return the error if that fails."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(name, _CONFIG)
    answers: list[Exception | None] = []

    def query() -> None:
        try:
            get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_S)
        except Exception as error:  # of the HTTP library, which differs between versions
            answers.append(error)
        else:
            answers.append(None)

    # Looking up an address has no time limit of its own, and may take as long as the rest.
    thread = threading.Thread(target=query, daemon=True)
    thread.start()
    thread.join(3 * _HUB_TIMEOUT_S)
    return answers[0] if answers else TimeoutError("no answer came")
