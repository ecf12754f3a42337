"""Traces of steady decode steps: spans on one clock, and their sums."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import LLM, SamplingParams
from roseinfer.bench import trace
from roseinfer.bench.__main__ import main as bench
from roseinfer.bench.driver import MemoryFloor
from roseinfer.bench.trace import (
    STEPS,
    make_step_row,
    overlap,
    record_replays,
    record_waits,
    select_spans,
)
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

US = 1e-6
TRACED = {
    "step": [(at * US, (at + 100) * US) for at in (0, 100, 200, 300, 400)],
    "wait": [((at + 60) * US, (at + 90) * US) for at in (0, 100, 200, 300, 400)],
    "device": [((at - 10) * US, (at + 70) * US) for at in (0, 100, 200, 300)],
}
"""The device is 10 us ahead of the host's steps, and takes 80 us for each."""


def test_step_time_is_busy_and_wait_time() -> None:
    row = make_step_row(3, TRACED, floor_us=40.0)
    assert row.sequences == 3
    assert row.step_us == pytest.approx(100)
    assert row.host_busy_us == pytest.approx(70)
    assert row.host_wait_us == pytest.approx(30)
    assert row.device_busy_us == pytest.approx(80)
    assert row.floor_ratio == pytest.approx(100 / 40)


def test_cpu_trace_has_only_the_step_lane() -> None:
    alone = {**TRACED, "wait": [], "device": []}
    assert make_step_row(1, alone, 40.0).device_busy_us is None
    assert {span.lane for span in select_spans(1, alone)} == {"step"}


def test_spans_are_clipped_to_the_drawn_steps() -> None:
    spans = {
        (span.lane, round(span.begin_us), round(span.end_us)) for span in select_spans(3, TRACED)
    }  # steps from 200 us on
    assert {("step", 0, 100), ("wait", 60, 90), ("device", 90, 170)} <= spans
    assert ("device", 0, 70) in spans, "expected the span clipped at the begin"
    assert max(end for _, _, end in spans) == 300


def test_overlap_sums_the_covered_time() -> None:
    assert overlap([(0, 2), (3, 4), (8, 12)], (1, 10)) == 1 + 1 + 2
    assert overlap([(0, 1), (10, 12)], (1, 10)) == 0


class DeviceEvent:
    """Device event on a clock that advances only when a graph is replayed."""

    milliseconds = 0.0

    def __init__(self) -> None:
        self.at = DeviceEvent.milliseconds

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: DeviceEvent) -> float:
        return other.at - self.at


class Graph:
    """Replacement of torch's CUDA graphs, which allow no subclasses."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def replay(self) -> None:
        DeviceEvent.milliseconds += self.milliseconds


def test_replays_are_recorded_with_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "record_device_event", DeviceEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    before = time.perf_counter()
    with record_replays() as replays:
        begin = time.perf_counter()
        Graph(3.0).replay()
        DeviceEvent.milliseconds += 10.0
        Graph(5.0).replay()
    (first, second) = replays()
    assert before <= first[0] <= begin, "expected times of the host's clock"
    assert first[1] - first[0] == pytest.approx(3e-3)
    assert second[0] - first[1] == pytest.approx(10e-3)
    assert second[1] - second[0] == pytest.approx(5e-3)


@pytest.mark.parametrize("recorder", [record_waits, record_replays])
def test_patches_are_removed_after_an_error(
    recorder: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "record_device_event", DeviceEvent)
    real = torch.cuda.Event.synchronize, torch.cuda.CUDAGraph.replay
    with pytest.raises(KeyError), recorder():
        raise KeyError
    assert (torch.cuda.Event.synchronize, torch.cuda.CUDAGraph.replay) == real


STORED = 20 + 1 + 8 + 8 / 2
"""Mean tokens stored: prompt, first token, steps before the timed ones, half of the timed ones."""
FLOOR = MemoryFloor(1, 1, 1.0)


def run(device: str, *arguments: str) -> int:
    model = ["--hf-model-id", "tiny", "--device", device]
    return bench(["trace", *model, "--sequences", "2", "5", "--steps", "8", *arguments])


def test_trace_command(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, chart = tmp_path / "trace.json", tmp_path / "trace.png"
    assert run(device, "--context", "20", "--json", str(report), "--plot", str(chart)) == 0
    document: dict[str, Any] = json.loads(report.read_text())
    rows, spans = document["tables"]["steps"], document["tables"]["spans"]
    assert [row["sequences"] for row in rows] == [2, 5]
    for row in rows:
        assert 0 < row["host_busy_us"] <= row["step_us"]
        assert (row["device_busy_us"] is None) == (device == "cpu")
        assert row["floor_ratio"] == row["step_us"] / row["floor_us"]
    facts = document["facts"]
    moved = facts["weights_mb_per_step"] * 1e6 + 2 * STORED * facts["kv_bytes_per_token"]
    floor_us = moved / facts["copy_bandwidth_gb_per_s"] / 1e3
    assert rows[0]["floor_us"] == pytest.approx(floor_us, rel=0.01)
    assert bool(document["tables"]["kernels"]) == (device == "cuda")
    assert sum(span["lane"] == "step" for span in spans) == 2 * 4
    assert chart.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "host busy us" in printed
    assert "begin us" not in printed, "expected spans only in charts"
    assert ("they are timed on a GPU" in printed) == (device == "cpu")


def test_context_beyond_the_models_positions_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("cpu", "--context", "5000")
    assert "lower --context" in capsys.readouterr().err


@pytest.mark.parametrize("prefill_max_tokens", [2048, 32])
def test_all_sequences_decode_in_every_timed_step(
    prefill_max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds for any number of prefill steps, and for the profiled steps after the timed ones."""
    llm = LLM(
        "tiny",
        device="cpu",
        max_batch_size=16,
        block_size=16,
        prefill_max_tokens=prefill_max_tokens,
    )
    tokens_per_step: list[int] = []
    max_new_tokens: list[int] = []
    step, submit = llm.engine.step, llm.engine.submit

    def counting_step() -> list[Update]:
        updates = step()
        tokens_per_step.append(len(updates))
        return updates

    def recorder(prompt: list[int], params: SamplingParams) -> Request:
        max_new_tokens.append(params.max_new_tokens)
        return submit(prompt, params)

    monkeypatch.setattr(llm.engine, "step", counting_step)
    monkeypatch.setattr(llm.engine, "submit", recorder)
    trace.measure(llm, 16, 100, 20, FLOOR)
    assert tokens_per_step[-20:] == [16] * 20
    assert min(max_new_tokens) >= len(tokens_per_step) + STEPS
    assert not llm.engine.has_work


def test_sequences_beyond_the_cache_are_refused() -> None:
    llm = LLM("tiny", device="cpu", max_batch_size=8, block_size=16, kv_cache_tokens=8 * 128)
    with pytest.raises(ConfigError, match=r"8 sequences of up to .* lower --context, --steps"):
        trace.measure(llm, 8, 100, 60, FLOOR)
    assert not llm.engine.has_work
