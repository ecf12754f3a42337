"""What is timed of an append: writes, whole steps, plans and copies, each on one path only."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, TypeVar

from roseinfer.bench.timing import WrongPath, time_calls
from roseinfer.kv.paths import Path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roseinfer.bench.appends.append_rig import Rig
    from roseinfer.kv.paths import PathCounts
    from roseinfer.kv.plan import AppendPlan

Measured = TypeVar("Measured")
_WRITES_PER_SERIES = 150
"""Writes between two synchronizations: more could fill the GPU's queue of launches."""


@contextmanager
def only(counts: PathCounts, path: Path, times: int) -> Iterator[None]:
    """Raise unless exactly ``path`` moves data in here, ``times`` times."""
    before = Counter(counts)
    yield
    grown = Counter(counts) - before
    ran = {key.value: count for key, count in grown.items() if isinstance(key, Path)}
    if ran != ({path.value: times} if times else {}):
        raise WrongPath(
            f"{path.value} was to run {times} times, and what ran is {ran or 'nothing'}: "
            "the policy that the benchmark sets for this path no longer leads to it"
        )


@dataclass(frozen=True, slots=True)
class Work:
    """A call that makes sequences longer, and what it must be counted as."""

    rig: Rig
    path: Path
    call: Callable[[], object]
    counted: int
    """A call counts ``path`` so many times."""
    repeatable: bool = False
    """A call stores nothing new, so a series of them needs no fresh blocks."""

    def series(
        self,
        measure: Callable[[Callable[[], object], int, Callable[[], None]], Measured],
        calls: int,
    ) -> Measured:
        if not self.repeatable:
            self.rig.restart(self.path)
        with only(self.rig.kv.path_counts, self.path, self.counted * calls):
            return measure(self.call, calls, self.rig.sync)

    def sampler(self, *, wait: bool) -> Callable[[], float]:
        """Return a function that times a series which one block has room for."""
        calls = max(1, _WRITES_PER_SERIES // self.counted)
        if not self.repeatable:
            calls = min(calls, self.rig.config.block_size - 1)
        return partial(self.series, partial(time_calls, wait=wait), calls)


def per_token(rig: Rig, layers_per_call: int) -> Work:
    layers = cycle(
        [
            [(layer, *row) for row in zip(rig.groups[layer], key, value, strict=True)]
            for layer, key, value in rig.tokens
        ]
    )

    def call() -> None:
        for _ in range(layers_per_call):
            for row in next(layers):
                rig.kv.append_token(*row)

    return Work(rig, Path.PER_TOKEN, call, rig.batch * layers_per_call)


def layer_write(rig: Rig, path: Path) -> Work:
    """Return writes of one plan, again and again, to one layer after another.

    Layers take turns as in a step, so that no write finds its tokens and slots where the one
    before it left them. All layers together may still fit a large GPU's L2 cache.
    """
    rig.restart(path)
    plan, layers = rig.plan(), cycle(rig.tokens)
    return Work(rig, path, lambda: rig.kv.write(plan, *next(layers)), 1, repeatable=True)


def per_layer_step(rig: Rig, path: Path) -> Work:
    def call() -> None:
        for layer, key, value in rig.tokens:
            rig.kv.append_token_batch(layer, rig.groups[layer], key, value)

    return Work(rig, path, call, rig.config.layers)


def grouped_step(rig: Rig, path: Path) -> Work:
    def call() -> None:
        plan = rig.plan()
        for layer, key, value in rig.tokens:
            rig.kv.write(plan, layer, key, value)

    return Work(rig, path, call, rig.config.layers)


def plan_us(rig: Rig, path: Path, steps: int) -> float:
    """Time planning on the host, staging included; a write afterwards shows where plans lead."""
    rig.restart(path)
    latest: deque[AppendPlan] = deque(maxlen=1)
    with only(rig.kv.path_counts, path, 0):
        microseconds = time_calls(lambda: latest.append(rig.plan()), steps, rig.sync)
    with only(rig.kv.path_counts, path, 1):
        rig.kv.write(latest[0], *rig.tokens[0])
    return microseconds


def clone_us(rig: Rig, path: Path, steps: int) -> float:
    """Time planning, on the host, a step in which every sequence has to copy its block."""
    rig.restart(path)
    total = 0.0
    with only(rig.kv.path_counts, path, steps):
        for _ in range(steps):
            rig.share()
            total += time_calls(rig.plan, 1, rig.sync)
    return total / steps


def clone_work(rig: Rig, path: Path) -> Work:
    """Return the same work for the device, whose time does not include the sharing."""

    def call() -> None:
        rig.share()
        rig.plan()

    return Work(rig, path, call, 1)
