"""Scripts of the pages of docs/findings with their output, by project."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "findings"


def scripts_about(project: str) -> list[tuple[str, str]]:
    """Return each script of the page whose title begins with ``project``, and its output."""
    scripts = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", _page(project), re.DOTALL)
    if not scripts:
        raise LookupError(f"{PAGES} has no scripts about {project}")
    return scripts


def preamble_about(project: str) -> str:
    """Return the common first lines of all scripts about a project, fenced as ``python begin``."""
    preamble = re.search(r"```python begin\n(.*?)```", _page(project), re.DOTALL)
    if not preamble:
        raise LookupError(f"{PAGES} has no preamble for scripts about {project}")
    return preamble[1]


def _page(project: str) -> str:
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if text.startswith(f"# {project}"):
            return text
    raise LookupError(f"{PAGES} has no page whose title begins with {project}")
