"""Running a step as often as it takes to count everything it does."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.work.python_calls import count_python_calls
from pytest_roseinfer.gates.work.step_work import GROUPS, StepWork, changed_counts
from pytest_roseinfer.gates.work.tensor_work import TensorWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_roseinfer.gates.work.python_calls import OwnCode

_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Step:
    """A step that can be repeated."""

    run: Callable[[], object]
    tokens: int
    before: Callable[[], object] | None = None
    """This runs ahead of every step and sets up what the step is about."""
    counters: Callable[[], Mapping[str, int]] | None = None
    """This returns what the code counts itself: numbers that only ever rise."""

    def prepare(self) -> None:
        if self.before:
            self.before()

    def own_counts(self) -> Counter[str]:
        counts = self.counters() if self.counters else {}
        return Counter({str(name): times for name, times in counts.items()})


def measure_work(step: Step, own: OwnCode, device: str) -> StepWork:
    """Return the work of one step, which must be the same in the next."""
    warm_up(step, _WARM_UP)
    first, second = (_count(step, own, device) for _ in range(2))
    refuse_differences(first, second)
    if not first.groups["python_calls"]:
        raise CannotCompare(
            f"the step made no call of {', '.join(sorted(own.packages)) or 'code of your own'}: "
            "packages=[...] of the marker roseinfer_costs says whose calls count"
        )
    if sum(sum(counts.values()) for counts in first.groups.values()) == 1:
        raise CannotCompare(
            "the step was called, and did nothing else that is counted: is it the right function? "
            "What it does in plain Python, roseinfer_tpot times"
        )
    return first


def warm_up(step: Step, times: int) -> None:
    """Run the first steps, which may still build what later ones use."""
    for _ in range(times):
        step.prepare()
        step.run()


def refuse_differences(first: StepWork, second: StepWork) -> None:
    """Raise if two steps in a row did not do the same work."""
    if differing := [
        f"{group.title}, {what}: {one} and {other}"
        for name, group in GROUPS.items()
        for what, one, other in changed_counts(first.groups[name], second.groups[name])
    ]:
        lines = [*differing, "before= has to bring each step to the same contexts"]
        raise CannotCompare(
            "two steps did not do the same, so no baseline says how much a step does:\n  "
            + "\n  ".join(lines)
        )


def _count(step: Step, own: OwnCode, device: str) -> StepWork:
    """Count calls in one step and tensors in another, so that neither counts the other's work."""
    with _no_garbage_collected():
        step.prepare()
        found = count_python_calls(step.run, own)
        step.prepare()
        tensors = TensorWork(device)
        before = step.own_counts()
        tensors.count(step.run)
        after = step.own_counts()
    for group, counts in tensors.counts.items():
        found[group].update(counts)
    found["counters"] = Counter({name: times - before[name] for name, times in after.items()})
    return StepWork(step.tokens, {group: dict(found[group]) for group in GROUPS})


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Keep garbage collection out of the counts: its time is random, and finalisers are calls."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
