"""The verdict in files: what ``--roseinfer-report`` names, JUnit, and a GitHub summary."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pytest_roseinfer.report.github_summary import add_to_github_summary
from pytest_roseinfer.report.html import page
from pytest_roseinfer.report.terminal import searched, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import pytest

    from pytest_roseinfer.report.verdict import Verdict
    from pytest_roseinfer.running.coverage import Coverage
    from pytest_roseinfer.settings import Settings


def write(file: Path, verdict: Verdict) -> str:
    """One report, in the format its suffix names; returns why it could not be written."""
    text = page(verdict) if file.suffix == ".html" else json.dumps(verdict, indent=1) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"--roseinfer-report {file}: {error.strerror}"
    return ""


def add_junit_properties(config: pytest.Config, seen: Coverage) -> None:
    """Add ``roseinfer.<target>.<path>`` to the file of ``--junitxml``, if there is one."""
    from _pytest.junitxml import xml_key  # its public face is a fixture, and no test runs here

    if (xml := config.stash.get(xml_key, None)) is None:
        return
    for name, target in seen.targets.items():
        for row in target.rows():
            xml.add_global_property(f"roseinfer.{name}.{row.name}", str(row.times))


def add_github_summary(
    seen: Coverage, asked: Settings, problems: Mapping[str, Sequence[str]]
) -> None:
    """Append the tables to what a step of a GitHub workflow shows."""
    if not seen.targets:
        return
    lines: list[str] = []
    for name, target in seen.targets.items():
        lines += [f"### roseinfer: `{name}`", "", searched(target, asked), ""]
        lines += [f"checked: {target.checks}", ""] if target.checked else []
        lines += [table(target.rows(), "github"), ""]
        lines += [f"- **failed**: {problem}" for problem in problems.get(name, ())]
        lines.append("")
    lines += [f"- **failed**: {problem}" for problem in problems.get("", ())]
    add_to_github_summary(lines)
