"""docs/ci.md is true: its workflow tests the tutorial's second cache, and keeps what is left."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]

from tests.plugin.first_minutes.planted_bugs import PLANTED
from tests.plugin.first_minutes.printed import adapter_of_paged_kv, blocks, page

if TYPE_CHECKING:
    from tests.plugin.conftest import Project


def steps() -> list[dict[str, Any]]:
    (workflow,) = blocks(page("ci.md"), language="yaml")
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    found: list[dict[str, Any]] = job["steps"]
    return found


def test_the_workflow_installs_as_the_tutorial_does() -> None:
    (line,) = blocks(page("tutorial.md"), "Install", "sh")
    runs = [step["run"] for step in steps() if "run" in step]
    assert runs[0] in line


def test_a_failed_run_leaves_all_that_the_workflow_keeps(project: Project) -> None:
    name, *arguments = shlex.split(steps()[-2]["run"])
    assert name == "pytest"
    project.write(paged_kv=PLANTED[0].source(), test_my_cache=adapter_of_paged_kv())
    few = ("--roseinfer-examples=10", "--roseinfer-seed=1", "-k", "histories")
    result = project.pytest(*arguments, *few)
    result.assert_outcomes(failed=1, deselected=4)
    result.stdout.fnmatch_lines(["layer 0: block * has refcount 1, and tables name it 2 times *"])

    upload = steps()[-1]
    assert upload["if"] == "always()"
    assert upload["with"]["include-hidden-files"]
    *files, folder = upload["with"]["path"].split()
    assert all((project.path / file).is_file() for file in files)
    assert project.saved(".json").parent == project.path / folder
