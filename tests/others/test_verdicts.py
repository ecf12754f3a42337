"""Verdicts of other releases: what a script does there, and the page that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.others import verdicts
from tests.others.fetch import PROJECTS
from tests.others.found_scripts import Script, scripts_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("project", sorted(PROJECTS.keys() - {"lightllm"}))
def test_every_project_has_scripts_with_titles(project: str) -> None:
    scripts = scripts_of(project)
    assert scripts
    assert all(script.title for script in scripts)


@pytest.mark.parametrize(
    ("source", "result"),
    [
        ("print('wrong')", ""),
        ("print('right')", "it prints other lines"),
        ("print('right'); raise KeyError('gone')", "KeyError: 'gone'"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_result_of_a_script(tmp_path: Path, source: str, result: str) -> None:
    assert verdicts._run(Script("A defect", source, "wrong\n"), tmp_path) == result


def test_verdict_replaces_that_of_the_same_release() -> None:
    text = "# Other releases\n"
    broken = verdicts.Verdict("1.0", {"A defect": "it prints other lines"}, 2)
    for project, verdict in (
        ("one", broken),
        ("two", verdicts.Verdict("1.0", {}, 1)),
        ("one", verdicts.Verdict("1.1", {}, 2)),
        ("one", verdicts.Verdict("1.0", {}, 2)),
    ):
        text = verdicts.insert(text, project, verdict)
    assert text.splitlines() == [
        "# Other releases",
        "",
        "## one",
        "",
        "- 1.0: 2 of 2 scripts print what their page says",
        "- 1.1: 2 of 2 scripts print what their page says",
        "",
        "## two",
        "",
        "- 1.0: 1 of 1 scripts print what their page says",
    ]
    assert "  - not: A defect\n    (it prints other lines)" in verdicts.insert(text, "two", broken)
