"""The scripts of docs/found.md and what they print, by the project that they are about."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "found.md"


def scripts_about(project: str) -> list[tuple[str, str]]:
    """Return each script below the heading that begins with ``project``, and its output."""
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        if section.startswith(project):
            return re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", section, re.DOTALL)
    raise LookupError(f"{PAGE} has no heading that begins with {project}")
