"""The append benchmark: its report, and the check that a series ran on its path."""

from __future__ import annotations

import io
import json
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import torch

from roseinfer import AppendPolicy, Path
from roseinfer.bench import append
from roseinfer.bench.__main__ import main
from roseinfer.bench.append import (
    NO_TRITON,
    POLICIES,
    AppendConfig,
    AppendRig,
    StepRow,
    WriteRow,
    require_path,
)
from roseinfer.bench.report import UnavailableRow
from roseinfer.bench.timing import (
    WrongPath,
    busy_us_per_call,
    median_over_rounds,
    one_thread,
    time_calls,
)

if TYPE_CHECKING:
    import pathlib

SIZES = ["--layers", "2", "--heads", "2", "--head-dim", "8", "--block-size", "4"]
SMALL = ["append", "--quick", "--batch", "1", "3", *SIZES]
TORCH_WRITES = {"torch_scalar", "torch_vector", "torch_gather"}
ROWS = {
    "writes": WriteRow,
    "steps": StepRow,
    "clones": WriteRow,
    "unavailable": UnavailableRow,
}
CONFIG = AppendConfig(
    batches=(2,),
    layers=2,
    heads=2,
    head_dim=8,
    block_size=4,
    device=torch.device("cpu"),
    dtype=torch.float32,
    rounds=1,
)


class Outcome:
    """Output and JSON report of one run of the command."""

    def __init__(self, arguments: list[str], file: pathlib.Path) -> None:
        printed = io.StringIO()
        with redirect_stdout(printed):
            assert main([*arguments, "--json", str(file)]) == 0
        self.text = printed.getvalue()
        self.json: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        self.tables: dict[str, list[dict[str, Any]]] = self.json["tables"]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    file = tmp_path_factory.mktemp("bench") / "append.json"
    return Outcome([*SMALL, "--device", "cpu"], file)


def test_report_has_the_machine_and_the_command(on_cpu: Outcome) -> None:
    assert on_cpu.json["benchmark"] == "append"
    assert on_cpu.json["command"].startswith("python -m roseinfer.bench append --quick --batch 1 3")
    assert on_cpu.json["date"][:2] == "20"
    assert on_cpu.json["facts"]["copy_bandwidth_gb_per_s"] > 0
    assert on_cpu.json["config"].items() >= {"layers": 2, "heads": 2, "device": "cpu"}.items()
    machine = on_cpu.json["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["torch_threads"] == 1
    versions = {"python", "torch", "triton", "transformers"}
    assert set(machine) == {"device", "host", "cpus", "torch_threads"} | versions


def test_json_rows_have_the_documented_fields(on_cpu: Outcome) -> None:
    assert set(on_cpu.tables) == set(ROWS)
    for name, rows in on_cpu.tables.items():
        for row in rows:
            assert list(row) == [field.name for field in fields(ROWS[name])]


def test_every_batch_and_runnable_path_is_measured(on_cpu: Outcome) -> None:
    for name in ("writes", "steps"):
        measured = Counter((row["batch"], row["measured_path"]) for row in on_cpu.tables[name])
        assert measured == Counter((b, p) for b in (1, 3) for p in {"per_token", *TORCH_WRITES})
    clones = {(row["batch"], row["measured_path"]) for row in on_cpu.tables["clones"]}
    assert clones == {(1, "clone_torch"), (3, "clone_torch")}


def test_unavailable_paths_are_listed_with_the_reason(on_cpu: Outcome) -> None:
    rows = {row["path"]: row["not_available"] for row in on_cpu.tables["unavailable"]}
    assert set(rows) == {path.value for path in Path if path.needs_triton}
    assert all("Triton" in reason for reason in rows.values())
    listed = on_cpu.text.partition("cannot be timed on this machine.\n")[2].splitlines()
    assert len([line for line in listed if line.startswith("- ")]) == len(set(rows.values()))
    assert all(len(line) <= 100 for line in listed)
    assert all(path in " ".join(listed) for path in rows)


def test_cpu_rows_have_no_device_time(on_cpu: Outcome) -> None:
    for row in on_cpu.tables["writes"]:
        assert row["device_us"] is None
        assert row["graph_us"] is None
        assert row["floor_ratio"] == pytest.approx(row["host_us"] / row["floor_us"])
        assert row["host_us"] > 0


def test_floor_counts_keys_and_values_read_and_written(on_cpu: Outcome) -> None:
    bandwidth = on_cpu.json["facts"]["copy_bandwidth_gb_per_s"] * 1e9
    row = next(row for row in on_cpu.tables["writes"] if row["batch"] == 3)
    assert row["floor_us"] == pytest.approx(4 * 3 * 2 * 8 * 4 / bandwidth * 1e6)


def test_speedups_are_against_the_per_token_loop_of_the_batch(on_cpu: Outcome) -> None:
    rows = on_cpu.tables["steps"]
    for row in rows:
        loop = next(
            r for r in rows if (r["batch"], r["measured_path"]) == (row["batch"], "per_token")
        )
        speedup = loop["per_layer_us"] / row["per_layer_us"]
        assert row["per_layer_speedup"] == pytest.approx(speedup)
        if row is loop:
            assert row["grouped_us"] is row["plan_us"] is None
        else:
            assert row["grouped_speedup"] == pytest.approx(loop["per_layer_us"] / row["grouped_us"])
            assert row["plan_us"] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_rows_have_device_times_for_every_path(tmp_path: pathlib.Path) -> None:
    outcome = Outcome([*SMALL, "--device", "cuda"], tmp_path / "append.json")
    assert outcome.tables["unavailable"] == []
    for row in outcome.tables["writes"]:
        assert row["device_us"] > 0
        assert row["graph_us"] > 0
    assert all(row["device_us"] > 0 for row in outcome.tables["clones"])


@pytest.mark.parametrize("build", [append.layer_write, append.grouped_step, append.per_layer_step])
def test_series_on_another_path_raises(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layers_per_group = 1 if build is append.per_layer_step else CONFIG.layers
    rig = AppendRig(CONFIG, 2, layers_per_group)
    assert build(rig, Path.TORCH_SCALAR).sampler(wait=True)() > 0
    monkeypatch.setitem(POLICIES, Path.TORCH_VECTOR, NO_TRITON)
    with pytest.raises(WrongPath, match=r"torch_vector: .*torch_scalar"):
        build(rig, Path.TORCH_VECTOR).sampler(wait=True)()


def test_plan_for_another_path_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, Path.TORCH_GATHER, NO_TRITON)
    with pytest.raises(WrongPath, match=r"torch_gather: .*torch_scalar"):
        append.plan_us(AppendRig(CONFIG, 2, CONFIG.layers), Path.TORCH_GATHER, steps=3)


def test_copies_one_by_one_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one = AppendPolicy(triton=False, batched_copy_on_write=False)
    monkeypatch.setitem(POLICIES, Path.CLONE_TORCH, one_by_one)
    with pytest.raises(WrongPath, match=r"clone_torch: .* none"):
        append.clone_us(AppendRig(CONFIG, 2, CONFIG.layers), Path.CLONE_TORCH, steps=2)


def test_command_fails_when_a_policy_selects_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, Path.TORCH_VECTOR, NO_TRITON)
    with pytest.raises(WrongPath, match=r"torch_vector: .*torch_scalar"):
        main([*SMALL, "--device", "cpu"])


