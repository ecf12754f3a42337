"""What a run found, as plain data: the JSON file holds it and the HTML file shows it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypedDict

from pytest_roseinfer.environment import (
    describe_device,
    distribution_of,
    variables,
    versions,
)
from pytest_roseinfer.report.strength import how_strong

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.findings.found import Found
    from pytest_roseinfer.running.coverage import Coverage, TargetCoverage
    from pytest_roseinfer.settings import Settings

FORMAT = 2
"""This number rises when a field changes its meaning."""
NOT_SEARCHED = "its histories were not searched in this run, so its paths are not judged"


class Target(TypedDict):
    name: str
    distribution: str
    kind: str
    """``cache`` or ``engine``."""
    histories: int
    seconds: float
    """The time that its searches took, added up over workers."""
    compiled: int
    """The kernels that had to be compiled for it."""
    searched: bool
    failed: bool
    examples: int
    """How many examples its searches were to try."""
    left_out: int
    """How many of them were left out, since the time was over."""
    cut_short: str
    """The same in words; empty where none was left out."""
    largest: dict[str, int]
    """The most rows of a batch, tokens of a sequence and, of a cache, blocks of a table."""
    large_cut_short: int
    """How many of the large histories or mixes ended early, since their time was over."""
    problems: list[str]
    warnings: list[str]
    """What was reached too rarely, where that may be luck."""
    tested: dict[str, int]
    """How often each method was called."""
    not_offered: list[str]
    checked: dict[str, int]
    """How often each invariant was checked."""
    rows: list[dict[str, Any]]
    """The fields of ``Reached`` for each declared path and condition."""
    times: dict[str, int]
    """How often each path ran, slow ones included."""
    together: dict[str, dict[str, int]]
    """For each path, in how many steps that took it each condition was met."""


class Verdict(TypedDict):
    format: int
    passed: bool
    problems: list[str]
    device: str
    server: dict[str, str]
    """The ``url`` and the ``model`` that were asked; empty where no server was tested."""
    profile: str
    examples: int
    steps: int
    seed: int | None
    required_paths: bool
    strength: str
    """How much such a search is known to find."""
    versions: dict[str, str]
    environment: dict[str, str]
    findings: list[Found]
    targets: list[Target]


def verdict(
    seen: Coverage, asked: Settings, problems: Mapping[str, Sequence[str]], *, passed: bool
) -> Verdict:
    """``problems`` holds lines for each target; those of the run have an empty name."""
    server = asked.endpoint
    return {
        "format": FORMAT,
        "passed": passed,
        "problems": list(problems.get("", ())),
        "device": describe_device(asked),
        "server": {"url": server.url, "model": server.model} if server else {},
        "profile": asked.profile,
        "examples": asked.examples,
        "steps": asked.steps,
        "seed": asked.seed,
        "required_paths": asked.require_paths,
        "strength": how_strong(
            asked, cut_short=any(target.cut_short for target in seen.targets.values())
        ),
        "versions": versions(),
        "environment": variables(),
        "findings": [found for target in seen.targets.values() for found in target.found],
        "targets": [
            _target(name, target, problems.get(name, ())) for name, target in seen.targets.items()
        ],
    }


def _target(name: str, target: TargetCoverage, problems: Sequence[str]) -> Target:
    paths = [*target.paths, *target.twins]
    return {
        "name": name,
        "distribution": distribution_of(name),
        "kind": target.kind,
        "histories": target.histories,
        "seconds": round(target.seconds, 2),
        "compiled": target.compiled,
        "searched": target.searched,
        "failed": target.failed,
        "examples": target.examples,
        "left_out": target.left_out,
        "cut_short": target.cut_short,
        "largest": dict(target.largest),
        "large_cut_short": target.large_cut_short,
        "problems": list(problems),
        "warnings": target.warnings(),
        "tested": target.abilities,
        "not_offered": target.not_offered,
        "checked": dict(target.checked),
        "rows": [asdict(row) for row in target.rows()],
        "times": {path: target.counts[path] for path in paths},
        "together": {
            path: {name: target.together[path][name] for name in target.conditions}
            for path in paths
        },
    }
