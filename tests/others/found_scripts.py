"""The scripts of docs/found.md and what they print, by the project that they are about."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "found.md"


def scripts_about(project: str) -> list[tuple[str, str]]:
    """Return each script below the heading that begins with ``project``, and its output."""
    found = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", _section(project), re.DOTALL)
    if not found:
        raise LookupError(f"{PAGE} has no scripts about {project}")
    return found


def beginning_about(project: str) -> str:
    """Return what all scripts about a project begin with, which is fenced as ``python begin``."""
    found = re.search(r"```python begin\n(.*?)```", _section(project), re.DOTALL)
    if not found:
        raise LookupError(f"{PAGE} has nothing that scripts about {project} begin with")
    return found[1]


def _section(project: str) -> str:
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        if section.startswith(project):
            return section
    raise LookupError(f"{PAGE} has no heading that begins with {project}")
