"""Scripts of docs/findings about projects that are fetched print what their pages say."""

from __future__ import annotations

import os

import pytest

from tests import warm_process
from tests.others.fetch import PROJECTS, sources
from tests.others.found_scripts import Script, own_lines, scripts_of

_INSTALLED, _WITHOUT_FINDINGS = "transformers", "lightllm"

SCRIPTS = [
    pytest.param(project, script, id=f"{project}: {script.title}")
    for project in sorted(PROJECTS.keys() - {_INSTALLED, _WITHOUT_FINDINGS})
    for script in scripts_of(project)
]


@pytest.mark.parametrize(("project", "script"), SCRIPTS)
def test_script_prints_its_output(project: str, script: Script) -> None:
    folder = sources(project)
    if not folder.exists():
        pytest.skip(f"{project} is not downloaded: python -m tests.others.fetch {project}")
    command = ["-c", script.source]
    done = warm_process.run(command, cwd=folder, environment=os.environ, timeout=120)
    assert own_lines(done.stdout) == script.printed, done.stderr
