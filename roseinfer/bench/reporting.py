"""What benchmarks say: tables for people, JSON for programs, and which machine it was.

A row of a table is one of the frozen dataclasses here. Its fields are the JSON names and,
with spaces, the column headings; None is a number that this machine cannot supply.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roseinfer.bench.timing import Timing


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts without which a time means nothing."""

    device: str
    host: str
    cpus: int
    torch_threads: int
    python: str
    torch: str
    triton: str | None
    transformers: str | None


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    caption: str
    rows: Sequence[Any]
    """Frozen dataclasses, all of one type."""
    printed: bool = True
    """Otherwise for programs and charts alone."""

    def text(self) -> str:
        headings = [field.name.replace("_", " ") for field in fields(self.rows[0])]
        values = [[getattr(row, field.name) for field in fields(row)] for row in self.rows]
        columns = zip(*values, strict=True)
        numeric = [not any(isinstance(value, str) for value in column) for column in columns]
        body = tabulate(
            [[_cell(value) for value in row] for row in values],
            headings,
            tablefmt="github",
            colalign=["right" if is_number else "left" for is_number in numeric],
            disable_numparse=True,
        )
        return f"{self.caption}\n\n{body}"


@dataclass(frozen=True, slots=True)
class Report:
    benchmark: str
    command: str
    date: str
    machine: Machine
    config: Mapping[str, Any]
    facts: Mapping[str, float]
    """What was measured once for the whole run."""
    tables: tuple[Table, ...]
    """One without rows is left out of the text and is an empty list in the JSON."""

    def text(self) -> str:
        machine = ", ".join(f"{key} {value}" for key, value in asdict(self.machine).items())
        config = ", ".join(f"{key} {value}" for key, value in self.config.items())
        facts = ", ".join(f"{key.replace('_', ' ')} {_cell(v)}" for key, v in self.facts.items())
        head = f"$ {self.command}\n{self.date}\n{machine}\n{config}\n{facts}"
        return "\n\n".join([head, *self._printed()])

    def _printed(self) -> list[str]:
        return [table.text() for table in self.tables if table.printed and table.rows]

    def document(self) -> dict[str, Any]:
        """What is written as JSON, and what charts are drawn from."""
        return {
            "benchmark": self.benchmark,
            "command": self.command,
            "date": self.date,
            "machine": asdict(self.machine),
            "config": dict(self.config),
            "facts": dict(self.facts),
            "tables": {table.name: [asdict(row) for row in table.rows] for table in self.tables},
        }

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.document(), indent=2, default=str) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class WriteRow:
    """Moving data once: a layer's tokens or, in a clone, every sequence's block of all layers."""

    batch: int
    path_that_ran: str
    host_us: float
    host_min_us: float
    device_us: float | None
    """A call's kernels, each at its median duration by the profiler, summed."""
    graph_us: float | None
    """Time per call inside a replayed CUDA graph of many calls."""
    floor_us: float
    times_floor: float
    """Device time over floor; host time on a CPU, which is its own device."""

    @classmethod
    def of(
        cls,
        batch: int,
        path: str,
        host: Timing,
        device_us: float | None,
        graph: Timing | None,
        floor_us: float,
    ) -> WriteRow:
        return cls(
            batch=batch,
            path_that_ran=path,
            host_us=host.median_us,
            host_min_us=host.min_us,
            device_us=device_us,
            graph_us=graph and graph.median_us,
            floor_us=floor_us,
            times_floor=(device_us or host.median_us) / floor_us,
        )


@dataclass(frozen=True, slots=True)
class StepRow:
    """One token for every sequence in all layers. Planning is host time, steps end to end."""

    batch: int
    path_that_ran: str
    plan_us: float | None
    plan_min_us: float | None
    plan_mean_us: float | None
    """Over the tokens of a whole block: once in it, all sequences roll over to a new block."""
    per_layer_us: float
    per_layer_min_us: float
    per_layer_speedup: float
    grouped_us: float | None
    grouped_min_us: float | None
    grouped_speedup: float | None

    @classmethod
    def of(
        cls,
        batch: int,
        path: str,
        *,
        loop: Timing,
        per_layer: Timing,
        grouped: Timing | None,
        plan: Timing | None,
        plan_block: Timing | None,
    ) -> StepRow:
        """``loop`` is the baseline, which has itself nothing to plan and nothing to group."""
        return cls(
            batch=batch,
            path_that_ran=path,
            plan_us=plan and plan.median_us,
            plan_min_us=plan and plan.min_us,
            plan_mean_us=plan_block and plan_block.median_us,
            per_layer_us=per_layer.median_us,
            per_layer_min_us=per_layer.min_us,
            per_layer_speedup=loop.median_us / per_layer.median_us,
            grouped_us=grouped and grouped.median_us,
            grouped_min_us=grouped and grouped.min_us,
            grouped_speedup=grouped and loop.median_us / grouped.median_us,
        )


@dataclass(frozen=True, slots=True)
class UnavailableRow:
    path: str
    not_available: str


@dataclass(frozen=True, slots=True)
class TargetRow:
    target: str
    path_that_ran: str
    wanted: str
    measured: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """Planning a step, without tensors, with one of three quantities varied."""

    varied: str
    sequences: int
    tokens_each: int
    blocks_in_use: int
    plan_us: float
    us_per_sequence: float


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A pool filled by sequences, their block lists included."""

    blocks_in_use: int
    build_s: float
    bytes_per_block: float


@dataclass(frozen=True, slots=True)
class SchedulingRow:
    running: int
    waiting: int
    step_us: float
    us_per_running: float


def judge(
    path: str, measured: Mapping[str, float | None], limits: Mapping[str, str]
) -> list[TargetRow]:
    """One verdict per limit, ``<= 25`` or ``>= 40``; never a guess for what has no number."""
    rows = []
    for target, wanted in limits.items():
        sense, bound = wanted.split()
        value = measured[target]
        if value is None:
            verdict = "not measured"
        else:
            met = value <= float(bound) if sense == "<=" else value >= float(bound)
            verdict = "met" if met else "missed"
        rows.append(TargetRow(target, path, wanted, value, verdict))
    return rows


def this_machine(device: torch.device) -> Machine:
    host = _cpu_name()
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else host,
        host=host,
        cpus=os.cpu_count() or 1,
        torch_threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        transformers=_version("transformers"),
    )


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cell(value: object) -> str:
    """Three digits that matter, and no more of a measured number than can be believed."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    for least, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if value >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3g}"
