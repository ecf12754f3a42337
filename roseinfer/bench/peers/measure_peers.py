"""The times of other systems, each in a process of its own, so that failures stay there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING

from roseinfer.bench.peers.isolation import in_process
from roseinfer.bench.peers.peer_systems import SET_UP
from roseinfer.how_far import counted, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.bench.peers.peer_job import Generate, PeerJob
    from roseinfer.bench.serving.figures import ThroughputRow
    from roseinfer.bench.serving.memory_floor import MemoryFloor

CAPTION = """\
The same prompts on other systems, all at once, the likeliest token up to the full length;
medians over the repeated runs. prefill ms: for one token each. ms per step: the time for all
tokens less that, by the tokens between; of ours, the median decode step, and prefill ms is all
else. times floor: such a step over the time to read the weights once, and the keys and values
stored in the middle of the run. set-up that a system does in every call counts."""
TIME_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class PeerRow:
    system: str
    version: str | None = None
    total_s: float | None = None
    completion_tok_per_s: float | None = None
    prefill_ms: float | None = None
    ms_per_step: float | None = None
    """None of a single token, or where noise exceeds the steps after the first."""
    times_floor: float | None = None
    not_available: str | None = None


def compare(
    names: Sequence[str], job: PeerJob, ours: ThroughputRow, floor: MemoryFloor
) -> list[PeerRow]:
    """Return our own row, then that of every peer; no rows without peers."""
    if not names:
        return []
    step_ms, floor_ms = ours.decode_step_ms, job.floor_ms(floor)
    own = PeerRow(
        system=f"roseinfer, {ours.run}",
        total_s=ours.total_s,
        completion_tok_per_s=ours.completion_tok_per_s,
        prefill_ms=(ours.total_s - (ours.decode_s or 0)) * 1e3,
        ms_per_step=step_ms,
        times_floor=step_ms / floor_ms if step_ms else None,
    )
    return [own, *others(names, job, floor_ms)]


def others(names: Sequence[str], job: PeerJob, floor_ms: float) -> list[PeerRow]:
    """Return the row of every peer, or the reason why there is nothing in it."""
    rows = []
    for name in counted(names, "other systems", "measured"):
        rows.append(_of(name, job, floor_ms))
        tell(rows[-1])
    return rows


def tell(row: PeerRow) -> None:
    """Say what was measured: who breaks off a long run gets no table."""
    if row.prefill_ms is None:
        say(f"{row.system}: {row.not_available}")
    else:
        step = f"{row.ms_per_step:.3f}" if row.ms_per_step else "?"
        say(f"{row.system}: prefill {row.prefill_ms:.1f} ms, a step {step} ms")


def _of(name: str, job: PeerJob, floor_ms: float) -> PeerRow:
    if find_spec(distribution(name)) is None:
        missing = f"not installed: pip install {distribution(name)}"
        return PeerRow(name, not_available=missing)
    found = in_process(measure_peer, name, job, floor_ms, time_limit_s=TIME_LIMIT_S)
    return found if isinstance(found, PeerRow) else PeerRow(name, not_available=found)


def distribution(name: str) -> str:
    return name.partition("-")[0]


def measure_peer(name: str, job: PeerJob, floor_ms: float) -> PeerRow:
    version = metadata.version(distribution(name))
    return measure(name, version, SET_UP[name](job), job, floor_ms)


def measure(
    system: str, version: str | None, generate: Generate, job: PeerJob, floor_ms: float
) -> PeerRow:
    new = job.max_new_tokens
    total_s = _median_s(generate, new, job, job.warmup_runs)
    first_s = _median_s(generate, 1, job, 1) if new > 1 else total_s
    step_ms = (total_s - first_s) * 1e3 / ((new - 1) * job.rounds) if new > 1 else 0.0
    measured = step_ms > 0
    return PeerRow(
        system=system,
        version=version,
        total_s=total_s,
        completion_tok_per_s=len(job.prompts) * new / total_s,
        prefill_ms=first_s * 1e3,
        ms_per_step=step_ms if measured else None,
        times_floor=step_ms / floor_ms if measured else None,
    )


def _median_s(generate: Generate, new_tokens: int, job: PeerJob, warmup_runs: int) -> float:
    runs = [_seconds(generate, new_tokens, job) for _ in range(warmup_runs + job.repeat_runs)]
    return median(runs[warmup_runs:])


def _seconds(generate: Generate, new_tokens: int, job: PeerJob) -> float:
    begin = time.perf_counter()
    made = generate(new_tokens)
    elapsed = time.perf_counter() - begin
    if made != (wanted := len(job.prompts) * new_tokens):
        raise RuntimeError(f"it made {made} tokens of {wanted}")
    return elapsed
