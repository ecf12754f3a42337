"""The verdict in files: what ``--roseinfer-report`` names, JUnit, and a GitHub summary."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pytest_roseinfer.report.html import page
from pytest_roseinfer.report.terminal import searched, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
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


def in_markdown(
    seen: Coverage, asked: Settings, problems: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """The tables as a step of a GitHub workflow shows them."""
    for name, target in seen.targets.items():
        yield from (f"### roseinfer: `{name}`", "", searched(target, asked), "")
        if target.checked:
            yield from (f"checked: {target.checks}", "")
        yield from (table(target.rows(), "github"), "")
        yield from (f"- **failed**: {problem}" for problem in problems.get(name, ()))
        yield ""
    if seen.targets:
        yield from (f"- **failed**: {problem}" for problem in problems.get("", ()))
