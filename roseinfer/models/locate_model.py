"""Resolution of a model's name to a directory, the hub or its local cache, without torch."""

from __future__ import annotations

import threading
from pathlib import Path

from roseinfer.errors import UnsupportedModel, did_you_mean

_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_UNSUPPORTED = (
    f"it has an adapter ({ADAPTER_CONFIG}), which is not supported: merge the adapter into its "
    "model and save that"
)
_HUB_TIMEOUT_S = 2.0
"""Seconds for the hub to connect, and as many to answer, before it counts as unreachable."""


def locate(name: str) -> str:
    """Return a directory, or the name itself where the hub has a model of that name.

    Where the hub cannot be reached this is the directory of the local cache. Raise where nothing
    can be loaded by that name.
    """
    if name == "tiny":
        return name
    if not name:
        raise _model_error(name, "it is not a name: give a directory, a hub id, or 'tiny'")
    if name.startswith("~"):
        name = str(Path(name).expanduser())
    if Path(name).is_file():
        raise _model_error(name, f"it is a file: give the directory, {str(Path(name).parent)!r}")
    # No hub id begins like this or has more than two parts.
    if Path(name).is_dir() or name.startswith((".", "/")) or name.count("/") > 1:
        _require_checkpoint(name)
        return name
    return _from_hub(name)


def _require_checkpoint(name: str) -> None:
    folder = Path(name)
    if not folder.is_dir():
        raise _model_error(name, f"there is no such directory{_suggest_directory(folder)}")
    if (folder / ADAPTER_CONFIG).is_file():
        raise _model_error(name, ADAPTER_UNSUPPORTED)
    if not (folder / _CONFIG).is_file():
        within = sorted(each for each in _subfolders(folder) if (each / _CONFIG).is_file())
        suggestion = f"; did you mean {within[-1]}?" if within else ""
        raise _model_error(name, f"it has no {_CONFIG}{suggestion}")


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
