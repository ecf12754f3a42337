"""The tripwire holds a step to the time that a file names for this GPU.

The time of one machine says nothing about another, and on a shared machine it says little. The
tripwire catches a step that became much slower while nobody compared it with another revision.
The file: ``{"format": 1, "steps": {test: {GPU: {"tpot_us": 682.0}}}}``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.baselines import read_steps, write_steps
from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.time.paired import Measuring

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_roseinfer.gates.time.paired import Plan, Timings
    from pytest_roseinfer.gates.time.progress import Progress
    from pytest_roseinfer.gates.time.worker_process import Worker

OPTION = "--roseinfer-tpot"
UPDATE = "--roseinfer-update-tpot"
TOLERATED = 0.10
"""GPUs of the same name differ by some percent."""
_PROCESSES = 3


def measure_alone(
    plan: Plan, start: Callable[[int], Worker], progress: Progress | None = None
) -> Timings:
    """Time the step of one side in a few processes, one after the other."""
    measuring = Measuring(replace(plan, series_per_process=1))
    for series in range(_PROCESSES):
        measuring.run([start(series)])
        if progress:
            progress.note(partial("{} of {} processes timed".format, series + 1, _PROCESSES))
    return measuring.sides[0]


def exceeded(timings: Timings, file: Path, test: str) -> str:
    """Say by how much the step exceeds its baseline; return "" if it does not."""
    device = timings.ready.device
    if not file.exists():
        raise CannotCompare(f"{OPTION}: {file} is not there; {UPDATE} writes it")
    known = read_steps(file).get(test, {})
    if device not in known:
        raise CannotCompare(
            f"{file} has no time of this step on {device}, it names "
            f"{', '.join(known) or 'no GPU'}. The time of another machine says nothing about this "
            f"one; {UPDATE} records one"
        )
    was, now = float(known[device]["tpot_us"]), _microseconds(timings)
    if now <= (1 + TOLERATED) * was:
        return ""
    return (
        f"a step on {device}: {now:.1f} us, baseline {was:.1f} us in {file}, which is "
        f"{now / was - 1:.0%} more; {TOLERATED:.0%} are tolerated. If that is meant, {UPDATE} "
        "makes it the baseline"
    )


def update(file: Path, test: str, timings: Timings) -> None:
    """Write one time; those of other tests and GPUs stay."""
    steps = read_steps(file)
    entry = {"tpot_us": round(_microseconds(timings), 1)}
    steps.setdefault(test, {})[timings.ready.device] = entry
    write_steps(file, steps)


def _microseconds(timings: Timings) -> float:
    return 1e6 * median(timings.series_tpot)
