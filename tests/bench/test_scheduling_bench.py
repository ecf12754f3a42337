"""The benchmark of scheduling measures a real steady state."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from roseinfer.bench import scheduling_bench
from roseinfer.bench.__main__ import main
from roseinfer.engine.engine import Engine

if TYPE_CHECKING:
    from pathlib import Path


def test_its_rows_are_those_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "scheduling.json"
    asked = ["--quick", "--running", "3", "9", "--waiting", "0", "50", "--json", str(file)]
    assert main(["scheduling", *asked]) == 0
    (table,) = json.loads(file.read_text())["tables"].values()
    assert [(row["running"], row["waiting"]) for row in table] == [(3, 0), (3, 50), (9, 0), (9, 50)]
    for row in table:
        assert row["step_us"] > 0
        assert row["us_per_running"] == pytest.approx(row["step_us"] / row["running"])
    assert "us per running" in capsys.readouterr().out


def test_a_state_that_is_not_steady_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is before the prompts are stored."""
    monkeypatch.setattr(Engine, "step", lambda _engine: [])
    with pytest.raises(RuntimeError, match="4 were to decode, not 0"):
        scheduling_bench.measure(4, 0, 1)
