"""The verdict as tables in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_roseinfer.gates.gate import show_problems
from pytest_roseinfer.plugin.environment import describe_device, described

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

    from pytest_roseinfer.running.coverage import Coverage, Reached, TargetCoverage
    from pytest_roseinfer.settings import Settings


def show(
    reporter: pytest.TerminalReporter,
    seen: Coverage,
    asked: Settings,
    problems: Mapping[str, Sequence[str]],
) -> None:
    for name, target in seen.targets.items():
        reporter.section(f"roseinfer: {described(name)}")
        reporter.line(searched(target, asked))
        reporter.line(f"tested: {', '.join(target.tested)}")
        if target.not_offered:
            reporter.line(f"not offered: {', '.join(target.not_offered)}")
        if target.checked:
            reporter.line(f"checked: {target.checks}")
        if rows := target.rows():
            reporter.line(table(rows, "simple"))
        show_problems(reporter, problems.get(name, ()))
    if problems.get(""):
        reporter.section("roseinfer")
        show_problems(reporter, problems[""])


def searched(target: TargetCoverage, asked: Settings) -> str:
    """How hard this run looked at a target."""
    if not target.searched:
        return "its histories were not searched in this run, so its paths are not judged"
    return (
        f"{target.histories} histories of up to {asked.steps} steps on {describe_device(asked)}, "
        f"profile {asked.profile}, seed {asked.seed}"
    )


def table(rows: Sequence[Reached], style: str) -> str:
    return tabulate(
        [(row.kind, row.name, row.twin, row.times, row.verdict) for row in rows],
        headers=("", "name", "must equal", "times reached", "verdict"),
        tablefmt=style,
    )
