"""docs/how-to/ci.md: its workflows use the action, whose scripts run as a runner would run them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.python_process import ROOT
from tests.tutorials.planted_bugs import PLANTED
from tests.tutorials.printed import adapter_of_paged_kv, blocks, page

if TYPE_CHECKING:
    from tests.project import Project


CACHES, GATES = blocks(page("how-to/ci.md"), language="yaml")
ACTION = ROOT / ".github" / "actions" / "check"
_USED = "OWNER/roseinfer/.github/actions/check@REVISION"


def inputs(workflow: str) -> dict[str, str]:
    """Return the inputs of the action that the last step of a workflow uses."""
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    *_, step = job["steps"]
    assert step["uses"] == _USED
    used: dict[str, str] = step["with"]
    return used


def action() -> dict[str, Any]:
    text = (ACTION / "action.yml").read_text(encoding="utf-8")
    parsed: dict[str, Any] = yaml.safe_load(text)
    return parsed


def run_step(name: str, project: Project, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a step of the action as a runner of GitHub does."""
    (step,) = [step for step in action()["runs"]["steps"] if step.get("name") == name]
    assert step["shell"] == "bash"
    path = [str(Path(sys.executable).parent), str(project.path), os.environ["PATH"]]
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=project.path,
        env={
            **os.environ,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": str(ROOT),
            "GITHUB_STEP_SUMMARY": str(project.path / "step_summary.md"),
            "GITHUB_ACTION_PATH": str(ACTION),
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def write_program(project: Project, name: str, script: str) -> None:
    file = project.path / name
    file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    file.chmod(0o755)


def test_commands_for_another_ci_install_as_the_tutorial_does() -> None:
    (line,) = blocks(page("tutorials/cache.md"), "Install", "sh")
    (commands,) = blocks(page("how-to/ci.md"), language="sh")
    install, run = commands.splitlines()
    assert install in line
    assert run.startswith("pytest test_my_cache.py ")


def test_workflow_is_eight_lines() -> None:
    assert len(CACHES.splitlines()) == 8


@pytest.mark.parametrize("workflow", [CACHES, GATES])
def test_workflow_has_the_inputs_of_the_action(workflow: str) -> None:
    declared = action()["inputs"]
    assert {"tests"} <= inputs(workflow).keys() <= declared.keys()
    assert [name for name in declared if f"`{name}`" not in page("how-to/ci.md")] == []
    assert yaml.safe_load(workflow)["permissions"]["pull-requests"] == "write"


def test_action_installs_this_project_after_the_users_requirements(project: Project) -> None:
    write_program(project, "pip", 'echo "$@" >> "$HOME/pip.txt"')
    for install in ("", "-r requirements.txt 'my cache'"):
        path = {"PATH": f"{project.path}{os.pathsep}{os.environ['PATH']}"}
        assert not run_step(
            "install", project, INSTALL=install, HOME=str(project.path), **path
        ).returncode
    lines = (project.path / "pip.txt").read_text().splitlines()
    assert lines[1] == "install -q -r requirements.txt my cache"
    assert lines[0] == lines[2]
    assert Path(lines[0].removeprefix("install -q ")).resolve() == ROOT


@pytest.mark.slow
def test_failed_run_leaves_the_files_that_the_action_uploads(project: Project) -> None:
    project.write(paged_kv=PLANTED[0].source(), test_my_cache=adapter_of_paged_kv())
    search_options = "--roseinfer-examples=10 --roseinfer-seed=1 -k histories"
    tests = f"{inputs(CACHES)['tests']} {search_options}"
    run = run_step("test", project, TESTS=tests, PROFILE="ci")
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    problem = "layer 0: block 0 has refcount 1, and tables name it 2 times"
    assert problem in run.stdout

    upload = action()["runs"]["steps"][3]
    assert upload["if"] == "always()"
    folder = project.path / upload["with"]["path"]
    names = {file.name for file in folder.iterdir()}
    assert names == {"report.html", "report.json", "junit.xml", "summary.md", "failures"}
    suffixes = {file.suffix for file in (folder / "failures").iterdir()}
    assert suffixes >= {".json", ".py", ".svg"}
    summary = (folder / "summary.md").read_text()
    assert problem in summary
    assert (project.path / "step_summary.md").read_text() == summary


def test_action_comments_the_tables(project: Project) -> None:
    write_program(project, "gh", 'echo "$@" > gh.txt')
    assert not run_step("comment", project, NUMBER="7").returncode
    assert not (project.path / "gh.txt").exists()  # no table, no comment
    (project.path / "roseinfer-report").mkdir()
    (project.path / "roseinfer-report" / "summary.md").write_text("table")
    assert not run_step("comment", project, NUMBER="7").returncode
    assert (project.path / "gh.txt").read_text().startswith("pr comment 7 --body-file roseinfer-")
    write_program(project, "gh", "exit 1")  # as in a pull request from a fork
    run = run_step("comment", project, NUMBER="7")
    assert not run.returncode
    assert "::warning::" in run.stdout


ENGINE = """
    import torch

    class Engine:
        def __init__(self, batch_size):
            self.model = torch.nn.Linear(4, 4, bias=False)
            self.keys, self.values = torch.zeros(2, 16, 4)
            self.batch_size, self.bytes_per_token = batch_size, 2 * 4 * 4
            self.counts = {"steps": 0}

        def rewind(self):
            self.stored = 0

        @torch.inference_mode()
        def step(self):
            rows = self.model(torch.ones((self.batch_size, 4)))
            self.stored = self.batch_size
            self.keys[:self.stored] = rows
            self.values[:self.stored] = rows
            self.counts["steps"] += 1
"""
WIDE_MARGIN = """
import pytest
pytestmark = pytest.mark.roseinfer_tpot(margin=0.9, series_per_process=10)
"""
"""Marker arguments with a wide margin, as the machine's noise must not fail the test."""


def example_of_gates(project: Project) -> None:
    """Write the how-to's three tests of gates, with an engine and its baselines."""
    costs, bytes_moved, time = (
        section.partition("```python\n")[2].partition("```")[0]
        for section in page("how-to/decode-steps.md").split("## Gate the ")[1:]
    )
    speed, test_speed = time.split("# test_speed.py\n")
    (project.path / "my_engine").mkdir()
    project.write(**{"my_engine/__init__": ENGINE, "my_engine/speed": speed})
    project.write(test_costs=costs, test_bytes=bytes_moved, test_speed=WIDE_MARGIN + test_speed)
    project.pytest("--roseinfer-update-costs").assert_outcomes(passed=2, skipped=1)


def git(*arguments: str) -> None:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@nowhere.example")
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


@pytest.mark.slow
def test_gates_of_the_workflow_pass_in_a_full_clone(project: Project) -> None:
    """The commands are the job's, and the pull request's base branch is ``main``."""
    example_of_gates(project)
    git("init", "-q", "-b", "main")
    git("add", "my_engine", "roseinfer-costs.json", *map(str, project.path.glob("test_*.py")))
    git("commit", "-qm", "an engine")
    git("remote", "add", "origin", f"file://{project.path}")
    (job,) = yaml.safe_load(GATES)["jobs"].values()
    assert job["steps"][0]["with"] == {"fetch-depth": 0}
    git("fetch", "-q")
    tests = inputs(GATES)["tests"].replace("${{ github.base_ref }}", "main")
    result = project.pytest(*shlex.split(tests))
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["there: origin/main", "2 did no more than their baselines"])
