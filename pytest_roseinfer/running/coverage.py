"""Which declared paths and conditions were reached, and what that means for the run."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_roseinfer.adapters.base import Adapter

REQUIRED_TIMES = 3
"""How often a path or condition must be reached: once may be luck, and says little."""

_TURNS_AGAIN = 5


@dataclass(frozen=True, slots=True)
class Reached:
    """One row of the verdict."""

    kind: str
    name: str
    must_equal: str
    times: int
    verdict: str


@dataclass(slots=True)
class TargetCoverage:
    """What one target declared, and what happened."""

    paths: dict[str, str]
    """Each with the slow twin it must equal."""
    conditions: list[str]
    tested: list[str] = field(default_factory=list)
    not_offered: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    together: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """For every path, in how many of the steps that took it each condition was met."""
    checked: Counter[str] = field(default_factory=Counter)
    """How often each invariant was checked."""
    histories: int = 0
    searched: bool = False
    """The run began to search this target's histories, which is what reaches paths."""
    failed: bool = False
    """A search found a difference, and stopped there."""

    def note(self, ran: Mapping[str, int]) -> None:
        """Add the paths that ran and the conditions that were met in one step."""
        self.counts.update(ran)
        met = [name for name in self.conditions if ran.get(name)]
        for name in (*self.paths, *self.twins):
            if ran.get(name):
                self.together[name].update(met)

    @property
    def twins(self) -> list[str]:
        """The slow paths that others must equal."""
        return [name for name in dict.fromkeys(self.paths.values()) if name not in self.paths]

    @property
    def checks(self) -> str:
        """How often each invariant was checked, in words; none of an engine."""
        return ", ".join(f"{name} {times}" for name, times in self.checked.items())

    def rows(self) -> list[Reached]:
        paths = [self._row("path", name, twin) for name, twin in self.paths.items()]
        return paths + [self._row("condition", name, "") for name in self.conditions]

    def still_missing(self, since: Mapping[str, int]) -> list[str | None]:
        """What a search is to aim at again, given what was counted before it: paths by name,
        and None where conditions are met too rarely."""
        if not settings.current().require_paths:
            return []
        missing: list[str | None] = [name for name in self.paths if self._short(name, since)]
        return missing + [None] * any(self._short(name, since) for name in self.conditions)

    def _short(self, name: str, since: Mapping[str, int]) -> bool:
        return self.counts[name] - since.get(name, 0) < REQUIRED_TIMES

    def _row(self, kind: str, name: str, twin: str) -> Reached:
        times = self.counts[name]
        if self.failed:
            verdict = "see failures"
        elif not self.searched:
            verdict = "not searched"
        elif times < REQUIRED_TIMES:
            verdict = "NOT REACHED"
        else:
            verdict = "equal" if kind == "path" else "met"
        return Reached(kind, name, twin, times, verdict)

    def problems(self, *, require_paths: bool) -> list[str]:
        """Why a run without failed tests is no pass: what it set out to check and did not."""
        if self.failed or not self.searched:
            return []
        if not self.histories:
            return ["its search ran no history: a check that did not run is no pass"]
        return [
            f"{row.kind} {row.name!r} was {_times(row.times)} and must be {REQUIRED_TIMES} times: "
            "a check that did not run is no pass"
            for row in self.rows()
            if require_paths and row.verdict == "NOT REACHED"
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "paths": self.paths,
            "conditions": self.conditions,
            "tested": self.tested,
            "not_offered": self.not_offered,
            "counts": dict(self.counts),
            "together": {name: dict(met) for name, met in self.together.items()},
            "checked": dict(self.checked),
            "histories": self.histories,
            "searched": self.searched,
            "failed": self.failed,
        }

    def add(self, seen: Mapping[str, Any]) -> None:
        """Add what another process saw of the same target."""
        self.counts.update(seen["counts"])
        for name, met in seen["together"].items():
            self.together[name].update(met)
        self.checked.update(seen["checked"])
        self.histories += seen["histories"]
        self.searched |= seen["searched"]
        self.failed |= seen["failed"]


class Coverage:
    """All targets of a run. Workers of pytest-xdist each have one; they add up."""

    def __init__(self) -> None:
        self._targets: dict[str, TargetCoverage] = {}

    @property
    def targets(self) -> dict[str, TargetCoverage]:
        """By name, in an order that does not depend on which worker came first."""
        return dict(sorted(self._targets.items()))

    def of(self, adapter: type[Adapter]) -> TargetCoverage:
        name = name_of(adapter)
        if name not in self._targets:
            offered, device = adapter.abilities, settings.current().device
            self._targets[name] = TargetCoverage(
                {name: path.equals for name, path in adapter.paths.items() if path.runs_on(device)},
                list(adapter.conditions),
                [*adapter.required, *(each for each in adapter.optional if each in offered)],
                [each for each in adapter.optional if each not in offered],
            )
        return self._targets[name]

    def problems(self, *, require_paths: bool) -> dict[str, list[str]]:
        found = {
            name: target.problems(require_paths=require_paths)
            for name, target in self.targets.items()
        }
        return {name: lines for name, lines in found.items() if lines}

    def to_json(self) -> dict[str, Any]:
        return {name: target.to_json() for name, target in self.targets.items()}

    def add(self, data: Mapping[str, Any]) -> None:
        """Add what another process saw."""
        for name, seen in data.items():
            if name not in self._targets:
                self._targets[name] = TargetCoverage(
                    seen["paths"], seen["conditions"], seen["tested"], seen["not_offered"]
                )
            self._targets[name].add(seen)


_current = Coverage()


def current() -> Coverage:
    """What this process has seen so far."""
    return _current


def set_current(coverage: Coverage) -> None:
    global _current
    _current = coverage


def name_of(adapter: type[Adapter]) -> str:
    """``package.module:Class``."""
    return f"{adapter.__module__}:{adapter.__qualname__}"


def in_turns(
    paths: Iterable[str], examples: int, of_a_turn: int
) -> Iterator[tuple[str | None, str, int]]:
    """Searches as (path to aim at, name of the turn, examples due).

    In turns: a bug on the last path is not found only after all the others' examples. Without
    paths there is nothing to aim at, and None stands for that.
    """
    aims: list[str | None] = [*paths] or [None]
    turns = max(1, round(examples / len(aims) / of_a_turn))
    searches = list(product(range(turns), aims))
    for at, (turn, aim) in enumerate(searches):
        due = (at + 1) * examples // len(searches) - at * examples // len(searches)
        yield aim, str(turn), max(1, due)


def turns_again(
    still_missing: Callable[[], Iterable[str | None]], of_a_turn: int
) -> Iterator[tuple[str | None, str, int]]:
    """Searches that follow those, aimed at what is still missing until nothing is.

    Bad luck with the examples is no verdict. What so many more do not reach, none will.
    """
    for turn in range(_TURNS_AGAIN):
        for aim in still_missing():
            yield aim, f"again {turn}", of_a_turn


def _times(count: int) -> str:
    return "never reached" if not count else f"reached {count} time{'s' * (count > 1)}"
