"""The verdict in files: those of ``--roseinfer-report``, and that of ``--junitxml``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pytest_roseinfer.report.html import page

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from pytest_roseinfer.report.verdict import Verdict
    from pytest_roseinfer.running.coverage import Coverage


def write(file: Path, verdict: Verdict) -> str:
    """Write a report in the format its suffix names; return why that failed, if so."""
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
