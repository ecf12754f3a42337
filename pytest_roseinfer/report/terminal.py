"""The verdict as tables in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tabulate import tabulate

if TYPE_CHECKING:
    import pytest

    from pytest_roseinfer.coverage import Coverage, Reached, TargetCoverage
    from pytest_roseinfer.settings import Settings


def show(reporter: pytest.TerminalReporter, seen: Coverage, asked: Settings) -> None:
    for name, target in seen.targets.items():
        reporter.section(f"roseinfer: {name}")
        reporter.line(
            f"{target.histories} histories on {asked.device}, profile {asked.profile}; tested: "
            f"make, append, peek, {', '.join(target.tested) or 'nothing else'}"
        )
        if target.not_offered:
            reporter.line(f"not offered: {', '.join(target.not_offered)}")
        rows = target.rows(name)
        if rows:
            reporter.line(table(rows, target))
        for row in rows:
            if not row.enough and asked.require_paths:
                reporter.line(
                    f"FAILED: {row.kind} {row.name!r} was reached {row.times} times: a check that "
                    "did not run is no pass",
                    red=True,
                )


def table(rows: list[Reached], target: TargetCoverage) -> str:
    return tabulate(
        [(row.kind, row.name, row.twin, row.times, _verdict(row, target)) for row in rows],
        headers=("", "name", "must equal", "times reached", "verdict"),
        tablefmt="simple",
    )


def _verdict(row: Reached, target: TargetCoverage) -> str:
    if not row.enough:
        return "NOT REACHED"
    if target.failed:
        return "see failures"
    return "equal" if row.kind == "path" else "met"
