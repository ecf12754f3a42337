"""The tripwire: a step's time on GPUs that a file names, and on no other machine.

A time without a machine says nothing, and that of a shared machine hardly more. What is caught
is a step that became much slower while nobody compared it with what was there before.

The file: ``{"format": 1, "steps": {test: {GPU: {"tpot_us": 682.0}}}}``.
"""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.time.paired import Timings, measure_turns, steps_of_a_turn
from pytest_roseinfer.gates.time.worker_process import CannotMeasure

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_roseinfer.gates.time.paired import Plan
    from pytest_roseinfer.gates.time.worker_process import Worker

OPTION = "--roseinfer-tpot"
UPDATE = "--roseinfer-update-tpot"
TOLERATED = 0.10
"""A step may exceed its baseline by so much: GPUs of one name differ by some percent."""
_PROCESSES = 3
_FORMAT = 1


def measure_alone(plan: Plan, start: Callable[[int], Worker]) -> Timings:
    """One side's step, in a few processes one after the other."""
    timings: Timings | None = None
    for series in range(_PROCESSES):
        worker = start(series)
        try:
            timings = timings or Timings(worker.ready)
            steps = steps_of_a_turn(plan, [worker])
            worker.seconds(2 * steps)
            measure_turns(plan, steps, [(worker, timings)])
        finally:
            worker.stop()
    assert timings
    return timings


def exceeded(timings: Timings, file: Path, test: str) -> str:
    """Say by how much the step exceeds its baseline; empty if it does not."""
    was = baseline(read(file), file, test, timings.ready.device)
    now = 1e6 * median(timings.series_tpot)
    if now <= (1 + TOLERATED) * was:
        return ""
    return (
        f"TPOT on {timings.ready.device}: {now:.1f} us, baseline {was:.1f} us in {file}, which is "
        f"{now / was - 1:.0%} more; {TOLERATED:.0%} are tolerated. If that is meant, {UPDATE} "
        "makes it the baseline"
    )


def baseline(document: dict[str, Any], file: Path, test: str, device: str) -> float:
    """Microseconds of a step of this test on this GPU."""
    known = document["steps"].get(test, {})
    if device not in known:
        named = ", ".join(known) or "no GPU"
        raise CannotMeasure(
            f"{file} has no time of this step on {device}, it names {named}. A time of another "
            f"machine is none of this one; {UPDATE} records one"
        )
    return float(known[device]["tpot_us"])


def read(file: Path) -> dict[str, Any]:
    """An empty document where there is no file yet."""
    if not file.exists():
        return {"format": _FORMAT, "steps": {}}
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        understood = document["format"] == _FORMAT and isinstance(document["steps"], dict)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CannotMeasure(f"{OPTION} {file} is no file of baselines: {error!r}") from error
    if not understood:
        raise CannotMeasure(f"{OPTION} {file} has the format of another version")
    return document


def update(file: Path, test: str, timings: Timings) -> None:
    """Write one time; those of other tests and GPUs stay."""
    document = read(file)
    entry = {"tpot_us": round(1e6 * median(timings.series_tpot), 1)}
    document["steps"].setdefault(test, {})[timings.ready.device] = entry
    file.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")
