"""The file of recorded runs, and a run's commit and environment."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.environment import commit_of, differences, environment_here
from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.history import HISTORY_NAME, append_run, read_runs
from tests.gates.history.runs import run

if TYPE_CHECKING:
    from pathlib import Path


def test_runs_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    first, second = run(1), run(2, slower=1.5)
    for each in (second, first):  # as in a file that two branches appended to
        assert append_run(tmp_path / "kept", each) == tmp_path / "kept" / HISTORY_NAME
    assert read_runs(tmp_path / "kept") == [first, second]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a recorded run"),
        ("[]", "line 2: not a recorded run"),
        ('{"format": 1}', "line 2: not a recorded run"),
        ('{"format": 9}', "line 2: format is 9, expected 1"),
    ],
)
def test_invalid_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with append_run(tmp_path, run(1)).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CannotCompare, match=message):
        read_runs(tmp_path)


def test_folder_without_recorded_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotCompare, match=f"{HISTORY_NAME} cannot be read: .*No such file"):
        read_runs(tmp_path)
    (tmp_path / HISTORY_NAME).write_text("")
    with pytest.raises(CannotCompare, match=f"{HISTORY_NAME}: no recorded run"):
        read_runs(tmp_path)


def test_commit_is_recorded_as_clean_or_dirty(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ("", False)
    git = (
        "git",
        "-C",
        str(tmp_path),
        "-c",
        "user.name=nobody",
        "-c",
        "user.email=nobody@x.example",
    )
    file = tmp_path / "engine.py"
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "an engine"]):
        file.write_text("step")
        subprocess.run([*git, *command], check=True)
    commit, dirty = commit_of(tmp_path)
    assert (len(commit), dirty) == (40, False)
    (tmp_path / "timings").mkdir()  # untracked files are no change
    (tmp_path / "timings" / HISTORY_NAME).write_text("")
    assert commit_of(tmp_path) == (commit, False)
    file.write_text("another step")
    assert commit_of(tmp_path) == (commit, True)


def test_environment_has_no_empty_values() -> None:
    environment = environment_here(gpu=False)
    assert environment["python"] == sys.version.split()[0]
    assert {"torch", "numpy", "cpu", "cores"} <= environment.keys()
    assert all(environment.values())
    assert "gpu" not in environment


def test_differences_are_described_as_before_and_after() -> None:
    before, after = {"torch": "2.12", "cpu": "old"}, {"torch": "2.13", "cpu": "old", "gpu": "new"}
    assert differences(before, after) == ["torch: 2.12 -> 2.13", "gpu: none -> new"]
