"""docs/ci.md is true: its workflow tests the tutorial's second cache, and keeps what is left."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
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
    shutil.copy(Path(__file__).with_name("paged_kv.py"), project.path)
    project.write(test_my_cache=adapter_of_paged_kv())
    few = ("--roseinfer-examples=10", "--roseinfer-seed=1", "-k", "histories")
    project.pytest(*arguments, *few).assert_outcomes(passed=1, deselected=4)
    assert kept(project) == {"kv.html", "kv.json", "junit.xml"}

    project.write(paged_kv=PLANTED[0].source())
    result = project.pytest(*arguments, *few)
    result.assert_outcomes(failed=1, deselected=4)
    result.stdout.fnmatch_lines(["layer 0: block * has refcount 1, and tables name it 2 times *"])
    assert kept(project) == {"kv.html", "kv.json", "junit.xml", ".roseinfer"}
    assert steps()[-1]["if"] == "always()"


def kept(project: Project) -> set[str]:
    """Name the files, and the folders that have traces, of what the workflow uploads."""
    uploaded = steps()[-1]["with"]
    assert uploaded["include-hidden-files"]
    there = {name: project.path / name for name in uploaded["path"].split()}
    return {name for name, at in there.items() if at.is_file() or any(at.glob("*.json"))}
