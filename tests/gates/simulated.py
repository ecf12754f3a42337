"""Simulated workers whose step times are given: with noise of several kinds, or without."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.paired_timing import Plan
from pytest_roseinfer.gates.paired_timing import compare as compare_sides
from pytest_roseinfer.gates.worker_process import Ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_roseinfer.gates.paired_timing import Comparison

READY = Ready(tokens=4, floor_seconds=None, own_modules=("engine",), device="cpu", versions={})


@dataclass
class Machine:
    """The machine of both sides: its noise for each turn, process and interruption."""

    seed: int
    process_noise: float = 0.01
    turn_noise: float = 0.02
    interruptions: float = 0.05
    """Probability that another program shares the CPU during a turn."""
    drift: float = 0.0
    """Relative slowdown of the machine with every turn."""
    random: random.Random = field(init=False)
    turns: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def speed(self) -> float:
        self.turns += 1
        noise = self.random.gauss(1, self.turn_noise) * (1 + self.drift) ** self.turns
        return noise * (1.8 if self.random.random() < self.interruptions else 1)


def quiet(drift: float = 0.0) -> Machine:
    """Return a machine without noise, except for its drift."""
    return Machine(seed=1, process_noise=0.0, turn_noise=0.0, drift=drift, interruptions=0.0)


@dataclass
class SimulatedWorker:
    machine: Machine
    step_seconds: float
    ready: Ready = READY
    stopped: bool = False

    def __post_init__(self) -> None:
        self.process_factor = self.machine.random.gauss(1, self.machine.process_noise)

    def seconds(self, steps: int) -> list[float]:
        assert not self.stopped
        return [self.step_seconds * self.process_factor * self.machine.speed()] * steps

    def path_counts(self) -> dict[str, int]:
        return {}

    def stop(self) -> None:
        self.stopped = True


def compare(
    machine: Machine,
    slower: float,
    plan: Plan | None = None,
    doubt: Callable[[], str] = str,
    clock: Callable[[], float] = lambda: 0.0,
) -> Comparison:
    """Compare a step with one that takes ``slower`` times as long."""
    return compare_sides(plan or Plan(), pairs_of(machine, slower), doubt, clock)


def pairs_of(
    machine: Machine, slower: float
) -> Callable[[int], tuple[SimulatedWorker, SimulatedWorker]]:
    """Return a function that starts the workers of such a comparison."""
    return lambda _: (SimulatedWorker(machine, 1e-3), SimulatedWorker(machine, 1e-3 * slower))
