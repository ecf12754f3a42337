"""The file of baselines: one for a suite, to be read, reviewed and kept with it.

``{"format": 1, "steps": {test: {step: {device: {"tokens": 3, versions: {group: {name:
times}}}}}}}``. A run knows its own versions only, and leaves those of others as they are.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.work.step_work import GROUPS, CannotCompare, StepWork

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    Where = tuple[str, str, str]
    """Test, step and device."""

FORMAT = 1
"""Raised when what a file says would be misread."""
NAME = "roseinfer-costs.json"
TOKENS = "tokens"
UPDATE = "--roseinfer-update-costs"


def read_costs(file: Path) -> dict[str, Any]:
    """The steps in a file; none where there is no file."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CannotCompare(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CannotCompare(f"{file} is not of format {FORMAT}: record it anew without that file")
    steps: dict[str, Any] = found["steps"]
    return steps


def baseline(
    steps: Mapping[str, Any], where: Where, versions: Mapping[str, str], file: Path
) -> StepWork:
    """Find the work that was recorded for ``where`` with these versions."""
    test, step, device = where
    entry = steps.get(test, {}).get(step, {}).get(device)
    if entry is None:
        raise CannotCompare(
            f"no baseline for {step!r} of {test} on {device} in {file}: {UPDATE} records one"
        )
    groups: dict[str, Mapping[str, int]] = {}
    for name, group in GROUPS.items():
        version = versions[group.depends_on]
        if version not in entry:
            recorded = sorted(set(entry) - {TOKENS, *versions.values()})
            raise CannotCompare(
                f"no baseline for {step!r} of {test} with {version} in {file}, which has "
                f"{'; '.join(recorded) or 'no other'}: {UPDATE} adds it"
            )
        groups[name] = entry[version].get(name, {})
    return StepWork(entry[TOKENS], groups)


def as_entry(work: StepWork, versions: Mapping[str, str]) -> dict[str, Any]:
    """Lay the work out as in the file; a group in which nothing happened takes no line."""
    entry: dict[str, Any] = {TOKENS: work.tokens}
    for name, group in GROUPS.items():
        counts = entry.setdefault(versions[group.depends_on], {})
        if happened := {what: times for what, times in work.groups[name].items() if times}:
            counts[name] = happened
    return entry


def write_costs(file: Path, measured: Iterable[tuple[Where, Mapping[str, Any]]]) -> None:
    """Put what was measured into a file, beside all else that it holds."""
    steps = read_costs(file)
    for (test, step, device), new in measured:
        devices = steps.setdefault(test, {}).setdefault(step, {})
        old = devices.get(device, {})
        # What other versions counted was the work of as many tokens, or is of no use any more.
        devices[device] = {**(old if old.get(TOKENS) == new[TOKENS] else {}), **new}
    text = json.dumps({"format": FORMAT, "steps": steps}, indent=1, sort_keys=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(file)
