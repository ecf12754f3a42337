"""The file of kept runs, and what a run depends on."""

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


def test_runs_come_back_in_their_order(tmp_path: Path) -> None:
    first, second = run(1), run(2, slower=1.5)
    for each in (second, first):  # of a file that two branches wrote
        assert append_run(tmp_path / "kept", each) == tmp_path / "kept" / HISTORY_NAME
    assert read_runs(tmp_path / "kept") == [first, second]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not a recorded run"),
        ("[]", "line 2: not a recorded run"),
        ('{"format": 1}', "line 2: not a recorded run"),
        ('{"format": 9}', "line 2: format is 9, expected 1"),
    ],
)
def test_a_line_that_is_no_run_is_named(tmp_path: Path, line: str, said: str) -> None:
    with append_run(tmp_path, run(1)).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CannotCompare, match=said):
        read_runs(tmp_path)


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotCompare, match=f"{HISTORY_NAME} cannot be read: .*No such file"):
        read_runs(tmp_path)
    (tmp_path / HISTORY_NAME).write_text("")
    with pytest.raises(CannotCompare, match=f"{HISTORY_NAME}: no recorded run"):
        read_runs(tmp_path)


def test_a_commit_is_named_with_what_differs_from_it(tmp_path: Path) -> None:
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
    commit, changed = commit_of(tmp_path)
    assert (len(commit), changed) == (40, False)
    (tmp_path / "timings").mkdir()  # what git does not know is no change
    (tmp_path / "timings" / HISTORY_NAME).write_text("")
    assert commit_of(tmp_path) == (commit, False)
    file.write_text("another step")
    assert commit_of(tmp_path) == (commit, True)


def test_an_environment_has_no_empty_words() -> None:
    found = environment_here(gpu=False)
    assert found["python"] == sys.version.split()[0]
    assert {"torch", "numpy", "cpu", "cores"} <= found.keys()
    assert all(found.values())
    assert "gpu" not in found


def test_what_differs_is_said_from_before_to_after() -> None:
    before, after = {"torch": "2.12", "cpu": "old"}, {"torch": "2.13", "cpu": "old", "gpu": "new"}
    assert differences(before, after) == ["torch: 2.12 -> 2.13", "gpu: none -> new"]
