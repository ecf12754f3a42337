"""A benchmark's report: tables for people, JSON for programs, and the machine it ran on.

A row of a table is a frozen dataclass. Its fields are the JSON names and, with spaces, the
column headings; None is a number that this machine cannot supply.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    caption: str
    rows: Sequence[Any]
    """Frozen dataclasses, all of one type."""
    printed: bool = True
    """Otherwise for programs and charts alone."""

    def text(self) -> str:
        headings = [field.name.replace("_", " ") for field in fields(self.rows[0])]
        values = [[getattr(row, field.name) for field in fields(row)] for row in self.rows]
        numeric = [
            not any(isinstance(value, str) for value in column)
            for column in zip(*values, strict=True)
        ]
        body = tabulate(
            [[_cell(value) for value in row] for row in values],
            headings,
            tablefmt="github",
            colalign=["right" if is_number else "left" for is_number in numeric],
            disable_numparse=True,
        )
        return f"{self.caption}\n\n{body}"


@dataclass(frozen=True, slots=True)
class UnavailableRow:
    path: str
    not_available: str


class Report:
    """``document`` is what is written as JSON, and what charts are drawn from.

    ``facts`` were measured once for the whole run. A table without rows is left out of the text
    and is an empty list in the JSON.
    """

    def __init__(
        self,
        benchmark: str,
        command: str,
        device: torch.device,
        config: Mapping[str, Any],
        tables: Sequence[Table],
        facts: Mapping[str, float] | None = None,
    ) -> None:
        self._tables = tables
        self.document: dict[str, Any] = {
            "benchmark": benchmark,
            "command": command,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": _machine(device),
            "config": dict(config),
            "facts": dict(facts or {}),
            "tables": {table.name: [asdict(row) for row in table.rows] for table in tables},
        }

    def text(self) -> str:
        said = self.document
        named = [", ".join(f"{k} {v}" for k, v in said[part].items()) for part in _DESCRIBED]
        facts = ", ".join(f"{k.replace('_', ' ')} {_cell(v)}" for k, v in said["facts"].items())
        head = "\n".join([f"$ {said['command']}", said["date"], *named, facts])
        shown = [table.text() for table in self._tables if table.printed and table.rows]
        return "\n\n".join([head, *shown])

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.document, indent=2, default=str) + "\n", encoding="utf-8")


_DESCRIBED = ("machine", "config")


def _machine(device: torch.device) -> dict[str, Any]:
    """The facts without which a time means nothing."""
    host = _cpu_name()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else host,
        "host": host,
        "cpus": os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cell(value: object) -> str:
    """Three digits that matter, and no more of a measured number than can be believed."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    for least, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if value >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3g}"
