"""Scripts of the pages of docs/findings with their output, by project."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs" / "findings"
_SCRIPT = re.compile(r"```python\n(.*?)```.*?```text\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Script:
    title: str
    """The defect."""
    source: str
    """The script, with the first lines that it has in common with others."""
    printed: str


def scripts_of(project: str) -> list[Script]:
    """Return the scripts of all pages about a project, which its name begins in any case."""
    scripts = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if text.lower().startswith(f"# {project.lower()} "):
            preamble = re.search(r"```python begin\n(.*?)```", text, re.DOTALL)
            for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
                pairs = _SCRIPT.findall(section)
                title = section.partition("\n")[0]
                first = preamble[1] if preamble else ""
                scripts += [Script(title, first + source, printed) for source, printed in pairs]
    if not scripts:
        raise LookupError(f"{PAGES} has no scripts about {project}")
    return scripts


def own_lines(printed: str) -> str:
    """Return what a script has printed, without the lines of vLLM's log."""
    return "".join(line for line in printed.splitlines(keepends=True) if " vllm." not in line)


def scripts_about(project: str) -> list[tuple[str, str]]:
    """Return each script of the page whose title begins with ``project``, and its output."""
    scripts = _SCRIPT.findall(_page(project))
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
