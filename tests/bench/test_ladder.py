"""The ladder benchmark: measured rungs, reasons for others, and the chart."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import AppendPolicy, EngineConfig, Path
from roseinfer.bench import charts, ladder
from roseinfer.bench.__main__ import main
from roseinfer.bench.cases import equal_requests_config
from roseinfer.bench.driver import RunRecord, Timeline
from roseinfer.bench.ladder import Rung, RungRow, boundary_gaps, rungs
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.report import Table
from tests.bench.test_serving_bench import is_chart

if TYPE_CHECKING:
    from pathlib import Path as FilePath

SMALL = ["ladder", "--hf-model-id", "tiny", "--device", "cpu", "--batch", "3", "--block-size", "4"]
SMALL += ["--prompt-tokens", "5", "--max-new-tokens", "12"]
ONCE = ["--warmup-runs", "0", "--repeat-runs", "1"]
NAMES = [
    "per-token append",
    "batched append",
    "batched rollover",
    "identity and scalar position",
    "Triton",
    "Triton full-batch",
    "one plan per step",
    "fused append and attention",
    "CUDA graph",
    "run-ahead of 4",
    "fused model",
]
ON_CPU = [*NAMES[:4], NAMES[6]]
"""Rungs that need no kernel."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ladder")
    files = ["--json", str(folder / "ladder.json"), "--plot", str(folder / "ladder.png")]
    assert main([*SMALL, *ONCE, *files]) == 0
    assert is_chart(folder / "ladder.png")
    report: dict[str, Any] = json.loads((folder / "ladder.json").read_text())
    return report


@pytest.mark.slow
def test_every_rung_has_a_row(report: dict[str, Any]) -> None:
    rows = report["tables"]["rungs"]
    assert [row["rung"] for row in rows] == NAMES
    for row in rows:
        if row["rung"] in ON_CPU:
            assert row["not_available"] is None
            assert 0 < row["itl_p50_ms"] <= row["itl_p99_ms"]
            assert min(row["step_ms"], row["tok_per_s"]) > 0
            assert row["itl_at_boundary_p99_ms"] > 0
            assert row["same_tokens"] == 1.0
        else:
            assert row["step_ms"] is None
            assert row["not_available"]


@pytest.mark.slow
def test_floor_is_for_the_mean_context(report: dict[str, Any]) -> None:
    facts = report["facts"]
    stored = 3 * (5 + 12 / 2)
    moved = facts["weights_mb_per_step"] * 1e6 + stored * facts["kv_bytes_per_token"]
    expected = moved / facts["copy_bandwidth_gb_per_s"] / 1e9 * 1e3
    assert facts["floor_ms"] == pytest.approx(expected)


def test_chart_shows_rungs_floor_and_peers(report: dict[str, Any]) -> None:
    from matplotlib.figure import Figure

    ours, other = (
        {"system": name, "ms_per_step": time} for name, time in (("ours", 1.0), ("other", 2.5))
    )
    tables = {**report["tables"], "peers": [ours, other]}
    figure = Figure()
    charts._draw_ladder(figure, {**report, "tables": tables})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [*NAMES, "other"]
    labels = [text.get_text() for text in axes.texts]
    assert labels.count("not measured") == len(NAMES) - len(ON_CPU)
    assert labels[-1] == "2.5 ms"
    floor = report["facts"]["floor_ms"]
    missing = [text for text in axes.texts if text.get_text() == "not measured"]
    assert all(text.get_position()[0] > floor for text in missing)
    assert any(set(line.get_xdata()) == {floor} for line in axes.lines)  # type: ignore[arg-type]


def test_error_names_the_invalid_field_of_a_report(
    report: dict[str, Any], tmp_path: FilePath, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dict(row) for row in report["tables"]["rungs"]]
    damaged = {**report, "tables": {**report["tables"], "rungs": rows}}
    wrong: dict[Any, str] = {
        "fast": 'expected a number or null, actual value "fast"',
        math.inf: "expected a number or null, actual value Infinity",
    }
    for value, message in wrong.items():
        rows[2]["step_ms"] = value
        (tmp_path / "ladder.json").write_text(json.dumps(damaged))
        with pytest.raises(SystemExit) as error:
            main(["plot", str(tmp_path / "ladder.json"), str(tmp_path / "ladder.png")])
        assert error.value.code == 2
        assert f"ladder.json: tables.rungs[2].step_ms: {message}" in capsys.readouterr().err
    del rows[2]["step_ms"]
    (tmp_path / "ladder.json").write_text(json.dumps(damaged))
    with pytest.raises(SystemExit):
        main(["plot", str(tmp_path / "ladder.json"), str(tmp_path / "ladder.png")])
    assert "tables.rungs[2].step_ms is missing" in capsys.readouterr().err


def test_table_fits_100_columns() -> None:
    measured: dict[str, Any] = {each.name: 1234.5 for each in fields(RungRow)[1:-1]}
    row = RungRow(NAMES[3], not_available="no " * 70, **measured)
    text = Table("rungs", "", [row], headings=ladder._HEADINGS).text()
    assert "| identity and scalar position | 1,234 |" in text
    assert max(map(len, text.splitlines())) <= 100


