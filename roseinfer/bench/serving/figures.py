"""The figures of a run, and the medians of several. docs/benchmarks.md says what each one is."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.bench.serving.memory_floor import MemoryFloor
    from roseinfer.bench.serving.record import RunRecord, StepRecord, Timeline

Row = TypeVar("Row", bound="ThroughputRow | LatencyRow")


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """All requests of a run together."""

    run: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    total_s: float
    decode_s: float | None
    decode_step_ms: float | None
    completion_tok_per_s: float
    decode_tok_per_s: float | None
    total_tok_per_s: float
    fastest_s: float
    slowest_s: float
    times_floor: float | None

    @classmethod
    def of(cls, name: str, record: RunRecord, floor: MemoryFloor) -> ThroughputRow:
        prompt, completion = sum(record.prompt_lengths), sum(map(len, record.token_ids))
        total_s = record.steps[-1].ended - record.began
        steps = record.decode_steps()
        decode_s = sum(step.ended - step.began for step in steps)
        decoded = sum(len(step.requests) for step in steps)
        return cls(
            run=name,
            requests=len(record.timelines),
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_s=total_s,
            decode_s=decode_s or None,
            decode_step_ms=median(step.pass_ms for step in steps) if steps else None,
            completion_tok_per_s=completion / total_s,
            decode_tok_per_s=decoded / decode_s if steps else None,
            total_tok_per_s=(prompt + completion) / total_s,
            fastest_s=total_s,
            slowest_s=total_s,
            times_floor=decode_s / decode_floor_s(record, steps, floor) if steps else None,
        )


def throughput(name: str, records: Sequence[RunRecord], floor: MemoryFloor) -> ThroughputRow:
    """Return every figure's median over the runs."""
    runs = [ThroughputRow.of(name, record, floor) for record in records]
    totals = [run.total_s for run in runs]
    return replace(median_row(runs), fastest_s=min(totals), slowest_s=max(totals))


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """One kind of waiting, over the requests of a run; ITL over all of their gaps."""

    run: str
    what: str
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    mean_ms: float | None = None

    @classmethod
    def of(cls, run: str, what: str, seconds: Sequence[float]) -> LatencyRow:
        if not seconds:
            return cls(run, what)
        p50, p95, p99 = np.percentile(seconds, (50, 95, 99)).tolist()
        return cls(run, what, p50 * 1e3, p95 * 1e3, p99 * 1e3, fmean(seconds) * 1e3)


_WAITS: dict[str, Callable[[Timeline], Sequence[float | None]]] = {
    "TTFT": lambda seen: [seen.tokens[0] - seen.arrived],
    "TPOT": lambda seen: [seen.time_per_output_token],
    "ITL": lambda seen: seen.gaps(),
    "latency": lambda seen: [seen.tokens[-1] - seen.arrived],
    "queue wait": lambda seen: [seen.started - seen.arrived],
}


def latencies(run: str, timelines: Sequence[Timeline]) -> list[LatencyRow]:
    return [
        LatencyRow.of(run, what, [s for seen in timelines for s in waits(seen) if s is not None])
        for what, waits in _WAITS.items()
    ]


def decode_floor_s(record: RunRecord, steps: Sequence[StepRecord], floor: MemoryFloor) -> float:
    """Return the time to read the weights once a step, and once a token what is stored by then."""
    wanted = {id(step) for step in steps}
    lengths = list(record.prompt_lengths)
    stored = 0
    for step in record.steps:
        for number in step.requests:
            stored += lengths[number] if id(step) in wanted else 0
            lengths[number] += 1
    return floor.seconds(sum(step.passes for step in steps), stored)


def median_row(rows: Sequence[Row]) -> Row:
    """Take each field's median; texts, and what was never measured, are the first row's."""
    values: dict[str, Any] = {}
    for field in fields(rows[0]):
        found = [getattr(row, field.name) for row in rows]
        first = found[0]
        numbers = isinstance(first, (int, float)) and None not in found
        values[field.name] = type(first)(median(found)) if numbers else first
    return type(rows[0])(**values)
