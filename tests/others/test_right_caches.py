"""A right cache is not red, however rarely its histories take its fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.run import coverage
from tests.others import right_caches

if TYPE_CHECKING:
    from pathlib import Path

SHORT = {"tutorial: list": 2, "tutorial: engine": 2, "fast path, of hardly any": 2}


@pytest.mark.parametrize(("name", "runs"), SHORT.items())
def test_a_short_part_of_them_is_never_red(name: str, runs: int) -> None:
    adapter = right_caches.RIGHT[name]()
    assert [right_caches.run(adapter, seed).red for seed in range(runs)] == [[]] * runs


def test_a_red_run_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never = right_caches.with_fast_path(100, (4, 5))
    monkeypatch.setattr(right_caches, "RIGHT", {"never": lambda: never})
    monkeypatch.setattr(coverage, "CONCLUSIVE_EXAMPLES", 100)
    assert right_caches.main(["--runs", "1", "nev"]) == 1
    said = capsys.readouterr().out
    assert "never, seed 0: red (" in said
    assert "path 'new_blocks' was never reached, by none of 1" in said
    assert said.endswith("1 runs, 1 of them red\n")


def test_what_was_not_fetched_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(right_caches, "FOLDER", tmp_path)
    assert not list(right_caches.runs(["nano-vllm", "vllm"], [0]))
