"""Measured error rates of the paired comparison, on steps whose ratio is known.

``python -m tests.gates.experiment --runs 200 --slower 0 --log same.jsonl`` compares
a small decode step with itself 200 times; with ``--slower 5``, with one that does 5% more of the
same work. ``docs/lab/gates.md`` has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.paired_timing import Comparison, Plan, Verdict, compare
from pytest_roseinfer.gates.worker_process import Side, WorkerProcess, cpus_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ROUNDS_PER_MICROSECOND = 20
"""Rounds of the step's loop in a microsecond, approximately."""
_STEP = """
# A step of the kind that a host does: arithmetic on small numbers, a list, no library. Numbers
# that are stored are below 257, which Python never allocates: where the allocator puts others
# can make 2% more work take 6% more time.
ROUNDS = {rounds}


def decode():
    stored = [0] * 64

    def step():
        token = 0
        for at in range(ROUNDS):
            token = (token * 31 + stored[at & 63] + at) % 251
            stored[at & 63] = token

    return {{"step": step, "tokens": 1}}
"""


def side(folder: Path, label: str, rounds: int) -> Side:
    folder.mkdir()
    (folder / "decode_step.py").write_text(_STEP.format(rounds=rounds), encoding="utf-8")
    return Side(label, (os.path.realpath(folder),))


def comparisons(
    runs: int, percent: float, plan: Plan, microseconds: float = 500
) -> Iterator[Comparison]:
    """Compare a step ``runs`` times with one that does ``percent`` more work."""
    rounds = round(_ROUNDS_PER_MICROSECOND * microseconds)
    with tempfile.TemporaryDirectory() as folder:
        there = side(Path(folder, "there"), "there", rounds)
        here = side(Path(folder, "here"), "here", round(rounds * (1 + percent / 100)))

        def start(series: int) -> tuple[WorkerProcess, WorkerProcess]:
            cpus = cpus_for(series, 1)
            return (
                WorkerProcess(there, "decode_step:decode", cpus=cpus),
                WorkerProcess(here, "decode_step:decode", cpus=cpus),
            )

        for _ in range(runs):
            yield compare(plan, start)


def row(percent: float, records: Sequence[dict[str, Any]]) -> str:
    """Return the results of all comparisons as a row of the table in docs/lab/gates.md."""
    verdicts = Counter(record["verdict"] for record in records)
    cells = [
        f"{percent:g}%",
        len(records),
        *(verdicts[verdict.value] for verdict in Verdict),
        f"{median(record['ratio'] for record in records):.4f}",
        f"{median(len(record['ratios']) for record in records):g}",
        f"{median(record['seconds'] for record in records):.1f} s",
        f"{min(each['load'] for each in records):.1f} to "
        f"{max(each['load'] for each in records):.1f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def log_record(comparison: Comparison) -> dict[str, Any]:
    return {
        "verdict": comparison.verdict.value,
        "ratio": comparison.ratio,
        "interval": [comparison.interval.low, comparison.interval.high],
        "ratios": comparison.ratios,
        "seconds": comparison.seconds,
        "load": os.getloadavg()[0],
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="comparisons")
    parser.add_argument("--slower", type=float, default=0, metavar="PERCENT", help="more work")
    parser.add_argument(
        "--microseconds", type=float, default=500, help="approximate time of a step"
    )
    parser.add_argument(
        "--log",
        type=Path,
        required=True,
        help="file with a line of JSON for each comparison; the table covers all lines",
    )
    options = parser.parse_args(arguments)
    for comparison in comparisons(options.runs, options.slower, Plan(), options.microseconds):
        with options.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(log_record(comparison)) + "\n")
    records = [json.loads(line) for line in options.log.read_text(encoding="utf-8").splitlines()]
    print(f"| more work | runs | {' | '.join(record.value for record in Verdict)} | ", end="")
    print("ratio | series | time | load |")
    print(row(options.slower, records))


if __name__ == "__main__":
    main(sys.argv[1:])
