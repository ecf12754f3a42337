"""What the end of a run makes of what was reached."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.adapters.finding import load_target
from pytest_roseinfer.report import files
from pytest_roseinfer.report.verdict import verdict
from pytest_roseinfer.running import coverage

if TYPE_CHECKING:
    from pytest_roseinfer.running.coverage import Coverage
    from pytest_roseinfer.settings import Settings


def finish(session: pytest.Session, seen: Coverage, asked: Settings) -> dict[str, list[str]]:
    """Write every report; return why the run is no pass, line by line for each target."""
    if not (seen.targets or asked.named_targets or asked.reports):
        return {}
    problems = seen.problems(require_paths=asked.require_paths)
    passed = session.exitstatus == pytest.ExitCode.OK
    # A run that failed or was stopped may not have come to them.
    if passed and (unchecked := _unchecked(seen, asked)):
        problems[""] = unchecked
    found = verdict(seen, asked, problems, passed=passed and not problems)
    here = session.config.invocation_params.dir
    failures = [files.write(Path(here, name), found) for name in asked.reports]
    if unwritten := [failure for failure in failures if failure]:
        problems.setdefault("", []).extend(unwritten)
    files.add_junit_properties(session.config, seen)
    files.add_github_summary(seen, asked, problems)
    return problems


def _unchecked(seen: Coverage, asked: Settings) -> list[str]:
    """Targets the command line names that no test of this run touched."""
    return [
        f"--roseinfer-target {name}: no test of this run checked it. Those that do are run by "
        "pytest --pyargs pytest_roseinfer.suite"
        for name in asked.named_targets
        if coverage.name_of(load_target(name)) not in seen.targets
    ]
