"""Run the scripts of docs/findings with other releases: ``python -m tests.others.verdicts mlx-lm``.

Without ``--releases``, that is the newest one. ``--write`` writes the verdicts to
docs/findings/releases.md, in place of earlier ones of the same releases.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.others import fetch
from tests.others.found_scripts import PAGES, Script, own_lines, scripts_of

PAGE = PAGES / "releases.md"
TIME_LIMIT = 300
"""Seconds that a script may take."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the scripts about a project do with one of its releases."""

    release: str
    others: dict[str, str]
    """Result of each script that does not print what its page says, by its defect."""
    scripts: int
    """Number of all scripts."""

    def describe(self) -> str:
        equal = self.scripts - len(self.others)
        lines = [f"- {self.release}: {equal} of {self.scripts} scripts print what their page says"]
        lines += [f"  - not: {title}\n    ({result})" for title, result in self.others.items()]
        return "\n".join(lines)


def verdict_of(project: str, release: str) -> Verdict:
    """Download a release, and run the scripts of the project's pages with it."""
    scripts = scripts_of(project)
    with TemporaryDirectory() as folder:
        fetch.fetch(project, release=release, parent=Path(folder))
        sources = fetch.sources(project, Path(folder))
        results = {script.title: _run(script, sources) for script in scripts}
    others = {title: result for title, result in results.items() if result}
    return Verdict(release, others, len(scripts))


def _run(script: Script, sources: Path) -> str:
    """Return "" if a script prints what its page says, else what it does, in words."""
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    command = [sys.executable, "-W", "ignore", "-c", script.source]
    try:
        done = subprocess.run(
            command,
            cwd=sources,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {TIME_LIMIT} s"
    if own_lines(done.stdout) == script.printed:
        return ""
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return errors[-1][:90]
    return "it prints other lines"


def newest_release(project: str) -> str:
    """Return the newest release, or the commit of a project that has none."""
    origin = fetch.PROJECTS[project]
    if origin.repository:
        return origin.revision
    command = (sys.executable, "-m", "pip", "index", "versions", project)
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return listing.partition("(")[2].partition(")")[0]


def insert(text: str, project: str, verdict: Verdict) -> str:
    """Return the page with a verdict, in place of an earlier one of the same release."""
    heading = f"## {project}\n"
    if heading not in text:
        text = f"{text.rstrip()}\n\n{heading}\n"
    before, _, after = text.partition(heading)
    section, mark, rest = after.partition("\n## ")
    earlier = rf"- {re.escape(verdict.release)}: .*\n(  .*\n)*"
    section = re.sub(earlier, "", section.strip("\n") + "\n")
    section = f"\n{verdict.describe()}\n{section.strip()}".rstrip() + "\n"
    return f"{before}{heading}{section}{mark}{rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("project", choices=fetch.PROJECTS)
    parser.add_argument(
        "--releases", nargs="+", help="versions or commits; oldest first, as each is written on top"
    )
    parser.add_argument("--write", action="store_true", help="write them to the page")
    args = parser.parse_args()
    for release in args.releases or [newest_release(args.project)]:
        verdict = verdict_of(args.project, release)
        print(verdict.describe(), flush=True)
        if args.write:
            text = insert(PAGE.read_text(encoding="utf-8"), args.project, verdict)
            PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
