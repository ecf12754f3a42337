"""Files of baselines, which are kept with the tests: ``{"format": 1, "steps": {test: ...}}``."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.gate import CannotCompare

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
"""This number rises when a reader would misunderstand older files."""
_LEAST_DEPTH = 3
"""The steps, a test's, and what is known of one are objects."""

_REMEDY = "Restore it from git, or delete it and record all of its steps anew"


def read_steps(file: Path) -> dict[str, Any]:
    """Return what a file says about steps; a file that does not exist says nothing."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CannotCompare(f"{file} cannot be read: {error}. {_REMEDY}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or "steps" not in found:
        raise CannotCompare(f"{file} is not of format {FORMAT}. {_REMEDY}")
    steps: dict[str, Any] = found["steps"]
    if wrong := _wrong(steps, "steps", _LEAST_DEPTH):
        raise CannotCompare(f"{file}: {wrong}. {_REMEDY}")
    return steps


def _wrong(found: object, place: str, depth: int) -> str:
    """Say at which place there is neither an object nor a number, or return an empty text."""
    if isinstance(found, dict):
        within = (_wrong(each, f"{place}.{name}", depth - 1) for name, each in found.items())
        return next(filter(None, within), "")
    if depth > 0:
        return f"{place} must be an object"
    return "" if isinstance(found, int | float) else f"{place} must be a number"


def write_steps(file: Path, steps: dict[str, Any]) -> None:
    """Write the file in one move, so that nobody reads half of it."""
    text = json.dumps({"format": FORMAT, "steps": steps}, indent=1, sort_keys=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(file)
