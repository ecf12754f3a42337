"""The scheduler and streaming benchmarks as commands: tables, JSON, charts, invalid options."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer.bench import charts, command
from roseinfer.bench.__main__ import main as bench
from roseinfer.bench.command import benchmark_scheduler, benchmark_streaming
from roseinfer.bench.driver import LatencyRow, ThroughputRow
from roseinfer.bench.model_source import ModelSource
from roseinfer.cli.model_options import parsed_fields
from roseinfer.config import EngineConfig
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL = ["--hf-model-id", "tiny", "--device", "cpu", "--num-requests", "3", "--max-new-tokens", "5"]
ONCE = ["--warmup-runs", "0", "--repeat-runs", "1"]
PNG = b"\x89PNG\r\n\x1a\n"
WAITS = ["TTFT", "TPOT", "ITL", "latency", "queue wait"]


def report_of(main: Callable[[list[str]], int], arguments: list[str], file: Path) -> dict[str, Any]:
    assert main([*SMALL, *ONCE, "--no-stop-on-eos", *arguments, "--json", str(file)]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def is_chart(file: Path) -> bool:
    """Return whether a file is a PNG image of more than one colour."""
    from matplotlib.image import imread

    return file.read_bytes().startswith(PNG) and float(imread(str(file)).std()) > 0


def test_scheduler_in_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "chart.png"
    report = report_of(benchmark_scheduler, ["--plot", str(chart)], tmp_path / "all.json")
    assert report["benchmark"] == "scheduler"
    assert report["command"].startswith(
        "python -m roseinfer.benchmark_scheduler --hf-model-id tiny"
    )
    assert report["config"]["model"] == "tiny"
    assert report["facts"].keys() >= {"start_up_s", "copy_bandwidth_gb_per_s"}
    rows = report["tables"]["throughput"]
    assert [row["run"] for row in rows] == ["naive", "online", "offline"]
    for row in rows:
        assert list(row) == [field.name for field in fields(ThroughputRow)]
        assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (3, 15, 15)
        assert 0 < row["decode_s"] < row["total_s"]
        assert row["completion_tok_per_s"] == pytest.approx(15 / row["total_s"])
        assert row["total_tok_per_s"] == pytest.approx(30 / row["total_s"])
    waits = report["tables"]["latencies"]
    assert [row["metric"] for row in waits] == WAITS * 3
    for row in waits:
        assert list(row) == [field.name for field in fields(LatencyRow)]
        assert 0 <= row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
    assert is_chart(chart)
    printed = capsys.readouterr().out
    for heading in ("decode s", "completion tok per s", "p50 ms", "mean ms", "TTFT", "queue wait"):
        assert heading in printed


def test_scheduler_in_one_mode(tmp_path: Path) -> None:
    report = report_of(benchmark_scheduler, ["--mode", "naive", "--pretok"], tmp_path / "one.json")
    assert [row["run"] for row in report["tables"]["throughput"]] == ["naive"]
    assert report["tables"]["peers"] == []


def test_streaming(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt-repeats", "1,3", "--tokenize-workers", "2", "--submit-interval-ms", "2"]
    arguments += [
        "--stream-interval",
        "2",
        "--prefill-max-batch-size",
        "1",
        "--prefill-max-tokens",
        "8",
    ]
    arguments += ["--prefill-admission-policy", "pack", "--plot", str(tmp_path / "chart.png")]
    report = report_of(benchmark_streaming, arguments, tmp_path / "streaming.json")
    assert report["benchmark"] == "streaming"
    (row,) = report["tables"]["throughput"]
    assert row["prompt_tokens"] == 5 + (3 * 5 + 2) + 5  # "Hello", and three with spaces between
    assert [row["metric"] for row in report["tables"]["latencies"]] == WAITS
    assert report["config"]["prefill_admission_policy"] == "pack"
    assert report["config"]["prefill_max_tokens"] == 8
    assert is_chart(tmp_path / "chart.png")
    assert "p99 ms" in capsys.readouterr().out


def test_plot_draws_a_chart_from_json(tmp_path: Path) -> None:
    report_of(benchmark_streaming, [], tmp_path / "streaming.json")
    chart = tmp_path / "later.png"
    assert bench(["plot", str(tmp_path / "streaming.json"), str(chart)]) == 0
    assert is_chart(chart)


def test_chart_shows_the_peers(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    report = report_of(benchmark_scheduler, ["--mode", "offline"], tmp_path / "offline.json")
    ours, other, missing = (
        {"system": name, "completion_tok_per_s": speed}
        for name, speed in (("ours", 1.0), ("other", 250.0), ("missing", None))
    )
    report["tables"]["peers"] = [ours, other, missing]
    figure = Figure()
    charts._draw_serving(figure, report)
    speed = figure.axes[0]
    assert [name.get_text() for name in speed.get_xticklabels()] == ["offline", "other", "missing"]
    (row,) = report["tables"]["throughput"]
    heights = [bar.get_height() for bar in speed.patches]  # type: ignore[attr-defined]
    assert heights == [
        *(row["completion_tok_per_s"], 250.0, 0.0),
        *(row["decode_tok_per_s"], 0.0, 0.0),
    ]


def test_medians_exclude_warmup_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two warm-up runs, and three timed ones of which each appears 10 s longer than the last."""
    real = ThroughputRow.of
    times: list[float] = []

    def longer_row(*args: Any) -> ThroughputRow:
        row: Any = real(*args)
        times.append(10.0 * (len(times) + 1))
        object.__setattr__(row, "total_s", times[-1])
        return row  # type: ignore[no-any-return]

    monkeypatch.setattr(ThroughputRow, "of", longer_row)
    runs = ["--mode", "offline", "--warmup-runs", "2", "--repeat-runs", "3"]
    report = report_of(benchmark_scheduler, runs, tmp_path / "repeats.json")
    assert times == [10.0, 20.0, 30.0]
    (row,) = report["tables"]["throughput"]
    assert (row["fastest_s"], row["total_s"], row["slowest_s"]) == (10.0, 20.0, 30.0)


