"""Running a step as often as it takes to count all it does."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.work.python_calls import count_python_calls
from pytest_roseinfer.gates.work.step_work import GROUPS, CannotCompare, StepWork
from pytest_roseinfer.gates.work.tensor_work import TensorWork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pytest_roseinfer.gates.work.own_code import OwnCode

_WARM_UP = 2
"""Steps that may still build what later ones find."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that can be done again and again."""

    run: Callable[[], object]
    tokens: int
    before: Callable[[], object] | None = None
    """Brings about, ahead of every step, what that step is about."""
    counters: Callable[[], Mapping[str, int]] | None = None
    """The code counts these itself: numbers that only ever rise."""


def measure_work(step: Step, own: OwnCode, device: str) -> StepWork:
    """The work of one step, the same in two of them."""
    for _ in range(_WARM_UP):
        _prepare(step)
        step.run()
    first, second = (_count(step, own, device) for _ in range(2))
    if differing := first.differing(second):
        raise CannotCompare(
            "two steps did not do the same, so no baseline says how much a step does:\n  "
            + "\n  ".join(differing)
        )
    if not first.groups["python_calls"]:
        raise CannotCompare(
            f"the step made no call of {', '.join(sorted(own.packages)) or 'code of your own'}: "
            "packages=[...] of the marker roseinfer_costs says whose calls count"
        )
    return first


def _count(step: Step, own: OwnCode, device: str) -> StepWork:
    """Calls in one step and tensors in another, so that neither counts the other's counting."""
    with _no_garbage_collected():
        _prepare(step)
        found = count_python_calls(step.run, own)
        _prepare(step)
        tensors = TensorWork(device)
        before = _own_counts(step)
        tensors.count(step.run)
        after = _own_counts(step)
    for group, counts in tensors.counts.items():
        found[group].update(counts)
    found["counters"] = Counter({name: times - before[name] for name, times in after.items()})
    return StepWork(step.tokens, {group: dict(found[group]) for group in GROUPS})


def _prepare(step: Step) -> None:
    if step.before:
        step.before()


def _own_counts(step: Step) -> Counter[str]:
    """Read the counters of the code under test, with names as text."""
    counts = step.counters() if step.counters else {}
    return Counter({str(name): times for name, times in counts.items()})


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """When garbage is collected depends on all that ran before, and finalisers are calls."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
