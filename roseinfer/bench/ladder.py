"""``ladder``: the effect of each optimisation of decoding, measured on the same work.

Each rung adds one optimisation to those before it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roseinfer.bench import cases, peers
from roseinfer.bench.cases import equal_requests_config, offline, workload_config
from roseinfer.bench.driver import (
    LatencyRow,
    MemoryFloor,
    ThroughputRow,
    Workload,
    median_row,
    memory_floor,
    random_prompts,
    require_positions,
    run_workload,
    throughput,
)
from roseinfer.bench.model_source import ModelSource, free_memory
from roseinfer.bench.peers import PeerJob
from roseinfer.bench.report import Report, Table, unavailable_table
from roseinfer.bench.timing import WrongPath, triton_skip_reason
from roseinfer.config import AppendPolicy
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.models.loading import resolve_device
from roseinfer.paths import Path
from roseinfer.sampling_params import SamplingParams
from roseinfer.terminal import track_items

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    import torch

    from roseinfer.bench.driver import RunRecord
    from roseinfer.llm import LLM

_RUNGS = """\
Decoding, all sequences in step; each rung adds to those before it. ms: the median decode step;
least, most: that of the fastest and of the slowest run. floors: decode time over the time to read
the weights once per step and the stored keys and values once per token. spikes: p99 in ms of the
gaps in which a sequence begins a new block. same: share of the requests with the tokens of the
first rung; another order of additions may round differently, but in float32 all are the same."""
_HEADINGS = {
    "rung": "rung",
    "step_ms": "ms",
    "fastest_ms": "least",
    "slowest_ms": "most",
    "tok_per_s": "tok/s",
    "floor_ratio": "floors",
    "itl_at_boundary_p99_ms": "spikes",
    "same_tokens": "same",
}
_SLOW = {"resident_decode": False, "cuda_graph": False, "run_ahead": 0, "fused_model": False}
"""Engine settings of the optimisations of later rungs, all off."""
_NEVER = 1 << 30
"""Minimum batch of a path that is never taken: more tokens than any batch has."""


@dataclass(frozen=True, slots=True)
class RungRow:
    """Times of one rung."""

    rung: str
    step_ms: float | None = None
    fastest_ms: float | None = None
    """Decode step of the fastest run; ``step_ms`` is from the median one."""
    slowest_ms: float | None = None
    tok_per_s: float | None = None
    floor_ratio: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    itl_at_boundary_p99_ms: float | None = None
    """p99 of the gaps at block boundaries; None if no sequence began a new block."""
    same_tokens: float | None = None
    not_available: str | None = None


@dataclass(frozen=True, slots=True)
class LadderContext:
    """Workload, memory floor and dtype of all rungs, from the first engine that is built."""

    work: Workload
    floor: MemoryFloor
    dtype: torch.dtype


def run(args: argparse.Namespace) -> Report:
    ladder = Ladder(args)
    rows = ladder.measure_rungs(rungs(args.run_ahead))
    shared = ladder.shared
    if ladder.best is None or shared is None:
        raise ConfigError(f"no rung can be measured: {rows[0].not_available}")
    job = PeerJob.of(args, ladder.source, shared.work, args.batch)
    names = cases.validate_peers(args.peers)
    compared = peers.compare(names, job, ladder.best, shared.floor)
    return Report(
        "ladder",
        args.command,
        ladder.device,
        {**ladder.source.describe(shared.dtype), **workload_config(args)},
        (
            Table("rungs", _RUNGS, rows, headings=_HEADINGS),
            unavailable_table((row.rung, row.not_available) for row in rows if row.not_available),
            Table("peers", peers.CAPTION, compared),
        ),
        {"floor_ms": job.floor_ms(shared.floor), **shared.floor.facts()},
    )


@dataclass(frozen=True, slots=True)
class Rung:
    """Engine settings of one rung."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``EngineConfig``, in addition to those of all rungs."""
    path: Path | None = None
    """Path that must write the cache in most steps, else the rung is invalid; None for any."""

    def device_skip_reason(self, device: torch.device) -> str:
        """Return the reason why the rung cannot be measured on a device; empty if it can."""
        resident = self.settings.get("resident_decode", False)
        if resident or (self.path is not None and self.path.needs_triton):
            return triton_skip_reason(device)
        return ""


def rungs(run_ahead: int) -> tuple[Rung, ...]:
    per_token = AppendPolicy(
        batched=False,
        batched_rollover=False,
        batched_copy_on_write=False,
        identity=False,
        scalar_position=False,
        triton=False,
    )
    batched = replace(per_token, batched=True)
    rollover = replace(batched, batched_rollover=True, batched_copy_on_write=True)
    scalar = replace(rollover, identity=True, scalar_position=True)
    triton = replace(scalar, triton=True, triton_full_batch_min_batch=_NEVER)
    full_batch = replace(triton, triton_full_batch_min_batch=None)
    resident = {**_SLOW, "resident_decode": True}
    graph = {**resident, "cuda_graph": True}
    ahead = {**graph, "run_ahead": run_ahead}
    return (
        _append("per-token append", Path.PER_TOKEN, per_token),
        _append("batched append", Path.TORCH_GATHER, batched),
        _append("batched rollover", Path.TORCH_GATHER, rollover),
        _append("identity and scalar position", Path.TORCH_SCALAR, scalar),
        _append("Triton", Path.TRITON_IDENTITY_POS, triton),
        _append("Triton full-batch", Path.TRITON_FULL_BATCH, full_batch),
        Rung("one plan per step", _SLOW),
        Rung("fused append and attention", resident),
        Rung("CUDA graph", graph),
        Rung(f"run-ahead of {run_ahead}", ahead),
        Rung("fused model", {**ahead, "fused_model": True}),
    )


