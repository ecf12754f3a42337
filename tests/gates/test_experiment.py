"""The experiment that measures the error rates of the paired comparison."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.paired_timing import InterimAnalysis, Plan
from tests.gates import experiment

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_experiment_compares_real_processes() -> None:
    """Twice the work shows in few series, even on a busy machine."""
    plan = Plan(interim_analyses=(InterimAnalysis(5, 0.05), InterimAnalysis(20, 0.05)), rounds=2)
    (comparison,) = experiment.comparisons(1, 100, plan)
    assert comparison.verdict.value == "SLOWER"
    assert comparison.ratio > 1.5  # more on a busy machine
    assert comparison.here.ready.own_modules == ["decode_step"]


def test_table_covers_all_logged_comparisons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    for verdict, ratio in (("SLOWER", 1.06), ("SLOWER", 1.05), ("UNDECIDED", 1.03)):
        entry = {"verdict": verdict, "ratio": ratio, "ratios": [1] * 17, "seconds": 4, "load": 2}
        with log.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")
    experiment.main(["--runs", "0", "--slower", "5", "--log", str(log)])
    header, row = capsys.readouterr().out.splitlines()
    assert "| SAME | FASTER | SLOWER | UNDECIDED |" in header
    assert row == "| 5% | 3 | 0 | 0 | 2 | 1 | 1.0500 | 17 | 4.0 s | 2.0 to 2.0 |"
