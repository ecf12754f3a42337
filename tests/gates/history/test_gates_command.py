"""``roseinfer gates`` on folders of recorded runs."""

from __future__ import annotations

import argparse
import importlib.util
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.gates import gates_command
from pytest_roseinfer.gates.history import HistoryGate, append_run
from pytest_roseinfer.settings import Settings, Timing
from tests.gates.history.runs import TEST, run, without_times
from tests.python_process import ROOT


def gates(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    gates_command.add_options(parser)
    return gates_command.run(parser.parse_args(arguments))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for each in (
        *(run(day) for day in range(1, 7)),
        *(run(day, slower=1.2, calls=44, torch="2.14.0") for day in range(7, 12)),
    ):
        append_run(tmp_path, each)
    return str(tmp_path)


def test_gates_is_a_command_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["roseinfer.commands"]["gates"] == gates_command.__name__
    extras = project["optional-dependencies"]
    assert any(each.startswith("ruptures>") for each in extras["plot"])
    assert "roseinfer[gguf,plot,serve]" in extras["test"]


def test_history_draws_and_names_changes(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ruptures", reason="finds changes of times: pip install '.[test]'")
    assert gates("history", folder) == 0
    at = "at 070000000 (2026-11-07T10:00:00+00:00), the run before was 060000000"
    assert capsys.readouterr().out.splitlines() == [
        f"runs: 11, figures: 3, drawn: 3, in {folder}/history.svg",
        f"{TEST} on cpu, time of a step (us): 1000 -> 1200 (+20.0%) {at}",
        "  torch: 2.13.0 -> 2.14.0",
        f"{TEST} against v1, here / there: 1 -> 1.2 (+20.0%) {at}",
        "  torch: 2.13.0 -> 2.14.0",
        f"{TEST}, steady on cpu, python_calls: 40 -> 44 (+10.0%) {at}",
        "  torch: 2.13.0 -> 2.14.0",
    ]
    chart = Path(folder, "history.svg").read_text()
    assert chart.startswith("<?xml")
    assert [
        chart.count(f"<!-- {each} -->") for each in ("070000000: 40 -&gt; 44", "070000000")
    ] == [1, 3]


def test_unchanged_counts_are_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ruptures", reason="finds changes of times: pip install '.[test]'")
    for each in without_times([run(1), run(2)]):
        append_run(tmp_path, each)
    assert gates("history", str(tmp_path)) == 0
    assert capsys.readouterr().out == "runs: 2, figures: 1\nno figure changed\n"
    assert not (tmp_path / "history.svg").exists()


def test_history_without_ruptures_names_the_extra(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    hidden = {"ruptures"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name)
    )
    assert gates("history", folder) == 4
    assert "pip install 'roseinfer[plot]'" in capsys.readouterr().err


def test_folder_without_runs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("history", "report"):
        assert gates(kind, str(tmp_path)) == 4
        assert f"ERROR: {tmp_path}/history.jsonl cannot be read" in capsys.readouterr().err


def test_report_covers_the_newest_run(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    append_run(Path(folder), run(12, slower=1.2, calls=44, torch="2.15.0"))
    assert gates("report", folder) == 0
    output = capsys.readouterr().out
    assert output.startswith("### Decode steps at 120000000\n")
    for part in (
        "| 1.200          | 1.200 to 1.200 |",
        "**SLOWER** against `v1`, with a margin of 2.0% after 13 series, 0 s",
        "1 of 1 steps do more work than their baselines.",
        "\nPython calls: 44 a step, baseline 40\n",
        "python 3.11.7, torch 2.15.0",
        "- since the run before, at 110000000: torch: 2.14.0 -> 2.15.0",
    ):
        assert part in output


def test_report_without_times_has_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append_run(tmp_path, *without_times([run(1)]))
    assert gates("report", str(tmp_path)) == 0
    output = capsys.readouterr().out
    assert "0 of 1 steps do more work" in output
    assert "|" not in output


def test_html_report_shows_the_history(
    folder: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ruptures", reason="finds changes of times: pip install '.[test]'")
    run_settings = Settings(reports=("kv.html",), timing=Timing(folder=folder))
    monkeypatch.setattr(settings, "_current", run_settings)
    gate = HistoryGate(pytestconfig)
    gate.add([*run(12, calls=50).work])
    assert gate.judge(passed=True) == []
    ((title, chart),) = gate.figures().items()
    assert title == "History of gate results"
    assert chart.startswith("<svg")
    assert "44 -&gt; 50" in chart
    monkeypatch.setattr(settings, "_current", replace(run_settings, reports=()))
    other = HistoryGate(pytestconfig)
    other.add([*run(12).work])
    assert other.judge(passed=True) == []
    assert other.figures() == {}
