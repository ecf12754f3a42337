"""A test project whose decode step advances its own clock, and a reference folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from tests.project import Project

ENGINE = """
    MICROSECONDS = {microseconds}


    def decode():
        taken = []

        def step():
            taken.append(MICROSECONDS * (1 + len(taken) % 3 / 1000))

        return {{
            "step": step,
            "tokens": {tokens},
            "clock": lambda: sum(taken) / 1e6,
            "floor_seconds": 250e-6,
            "path_counts": lambda: {{"fast": len(taken)}},
        }}
"""
TEST = """
    import pytest

    @pytest.mark.roseinfer_tpot({marker})
    def test_decode(roseinfer_tpot):
        roseinfer_tpot.check("engine:decode")
"""
FEW_PROCESSES = "series_per_process=10"
"""Marker arguments that start few processes, whose start takes most of a test's time."""


def speed_test(marker: str = FEW_PROCESSES) -> str:
    return TEST.format(marker=marker)


def engine(microseconds: float, tokens: int = 4) -> str:
    return ENGINE.format(microseconds=microseconds, tokens=tokens)


def write_reference(project: Project, microseconds: float, tokens: int = 4) -> None:
    (project.path / "before").mkdir(exist_ok=True)
    project.write(**{"before/engine": engine(microseconds, tokens)})


def run_against(project: Project, *arguments: str, reference: str = "before") -> pytest.RunResult:
    return project.pytest(f"--roseinfer-against={reference}", *arguments)


def benchmarks(project: Project, *arguments: str) -> list[dict[str, Any]]:
    run_against(project, f"--benchmark-json={project.path / 'saved.json'}", *arguments)
    saved: list[dict[str, Any]] = json.loads((project.path / "saved.json").read_text())[
        "benchmarks"
    ]
    return saved