def test_sampling_options_reach_the_engine(tmp_path: Path) -> None:
    arguments = ["--do-sample", "--temperature", "0.5", "--top-k", "9", "--top-p", "0.8"]
    config = report_of(benchmark_streaming, arguments, tmp_path / "sampled.json")["config"]
    assert (config["temperature"], config["top_k"], config["top_p"]) == (0.5, 9, 0.8)
    config = report_of(benchmark_streaming, [], tmp_path / "greedy.json")["config"]
    assert (config["temperature"], config["ignore_eos"]) == (0.0, True)


def test_engine_options_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[dict[str, Any]] = []

    def record(_benchmark: str, args: Any, _ways: Any) -> None:
        settings.append(parsed_fields(args, EngineConfig))
        raise ConfigError("enough")

    monkeypatch.setattr(command, "_serve", record)
    arguments = [
        "--max-batch-size",
        "7",
        "--block-size",
        "8",
        "--no-prefix-cache",
        "--no-paged-attn",
    ]
    for more in (["--cuda-graph", "--run-ahead", "0"], ["--no-cuda-graph"], []):
        with pytest.raises(SystemExit):
            benchmark_streaming([*arguments, *more])
    shared = {
        "max_batch_size": 7,
        "block_size": 8,
        "prefix_cache": False,
        "paged_attention": False,
    }
    assert settings == [
        {**shared, "cuda_graph": True, "run_ahead": 0},
        {**shared, "cuda_graph": False},
        shared,
    ]


