"""docs/how-to/ci.md: its workflows install the requirements and run the commands of other pages."""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.tutorials.planted_bugs import PLANTED
from tests.tutorials.printed import adapter_of_paged_kv, blocks, page

if TYPE_CHECKING:
    from tests.project import Project


CACHES, GATES = blocks(page("how-to/ci.md"), language="yaml")


def steps(workflow: str) -> list[dict[str, Any]]:
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    steps_of_job: list[dict[str, Any]] = job["steps"]
    return steps_of_job


@pytest.mark.parametrize("workflow", [CACHES, GATES])
def test_workflow_installs_as_the_tutorial_does(workflow: str) -> None:
    (line,) = blocks(page("tutorials/cache.md"), "Install", "sh")
    runs = [step["run"] for step in steps(workflow) if "run" in step]
    assert runs[0] in line


def test_failed_run_leaves_the_files_that_the_workflow_uploads(project: Project) -> None:
    name, *arguments = shlex.split(steps(CACHES)[-2]["run"])
    assert name == "pytest"
    project.write(paged_kv=PLANTED[0].source(), test_my_cache=adapter_of_paged_kv())
    search_options = ("--roseinfer-examples=10", "--roseinfer-seed=1", "-k", "histories")
    result = project.pytest(*arguments, *search_options)
    result.assert_outcomes(failed=1, deselected=4)
    result.stdout.fnmatch_lines(["layer 0: block * has refcount 1, and tables name it 2 times *"])

    upload = steps(CACHES)[-1]
    assert upload["if"] == "always()"
    assert upload["with"]["include-hidden-files"]
    *files, folder = upload["with"]["path"].split()
    assert all((project.path / file).is_file() for file in files)
    assert project.failure_file(".json").parent == project.path / folder


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


def test_gates_of_the_workflow_pass_in_a_full_clone(project: Project) -> None:
    """The commands are the job's, and the pull request's base branch is ``main``."""
    example_of_gates(project)
    git("init", "-q", "-b", "main")
    git("add", "my_engine", "roseinfer-costs.json", *map(str, project.path.glob("test_*.py")))
    git("commit", "-qm", "an engine")
    git("remote", "add", "origin", f"file://{project.path}")
    checkout, *_, tests = steps(GATES)
    assert checkout["with"] == {"fetch-depth": 0}
    git("fetch", "-q")
    name, *arguments = shlex.split(tests["run"].replace("${{ github.base_ref }}", "main"))
    assert name == "pytest"
    result = project.pytest(*arguments)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["there: origin/main", "2 did no more than their baselines"])
