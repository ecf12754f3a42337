"""A test project with an engine, and a test that compares its work with a baseline."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.project import Project

FILE = "roseinfer-costs.json"
UPDATE = "--roseinfer-update-costs"
ENGINE = """
    import torch

    def look_up(row):
        return row + 1

    class Engine:
        def __init__(self):
            self.tokens = torch.zeros(4)
            self.counts = {"rows_uploaded": 0, "fast_path": 0}

        def step(self):
            for row in range(4):
                look_up(row)
            self.tokens.add_(1)
            self.counts["rows_uploaded"] += 1
            self.counts["fast_path"] += 1
"""
TEST = """
    import pytest
    from my_engine import Engine

    @pytest.mark.roseinfer_costs(packages=["my_engine"], must_not_drop=["fast_path"])
    def test_decode(roseinfer_costs):
        engine = Engine()
        roseinfer_costs.check(
            "steady", engine.step, tokens=4, counters=lambda: engine.counts
        )
"""
PYTHON = f"python {sys.version_info.major}.{sys.version_info.minor}"
TORCH = "torch " + ".".join(metadata.version("torch").split(".")[:2])


@pytest.fixture
def gated_project(project: Project) -> Project:
    """Return a project with an engine, a gate, and a baseline."""
    project.write(my_engine=ENGINE, test_costs=TEST)
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"written: *{FILE}"])
    return project


def change(project: Project, old: str, new: str) -> None:
    file = project.path / "my_engine.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def costs(project: Project, file: str = FILE) -> dict[str, Any]:
    baselines: dict[str, Any] = json.loads((project.path / file).read_text())
    return baselines


def entry(project: Project) -> tuple[dict[str, Any], dict[str, Any]]:
    baselines = costs(project)
    return baselines, baselines["steps"]["test_costs.py::test_decode"]["steady"]["cpu"]


def write(project: Project, baselines: Any) -> None:
    (project.path / FILE).write_text(
        baselines if isinstance(baselines, str) else json.dumps(baselines)
    )