def _append(name: str, path: Path, policy: AppendPolicy) -> Rung:
    """Return a rung of an append path, with a block list for every layer."""
    return Rung(name, {**_SLOW, "per_layer_kv": True, "append_policy": policy}, path)


class Ladder:
    """Measurement of rungs, with the shared context and the first rung's tokens."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.source = ModelSource.of(args)
        self.device = resolve_device(args.device)
        self.shared: LadderContext | None = None
        self.best: ThroughputRow | None = None
        """Figures of the last measured rung; None before the first."""
        self._first_tokens: list[list[int]] | None = None

    def measure_rungs(self, all_rungs: Sequence[Rung]) -> list[RungRow]:
        rows = []
        for rung in track_items(all_rungs, "ladder", "rungs"):
            try:
                rows.append(self._measure(rung))
            except (RoseinferError, RuntimeError) as error:
                rows.append(RungRow(rung.name, not_available=" ".join(str(error).split())))
            free_memory()
        return rows

    def _measure(self, rung: Rung) -> RungRow:
        if reason := rung.device_skip_reason(self.device):
            raise ConfigError(reason)
        args = self._args
        llm = self.source.llm({**equal_requests_config(args), **rung.settings})
        shared = self.shared = self.shared or self._context(llm)
        records = [
            _perform(rung, llm, shared.work) for _ in range(args.warmup_runs + args.repeat_runs)
        ][args.warmup_runs :]
        figures = self.best = throughput(rung.name, records, shared.floor)
        runs = [ThroughputRow.of(rung.name, record, shared.floor) for record in records]
        steps_ms = [run.decode_step_ms for run in runs if run.decode_step_ms]
        gaps = [
            [gap for timeline in record.timelines for gap in timeline.gaps()] for record in records
        ]
        itl = median_row([LatencyRow.of(rung.name, "ITL", each) for each in gaps])
        at_boundary = [boundary_gaps(record, args.block_size) for record in records]
        spikes = median_row([LatencyRow.of(rung.name, "spikes", each) for each in at_boundary])
        tokens = records[-1].token_ids
        first = self._first_tokens = self._first_tokens or tokens
        return RungRow(
            rung=rung.name,
            step_ms=figures.decode_step_ms,
            fastest_ms=min(steps_ms, default=None),
            slowest_ms=max(steps_ms, default=None),
            tok_per_s=figures.decode_tok_per_s,
            floor_ratio=figures.floor_ratio,
            itl_p50_ms=itl.p50_ms,
            itl_p99_ms=itl.p99_ms,
            itl_at_boundary_p99_ms=spikes.p99_ms,
            same_tokens=sum(map(list.__eq__, first, tokens)) / len(tokens),
        )

    def _context(self, llm: LLM) -> LadderContext:
        args, model = self._args, llm.engine.sequence_runner.model
        advice = "lower --prompt-tokens or --max-new-tokens"
        require_positions(llm.engine, args.prompt_tokens, args.max_new_tokens, advice)
        prompts = random_prompts(args.batch, args.prompt_tokens, model.shape.vocab_size)
        greedy = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
        floor = memory_floor(self.source.skeleton(), llm)
        return LadderContext(Workload(prompts, greedy), floor, model.dtype)


def _perform(rung: Rung, llm: LLM, work: Workload) -> RunRecord:
    """Run the work; raise unless the rung's path wrote most layers of most decode steps."""
    runner = llm.engine.sequence_runner
    before = Counter(runner.kv.path_counts)
    record = run_workload(llm.engine, work, offline)
    counts = Counter(runner.kv.path_counts) - before
    writes = len(record.decode_steps()) * runner.model.shape.num_layers
    if rung.path is not None and counts[rung.path] * 2 <= writes:
        raise WrongPath(
            f"{rung.path}: expected most of {writes} writes, actual {counts[rung.path]}; all "
            f"counts: {dict(counts)}"
        )
    return record


def boundary_gaps(record: RunRecord, block_size: int) -> list[float]:
    """Return the gaps before tokens whose step stored the first token of a block.

    The step that returns generated token ``n`` stores position ``prompt + n - 1``.
    """

    def begins_block(prompt: int, token: int) -> bool:
        return (prompt + token - 1) % block_size == 0

    gaps = []
    for timeline, length in zip(record.timelines, record.prompt_lengths, strict=True):
        gaps += timeline.gaps(partial(begins_block, length))
    return gaps
