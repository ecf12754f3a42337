"""The start-up benchmark: timings, and the baseline of its figures."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer.bench import start
from roseinfer.bench.__main__ import main as bench
from roseinfer.bench.start import StartTimes, make_start_rows
from roseinfer.models import loading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GB = 1 << 30


def test_starts_are_compared_with_loading_weights() -> None:
    alone, cold, warm = make_start_rows(
        {
            "weights alone": [StartTimes(ready, weight_bytes=2 * GB) for ready in (2.0, 9.0, 1.0)],
            "cold": [
                StartTimes(22.0, 3.0, weights_peak_bytes=GB * 2, before_cache_peak_bytes=3 * GB)
            ],
            "warm": [
                StartTimes(5.0, 0.5, weights_peak_bytes=2 * GB, before_cache_peak_bytes=2 * GB),
                StartTimes(7.0, 0.7, weights_peak_bytes=2 * GB, before_cache_peak_bytes=3 * GB),
            ],
        }
    )
    assert (alone.runs, alone.ready_s, alone.overhead_s, alone.first_text_s) == (3, 2.0, None, None)
    assert (cold.ready_s, cold.overhead_s, cold.first_text_s) == (22.0, 20.0, 3.0)
    assert (warm.ready_s, warm.overhead_s, warm.first_text_s) == (6.0, 4.0, 0.6)
    assert (warm.peak_weights, warm.peak_before_cache) == (1.0, 1.5), (
        "expected the largest peaks, relative to the weights"
    )
    assert alone.peak_before_cache is None


def test_rows_without_a_gpu_have_no_peaks() -> None:
    for row in make_start_rows(
        {"weights alone": [StartTimes(1.0)], "warm": [StartTimes(2.0, 0.5)]}
    ):
        assert (row.peak_weights, row.peak_before_cache) == (None, None)


def test_peak_is_recorded_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = iter([5, 7])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(allocated))
    monkeypatch.setattr(loading, "KVBlockManager", lambda *args, **kwargs: (args, kwargs))
    peaks: dict[str, int] = {}
    with start._record_peak("KVBlockManager", torch.device("cuda"), peaks):
        patched = vars(loading)["KVBlockManager"]
        assert patched(1, of=2) == ((1,), {"of": 2})
        assert peaks == {"KVBlockManager": 5}


@pytest.mark.parametrize("name", [start._ARRANGED, start._TRIED])
def test_patched_functions_exist(name: str) -> None:
    assert callable(getattr(loading, name))


def test_kernel_caches_are_moved_to_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    with knobs.cache.scope():
        start._keep_kernels_in(str(tmp_path))
        assert knobs.cache.dir == tempfile.gettempdir() == str(tmp_path)


def run_in_process(work: Callable[..., Any], *arguments: Any, time_limit_s: float) -> Any:
    """Run work in this process, in place of a subprocess."""
    assert time_limit_s > 0
    return work(*arguments)


def test_start_command(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders: list[str] = []
    monkeypatch.setattr(start, "run_in_subprocess", run_in_process)
    monkeypatch.setattr(start, "_keep_kernels_in", folders.append)
    report = tmp_path / "start.json"
    arguments = ["--hf-model-id", "tiny", "--device", device, "--repeat-runs", "2"]
    assert bench(["start", *arguments, "--max-batch-size", "3", "--json", str(report)]) == 0
    document = json.loads(report.read_text())
    assert document["config"] == {"model": "tiny", "repeat_runs": 2, "max_batch_size": 3}
    alone, cold, warm = document["tables"]["starts"]
    assert [row["runs"] for row in (alone, cold, warm)] == [2, 1, 2]
    assert all(row["ready_s"] > 0 for row in (alone, cold, warm))
    assert warm["overhead_s"] == warm["ready_s"] - alone["ready_s"]
    assert cold["first_text_s"] > 0
    assert (warm["peak_before_cache"] is None) == (device == "cpu")
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert "kernels on disk" in capsys.readouterr().out


def test_failed_subprocess_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "run_in_subprocess", lambda *_, **__: "OSError: the disk is full")
    with pytest.raises(SystemExit) as error:
        bench(["start", "--hf-model-id", "tiny", "--device", "cpu"])
    assert error.value.code == 2
    assert "the disk is full" in capsys.readouterr().err