def test_chart_shows_the_spread_of_runs(report: dict[str, Any]) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    rows = report["tables"]["rungs"]
    measured = [row for row in rows if row["step_ms"]]
    for row in measured:
        assert row["fastest_ms"] <= row["step_ms"] <= row["slowest_ms"]
    spread = [
        {**row, "fastest_ms": 0.5 * row["step_ms"], "slowest_ms": 3 * row["step_ms"]}
        if row["step_ms"]
        else row
        for row in rows
    ]
    figure = Figure()
    charts._draw_ladder(figure, {**report, "tables": {**report["tables"], "rungs": spread}})
    (axes,) = figure.axes
    (lines,) = [each for each in axes.collections if isinstance(each, LineCollection)]
    drawn = [sorted(x for x, _ in segment) for segment in lines.get_segments()]
    assert drawn == [pytest.approx([0.5 * row["step_ms"], 3 * row["step_ms"]]) for row in measured]


def test_each_rung_keeps_the_settings_of_previous_ones() -> None:
    policies = [rung.settings.get("append_policy") for rung in rungs(2)]
    switched = [
        {name for name in ("batched", "batched_rollover", "identity", "triton") if getattr(p, name)}
        for p in policies[:6]
    ]
    assert switched == [
        set(),
        {"batched"},
        {"batched", "batched_rollover"},
        {"batched", "batched_rollover", "identity"},
        {"batched", "batched_rollover", "identity", "triton"},
        {"batched", "batched_rollover", "identity", "triton"},
    ]
    assert policies[5] == AppendPolicy()
    assert policies[6:] == [None] * 5
    *_, fused, graph, ahead, model = (rung.settings for rung in rungs(2))
    off = {
        "resident_decode": True,
        "cuda_graph": False,
        "run_ahead": 0,
        "fused_model": False,
    }
    assert fused == off
    assert graph == {**off, "cuda_graph": True}
    assert ahead == {**off, "cuda_graph": True, "run_ahead": 2}
    assert model == {**ahead, "fused_model": True}


ARGS = Namespace(
    hf_model_id="tiny",
    random_weights=False,
    device="cpu",
    dtype=None,
    batch=2,
    prompt_tokens=5,
    max_new_tokens=6,
    block_size=4,
    warmup_runs=0,
    repeat_runs=1,
)


def measure_rungs(*steps: Rung) -> list[RungRow]:
    return ladder.Ladder(ARGS).measure_rungs(steps)


def test_rung_on_another_path_is_not_measured() -> None:
    per_token = AppendPolicy(batched=False, triton=False)
    settings = {"per_layer_kv": True, "append_policy": per_token}
    right, wrong = measure_rungs(
        Rung("right", settings, Path.PER_TOKEN), Rung("wrong", settings, Path.TORCH_SCALAR)
    )
    assert right.step_ms is not None
    assert wrong.step_ms is None
    assert wrong.not_available is not None
    assert "torch_scalar: expected most of" in wrong.not_available


def test_unavailable_rung_has_the_reason() -> None:
    (row,) = measure_rungs(Rung("graph", {"resident_decode": True, "cuda_graph": True}))
    assert row.not_available is not None
    assert "Triton" in row.not_available


def test_different_tokens_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rung has the settings of the first and other weights."""
    source_llm = ModelSource.llm
    built: Counter[str] = Counter()

    def llm_broken_the_second_time(self: ModelSource, settings: Any) -> Any:
        llm = source_llm(self, settings)
        built["llm"] += 1
        if built["llm"] == 2:
            with torch.no_grad():
                llm.engine.sequence_runner.model._model.lm_head.weight.neg_()
        return llm

    monkeypatch.setattr(ModelSource, "llm", llm_broken_the_second_time)
    first, second, third = measure_rungs(Rung("first"), Rung("second"), Rung("third"))
    assert (first.same_tokens, second.same_tokens, third.same_tokens) == (1.0, 0.0, 1.0)


def test_report_without_a_measured_rung_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, *ONCE, "--prompt-tokens", "1024"])
    assert "no rung can be measured: prompt of 1024 tokens and" in capsys.readouterr().err


def test_invalid_run_ahead_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--run-ahead", "99"])
    assert (
        "run_ahead must be a whole number of at least 0 and at most 16" in capsys.readouterr().err
    )


def test_boundary_gaps_are_before_the_first_token_of_a_block() -> None:
    """Prompts of 5 and blocks of 4: token 4 stores position 8, and token 8 position 12."""
    times = tuple(float(number * number) for number in range(10))
    record = RunRecord(0, [], [Timeline(0, 0, times)], [5], [[0] * 10])
    assert boundary_gaps(record, 4) == [16.0 - 9.0, 64.0 - 49.0]
    assert boundary_gaps(record, 64) == []


def test_settings_of_all_rungs_are_valid() -> None:
    built = EngineConfig(**equal_requests_config(ARGS))
    assert built.kv_cache_tokens == 2 * 4 * 4  # three blocks for 11 tokens, and a spare one