def test_require_path_checks_the_path_and_the_exact_count() -> None:
    counts: Counter[Any] = Counter({Path.PER_TOKEN: 5})
    with require_path(counts, Path.TORCH_SCALAR, 2):
        counts[Path.TORCH_SCALAR] += 2
    with pytest.raises(WrongPath), require_path(counts, Path.TORCH_SCALAR, 2):
        counts[Path.TORCH_SCALAR] += 1
    with pytest.raises(WrongPath), require_path(counts, Path.TORCH_SCALAR, 1):
        counts.update([Path.TORCH_SCALAR, Path.PER_TOKEN])


def test_rounds_alternate_and_the_first_is_discarded() -> None:
    order: list[str] = []

    def sampler(name: str) -> float:
        order.append(name)
        return float(len(order))

    times = median_over_rounds({"a": lambda: sampler("a"), "b": lambda: sampler("b")}, 3, "test")
    assert order == ["a", "b"] * 4
    assert times == {"a": 5, "b": 6}


def test_host_time_waits_for_the_device_only_with_wait() -> None:
    events: list[str] = []
    time_calls(lambda: events.append("call"), 2, lambda: events.append("sync"))
    assert events == ["sync", "call", "call", "sync"]
    events.clear()
    time_calls(lambda: events.append("call"), 2, lambda: events.append("sync"), wait=True)
    assert events == ["sync", "call", "call", "sync", "sync"]


def test_one_thread_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_device_time_sums_the_median_times_of_kernels() -> None:
    two_calls = [("index", 2.0), ("index", 2.0), ("index", 90.0), ("index", 2.0), ("add", 1.0)]
    assert busy_us_per_call([*two_calls, ("add", 3.0)], calls=2) == 2 * 2.0 + 2.0
    assert busy_us_per_call([], calls=2) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "1"], "at least 2"),
        (["--batch", "0"], "at least 1"),
        (["--layers", "many"], "invalid whole_number value: 'many'"),
        (["--json", "nowhere/append.json"], "make the directory nowhere first"),
    ],
)
def test_invalid_options_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--device", "cuda"])
    assert "no GPU here; device='cpu' works" in capsys.readouterr().err
