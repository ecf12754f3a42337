"""``python -m roseinfer.bench NAME`` runs a benchmark, prints its tables and keeps its JSON."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.bench import append_bench, attention_bench, charts, ladder, step_trace
from roseinfer.bench.command import run_command

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m roseinfer.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="NAME")
    for benchmark in (append_bench, attention_bench, ladder, step_trace):
        benchmark.add(commands)
    plot = commands.add_parser("plot", help="draw the chart of a report that --json wrote")
    plot.add_argument("report", type=Path)
    plot.add_argument("chart", type=Path, metavar="chart.png")
    plot.set_defaults(run=lambda args: charts.redraw(args.report, args.chart))
    return run_command(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
