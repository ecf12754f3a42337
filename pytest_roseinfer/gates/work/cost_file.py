"""The file of baselines for the work of steps.

``{test: {step: {device: {"tokens": 3, versions: {group: {name: times}}}}}}``. A run reads and
writes the entries of its own versions and leaves the others as they are.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.baselines import read_steps, write_steps
from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.work.step_work import GROUPS, StepWork

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    Where = tuple[str, str, str]
    """Test, step and device."""

NAME = "roseinfer-costs.json"
TOKENS = "tokens"
UPDATE = "--roseinfer-update-costs"


def name_of(file: Path, test_file: Path, test: str) -> str:
    """Return the name of a test in a file of baselines, which is the same wherever both lie."""
    return f"{os.path.relpath(test_file, file.parent).replace(os.sep, '/')}::{test}"


def read_baseline(file: Path, where: Where, versions: Mapping[str, str]) -> StepWork:
    """Return the work that was recorded for ``where`` with these versions."""
    test, step, device = where
    devices = read_steps(file).get(test, {}).get(step, {})
    entry = devices.get(device)
    if entry is None:
        others = f", which has one on {', '.join(sorted(devices))}" if devices else ""
        where_looked = f"in {file}{others}" if file.exists() else f"since {file} is not there"
        raise CannotCompare(
            f"no baseline for {step!r} of {test} on {device} {where_looked}: {UPDATE} records one"
        )
    if not isinstance(entry, dict) or TOKENS not in entry:
        raise CannotCompare(
            f"{file}: steps.{test}.{step}.{device} has no {TOKENS}: {UPDATE} adds it"
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
    """Lay the work out as in the file, which has no line for a group that counted nothing."""
    entry: dict[str, Any] = {TOKENS: work.tokens}
    for name, group in GROUPS.items():
        counts = entry.setdefault(versions[group.depends_on], {})
        if happened := {what: times for what, times in work.groups[name].items() if times}:
            counts[name] = happened
    return entry


def update(file: Path, measured: Iterable[tuple[Where, Mapping[str, Any]]]) -> None:
    """Put what was measured into a file, beside all else that it holds."""
    steps = read_steps(file)
    for (test, step, device), new in measured:
        devices = steps.setdefault(test, {}).setdefault(step, {})
        old = devices.get(device, {})
        # Counts of other versions are useless once the step brings another number of tokens.
        devices[device] = {**(old if old.get(TOKENS) == new[TOKENS] else {}), **new}
    write_steps(file, steps)
