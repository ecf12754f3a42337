"""Which declared paths and conditions were reached, and what that means for the run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_roseinfer.adapter import KVCacheAdapter

REQUIRED_TIMES = 3
"""How often a path or condition must be reached: once may be luck, and says little."""


@dataclass(frozen=True, slots=True)
class Reached:
    """One row of the verdict."""

    target: str
    kind: str
    name: str
    twin: str
    times: int

    @property
    def enough(self) -> bool:
        return self.times >= REQUIRED_TIMES


@dataclass(slots=True)
class TargetCoverage:
    """What one target declared, and what happened."""

    paths: dict[str, str]
    conditions: list[str]
    tested: list[str] = field(default_factory=list)
    not_offered: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    histories: int = 0
    failed: bool = False
    """Whether a search found a difference."""

    def rows(self, target: str) -> list[Reached]:
        paths = [
            Reached(target, "path", name, twin, self.counts[name])
            for name, twin in self.paths.items()
        ]
        conditions = [
            Reached(target, "condition", name, "", self.counts[name]) for name in self.conditions
        ]
        return paths + conditions


class Coverage:
    """All targets of a run. Workers of pytest-xdist each have one; they add up."""

    def __init__(self) -> None:
        self.targets: dict[str, TargetCoverage] = {}

    def of(self, adapter: type[KVCacheAdapter]) -> TargetCoverage:
        from pytest_roseinfer.adapter import OPTIONAL, abilities

        name = f"{adapter.__module__}:{adapter.__qualname__}"
        if name not in self.targets:
            can = abilities(adapter)
            self.targets[name] = TargetCoverage(
                dict(adapter.paths),
                list(adapter.conditions),
                [ability for ability in OPTIONAL if ability in can],
                [ability for ability in OPTIONAL if ability not in can],
            )
        return self.targets[name]

    def rows(self) -> list[Reached]:
        return [row for name, target in self.targets.items() for row in target.rows(name)]

    def missing(self) -> list[Reached]:
        return [row for row in self.rows() if not row.enough]

    def to_json(self) -> dict[str, Any]:
        return {
            name: {
                "paths": target.paths,
                "conditions": target.conditions,
                "tested": target.tested,
                "not_offered": target.not_offered,
                "counts": dict(target.counts),
                "histories": target.histories,
                "failed": target.failed,
            }
            for name, target in self.targets.items()
        }

    def add(self, data: Mapping[str, Any]) -> None:
        """Add what another process saw."""
        for name, seen in data.items():
            if name not in self.targets:
                self.targets[name] = TargetCoverage(
                    seen["paths"], seen["conditions"], seen["tested"], seen["not_offered"]
                )
            self.targets[name].counts.update(seen["counts"])
            self.targets[name].histories += seen["histories"]
            self.targets[name].failed |= seen["failed"]


_current = Coverage()


def current() -> Coverage:
    """What this process has seen so far."""
    return _current


def reset() -> Coverage:
    """Start a run with nothing seen."""
    global _current
    _current = Coverage()
    return _current
