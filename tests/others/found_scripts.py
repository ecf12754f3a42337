"""Scripts of docs/findings/details.md with their output, by project."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "findings" / "details.md"


def scripts_about(project: str) -> list[tuple[str, str]]:
    """Return each script below the heading that begins with ``project``, and its output."""
    scripts = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", _section(project), re.DOTALL)
    if not scripts:
        raise LookupError(f"{PAGE} has no scripts about {project}")
    return scripts


def preamble_about(project: str) -> str:
    """Return the common first lines of all scripts about a project, fenced as ``python begin``."""
    preamble = re.search(r"```python begin\n(.*?)```", _section(project), re.DOTALL)
    if not preamble:
        raise LookupError(f"{PAGE} has no preamble for scripts about {project}")
    return preamble[1]


def _section(project: str) -> str:
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        if section.startswith(project):
            return section
    raise LookupError(f"{PAGE} has no heading that begins with {project}")
