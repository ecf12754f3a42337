"""Runs of correct caches pass, however rarely their histories reach a fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.run import coverage
from tests.others import right_caches

if TYPE_CHECKING:
    from pathlib import Path

SHORT = {"tutorial: list": 2, "tutorial: engine": 2, "fast path: 5 rows": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "runs"), SHORT.items())
def test_correct_targets_pass(name: str, runs: int) -> None:
    adapter = right_caches.RIGHT[name]()
    assert [right_caches.run(adapter, seed).failures for seed in range(runs)] == [[]] * runs


@pytest.mark.slow
def test_failed_run_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never = right_caches.with_fast_path(100, (4, 5))
    monkeypatch.setattr(right_caches, "RIGHT", {"never": lambda: never})
    monkeypatch.setattr(coverage, "CONCLUSIVE_EXAMPLES", 100)
    assert right_caches.main(["--runs", "1", "nev"]) == 1
    output = capsys.readouterr().out
    assert "never, seed 0: failed (" in output
    assert "path 'new_blocks' was never reached, by none of 1" in output
    assert output.endswith("1 runs, 1 failed\n")


def test_projects_not_downloaded_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(right_caches, "FOLDER", tmp_path)
    assert not list(right_caches.runs(["nano-vllm", "vllm"], [0]))
