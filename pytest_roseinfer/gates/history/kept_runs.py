"""The file that keeps the figures of gates: a line of JSON for each run, the newest last."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.gate import CannotCompare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

NAME = "history.jsonl"
FORMAT = 1
"""This number rises when a reader would misunderstand older lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """What one run of pytest found; docs/reference.md describes the fields."""

    format: int = FORMAT
    when: str
    commit: str
    changed: bool
    environment: Mapping[str, str]
    times: Sequence[dict[str, Any]] = field(default_factory=tuple)
    work: Sequence[dict[str, Any]] = field(default_factory=tuple)

    @property
    def label(self) -> str:
        """The commit as people say it."""
        return f"{self.commit[:9] or 'no commit'}{' with changes' if self.changed else ''}"


def append_run(folder: Path, run: KeptRun) -> Path:
    """Add a run to the file of a folder in one write, so that two runs cannot mix their lines."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / NAME
    with file.open("ab", buffering=0) as lines:
        lines.write(json.dumps(asdict(run)).encode() + b"\n")
    return file


def read_runs(folder: Path) -> list[KeptRun]:
    """Return the runs that a folder keeps, the oldest first."""
    file = folder / NAME
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotCompare(f"{file} cannot be read: {error}") from error
    runs = [_read(line, f"{file}, line {at}") for at, line in enumerate(lines, 1)]
    if not runs:
        raise CannotCompare(f"{file} keeps no run")
    return sorted(runs, key=lambda run: run.when)


def _read(line: str, where: str) -> KeptRun:
    try:
        said = json.loads(line)
        if said["format"] != FORMAT:
            raise CannotCompare(f"{where} is of format {said['format']}, and not of {FORMAT}")
        return KeptRun(**said)
    except (ValueError, TypeError, KeyError) as error:
        raise CannotCompare(f"{where} is no run of gates: {error!r}") from error
