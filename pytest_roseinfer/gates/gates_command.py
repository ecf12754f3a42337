"""Command ``roseinfer gates``: history and report of recorded gate results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

HELP = "show the gate results that pytest runs recorded, over time"
DESCRIPTION = (
    "Show the times and the work of decode steps that pytest runs recorded with "
    "--roseinfer-timings FOLDER."
)
_USAGE_ERROR = 4
"""Exit code of pytest for a usage error."""


def add_options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="history|report", required=True)
    for name, words in (
        ("history", "draw FOLDER/history.svg, and list the commits at which a figure changed"),
        ("report", "print the newest run as Markdown, for a pull request"),
    ):
        kind = kinds.add_parser(name, help=words, description=words)
        kind.add_argument("folder", type=Path, metavar="FOLDER", help="see --roseinfer-timings")


def run(args: argparse.Namespace) -> int:
    from pytest_roseinfer.gates.gate import CannotCompare

    try:
        print(_report(args.folder) if args.kind == "report" else _history(args.folder))
    except CannotCompare as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return 0


def _report(folder: Path) -> str:
    from pytest_roseinfer.gates.history import in_markdown, read_runs

    return in_markdown(read_runs(folder))


def _history(folder: Path) -> str:
    from pytest_roseinfer.gates.history import History, read_runs

    runs = read_runs(folder)
    history = History.of(runs)
    lines = [f"runs: {len(runs)}, figures: {len(history.trends)}"]
    if history.charted_trends:
        chart = folder / "history.svg"
        chart.write_text(history.chart(), encoding="utf-8")
        lines[0] += f", drawn: {len(history.charted_trends)}, in {chart}"
    return "\n".join(
        [*lines, *(map(str, history.changes) if history.changes else ["no figure changed"])]
    )