REFUSED = {
    "top_k_without_do_sample": (["--top-k", "5"], "--top-k: no effect"),
    "peers_that_stop_on_eos": (["--peers"], "add --no-stop-on-eos"),
    "unknown_peer": (["--peers", "other"], "--peers other: unknown; use transformers-static"),
    "unknown_architecture": (
        ["--random-weights"],
        "use one of gpt2, llama-1b, llama-8b",
    ),
    "no_requests": (["--num-requests", "0"], "at least 1"),
    "invalid_block_size": (["--block-size", "0"], "at least 1"),
    "prompt_too_long": (["--prompt", "x" * 1024], "shorten prompts"),
    "missing_directory": (["--json", "nowhere/at/all.json"], "make the directory"),
    "plot_without_png": (["--plot", "chart.jpeg"], "must end in .png"),
    "unknown_device": (["--device", "tpu"], "tpu"),
}
REFUSED_STREAMING = {
    "pretok_with_workers": (["--pretok", "--tokenize-workers", "2"], "drop one of them"),
    "peers_with_submit_interval": (
        ["--peers", "--submit-interval-ms", "3"],
        "all requests at once",
    ),
    "negative_submit_interval": (["--submit-interval-ms", "-1"], "at least 0"),
    "zero_repeats": (["--prompt-repeats", "2,0"], "at least 1"),
    "zero_stream_interval": (["--stream-interval", "0"], "at least 1"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("main", [benchmark_scheduler, benchmark_streaming])
def test_invalid_options_are_refused(
    main: Callable[[list[str]], int],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*SMALL, *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED_STREAMING.values(), ids=REFUSED_STREAMING
)
def test_invalid_streaming_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark_streaming([*SMALL, *arguments])
    assert message in capsys.readouterr().err


def test_plot_without_matplotlib_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    with pytest.raises(SystemExit):
        benchmark_scheduler([*SMALL, "--plot", str(tmp_path / "chart.png")])
    captured = capsys.readouterr()
    assert "pip install 'roseinfer[plot]'" in captured.err
    assert "python -m roseinfer.bench plot" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("content", ["no json", "[]", "{}", '{"benchmark": "append"}'])
def test_reports_without_a_chart_are_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(SystemExit):
        bench(["plot", str(tmp_path / "report.json"), str(tmp_path / "chart.png")])
    assert "report" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["benchmark_scheduler", "benchmark_streaming"])
def test_modules_run_as_commands(name: str) -> None:
    command = [sys.executable, "-m", f"roseinfer.{name}", "--num-requests", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"python -m roseinfer.{name}: error: argument --num-requests" in done.stderr


@pytest.mark.parametrize("arguments", [["--max-new-tokens", "5000"], ["--prompt-repeats", "1,900"]])
def test_requests_beyond_the_context_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark_streaming([*SMALL, *arguments])
    *_, line = capsys.readouterr().err.splitlines()
    assert "error: prompt of" in line
    assert line.endswith("lower --max-new-tokens, or shorten prompts")


@pytest.mark.parametrize("mode", ["naive", "online"])
def test_peers_need_offline_mode(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark_scheduler([*SMALL, "--no-stop-on-eos", "--mode", mode, "--peers"])
    assert f"drop --mode {mode}" in capsys.readouterr().err


def test_sampling_at_temperature_0_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark_scheduler([*SMALL, "--do-sample", "--temperature", "0"])
    assert "drop --do-sample" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_directory_as_output_file_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark_scheduler([*SMALL, option, str(tmp_path)])
    assert "this is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_unwritable_output_file_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is measured; an existing file keeps its content."""
    dangling = tmp_path / "dangling.png"
    dangling.symlink_to(tmp_path / "no" / "folder.png")
    with pytest.raises(SystemExit):
        benchmark_scheduler([*SMALL, option, str(dangling)])
    assert f"{option} {dangling}: cannot be written: No such file" in capsys.readouterr().err
    existing = tmp_path / "existing.png"
    existing.write_bytes(b"content")
    with pytest.raises(SystemExit):
        benchmark_scheduler([*SMALL, option, str(existing), "--top-k", "-1", "--do-sample"])
    assert existing.read_bytes() == b"content"


def test_dtype_applies_to_peers() -> None:
    network = ModelSource("tiny", random_weights=False, device="cpu", dtype="bfloat16").network()
    assert network.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"\x89PNG\xff", "not UTF-8 text, at byte 0"),
        (b'{\n  "benchmark": ladder}', "not valid JSON, at line 2, column 16: Expecting value"),
        (b"[]", "not a benchmark report; use a file written by --json"),
        (b'{"benchmark": "append"}', "have no chart"),
        (b'{"benchmark": "lader"}', "have no chart; did you mean ladder?"),
        (b'{"benchmark": []}', "not a benchmark report"),
        (b'{"benchmark": "ladder"}', "report.json: config is missing"),
        (b'{"benchmark": "ladder", "config": 3}', "config: expected an object, actual value 3"),
    ],
)
def test_invalid_report_is_refused_with_the_reason(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    if content is not None:
        report.write_bytes(content)
    with pytest.raises(SystemExit):
        bench(["plot", str(report), str(tmp_path / "chart.png")])
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench(["plot", str(report), str(tmp_path / "none" / "chart.png")])
    assert "make the directory" in capsys.readouterr().err
