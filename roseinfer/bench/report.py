"""Report of a benchmark: tables as text, the same data as JSON, and the machine.

A row of a table is a frozen dataclass. Its fields are the JSON names and, with spaces, the
column headings; None is a number that this machine cannot measure.
"""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Table:
    """Table of a report."""

    name: str
    caption: str
    rows: Sequence[Any]
    """Frozen dataclasses, all of one type."""
    printed: bool = True
    """False for a table that is only in the JSON, for charts and other programs."""
    headings: Mapping[str, str] | None = None
    """Printed fields and their headings; None prints all fields under their names."""

    def text(self) -> str:
        names = [field.name for field in fields(self.rows[0])]
        shown = self.headings or {name: name.replace("_", " ") for name in names}
        rows = [[getattr(row, name) for name in shown] for row in self.rows]
        has_text = [
            any(isinstance(value, str) for value in column) for column in zip(*rows, strict=True)
        ]
        body = tabulate(
            [map(_cell, row) for row in rows],
            list(shown.values()),
            tablefmt="github",
            colalign=["left" if text else "right" for text in has_text],
            disable_numparse=True,
        )
        return f"{self.caption}\n\n{body}"


@dataclass(frozen=True, slots=True)
class UnavailableRow:
    """Path that cannot be timed, and the reason."""

    path: str
    not_available: str


@dataclass(frozen=True, slots=True)
class UnavailableTable(Table):
    """Table of paths that cannot be timed, printed by reason: most hold for many paths."""

    def text(self) -> str:
        paths: dict[str, list[str]] = {}
        for row in self.rows:
            paths.setdefault(row.not_available, []).append(row.path)
        items = (f"- {', '.join(of_reason)}: {reason}" for reason, of_reason in paths.items())
        lines = (fill(each, 100, subsequent_indent="  ", break_long_words=False) for each in items)
        return "\n".join([f"{self.caption}\n", *lines])


def unavailable_table(reasons: Iterable[tuple[str, str]]) -> UnavailableTable:
    """Return the table of pairs of a path and the reason why it is not timed."""
    rows = [UnavailableRow(*row) for row in reasons]
    return UnavailableTable("unavailable", "Paths that cannot be timed on this machine.", rows)


class Report:
    """Report of one run of a benchmark; ``document`` is its JSON, the input of the charts.

    ``text()`` leaves out empty tables. ``facts`` are figures measured once for the whole run.
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
        document = self.document
        named = [
            ", ".join(f"{k} {v}" for k, v in document[part].items())
            for part in ("machine", "config")
        ]
        facts = ", ".join(f"{k.replace('_', ' ')} {_cell(v)}" for k, v in document["facts"].items())
        head = "\n".join([f"$ {document['command']}", document["date"], *named, facts])
        shown = [table.text() for table in self._tables if table.printed and table.rows]
        return "\n\n".join([head, *shown])

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.document, indent=2, default=str) + "\n", encoding="utf-8")


def _machine(device: torch.device) -> dict[str, Any]:
    host = _cpu_name()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else host,
        "host": host,
        "cpus": os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": metadata.version("triton") if find_spec("triton") else None,
        "transformers": metadata.version("transformers"),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    match = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _cell(value: object) -> str:
    """Format a measured number with three digits, since more would not be significant."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    for least, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if value >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3g}"
