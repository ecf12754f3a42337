"""``ladder``: the worth of each optimisation, all of them measured on the same work."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from roseinfer.bench import arguments
from roseinfer.bench.model_source import ModelSource, collect
from roseinfer.bench.reporting import Report, Table
from roseinfer.bench.rungs import rungs
from roseinfer.bench.serving import peers
from roseinfer.bench.serving.driving import offline, perform
from roseinfer.bench.serving.figures import ThroughputRow, percentile_ms
from roseinfer.bench.serving.memory_floor import MemoryFloor, memory_floor
from roseinfer.bench.serving.prompts import Work, random_prompts
from roseinfer.bench.timing import WrongPath
from roseinfer.config import EngineConfig, SamplingParams
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.models.loading import resolve_device

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import torch

    from roseinfer.bench.rungs import Rung
    from roseinfer.bench.serving.record import RunRecord
    from roseinfer.llm import LLM

_RUNGS = """\
Decoding, all sequences in step; each rung keeps what those before it have. step ms: the median
decode step. times floor: decode time over the time to read the weights once a step and the
stored keys and values once a token. itl at boundary p99 ms: of the gaps in which a sequence
goes on in a new block. same tokens: the share of requests that got the tokens of the first
rung; another order of additions may round another way, but in float32 all are the same."""
_NUMBERS = {
    "batch": (1, 64),
    "prompt_tokens": (1, 128),
    "max_new_tokens": (2, 256),
    "block_size": (1, 64),
}
"""For each option the least that it may be, and what it is where nothing is said."""


@dataclass(frozen=True, slots=True)
class RungRow:
    rung: str
    step_ms: float | None = None
    tok_per_s: float | None = None
    times_floor: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    itl_at_boundary_p99_ms: float | None = None
    """This is None where no sequence went on in a new block."""
    same_tokens: float | None = None
    start_up_s: float | None = None
    not_available: str | None = None


@dataclass(frozen=True, slots=True)
class Ground:
    """The parts that every rung shares, known once the first one is built."""

    work: Work
    floor: MemoryFloor
    dtype: torch.dtype


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("ladder", help="what each optimisation of decoding is worth")
    arguments.add_model(parser)
    group = parser.add_argument_group("work")
    whole = arguments.whole
    for name, (least, default) in _NUMBERS.items():
        option = "--" + name.replace("_", "-")
        group.add_argument(option, type=whole(least), default=default, help="%(default)s")
    group.add_argument(
        "--run-ahead", type=whole(1), default=4, help="steps, on the last two rungs (%(default)s)"
    )
    arguments.add_runs(parser)
    arguments.add_outputs(parser, plot=True)
    parser.set_defaults(run=_measure)


def _measure(args: argparse.Namespace) -> Report:
    EngineConfig(run_ahead=args.run_ahead)  # refused now, not at the last two rungs
    others = peers.named(args.peers)
    ladder = Ladder(args)
    rows = ladder.climb(rungs(args.run_ahead))
    ground = ladder.ground
    if ladder.best is None or ground is None:
        raise ConfigError(f"no rung could be measured: {rows[0].not_available}")
    compared: list[peers.PeerRow] = []
    if others:
        job = peers.PeerJob.of(args, ladder.source, ground.work, args.batch)
        compared = peers.compare(others, job, ladder.best)
    # Tokens of all sequences that a decode step attends to, in the middle of a run.
    stored = round(args.batch * (args.prompt_tokens + args.max_new_tokens / 2))
    asked = {name: getattr(args, name) for name in (*_NUMBERS, "warmup_runs", "repeat_runs")}
    return Report(
        "ladder",
        args.command,
        ladder.device,
        {**ladder.source.described(ground.dtype), **asked},
        (Table("rungs", _RUNGS, rows), Table("peers", peers.CAPTION, compared)),
        {"floor_ms": ground.floor.seconds(1, stored) * 1e3, **ground.floor.facts()},
    )


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of every rung: all requests run at once, from the same step on, each alone."""
    blocks = -(-(args.prompt_tokens + args.max_new_tokens) // args.block_size) + 1
    return {
        "max_batch_size": args.batch,
        "block_size": args.block_size,
        "kv_cache_tokens": args.batch * blocks * args.block_size,
        "prefix_cache": False,
        "prefill_max_batch_size": args.batch,
        "prefill_max_tokens": args.batch * args.prompt_tokens,
    }


class Ladder:
    """Climbs, and keeps what later rungs are compared with."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.source = ModelSource.of(args)
        self.device = resolve_device(args.device)
        self.ground: Ground | None = None
        self.best: ThroughputRow | None = None
        """The figures of the last rung that ran."""
        self._first_tokens: list[list[int]] | None = None

    def climb(self, all_rungs: Sequence[Rung]) -> list[RungRow]:
        rows = []
        with tqdm(all_rungs, desc="ladder", unit="rung", disable=None) as bar:
            for rung in bar:
                bar.set_postfix_str(rung.name)
                try:
                    rows.append(self._measure(rung))
                except (RoseinferError, RuntimeError) as error:
                    rows.append(RungRow(rung.name, not_available=" ".join(str(error).split())))
                collect()
        return rows

    def _measure(self, rung: Rung) -> RungRow:
        if reason := rung.why_not_on(self.device):
            raise ConfigError(reason)
        begin = time.perf_counter()
        llm = self.source.llm({**settings(self._args), **rung.settings})
        start_up_s = time.perf_counter() - begin
        self.ground = self.ground or self._ground(llm)
        return self._row(rung, self._records(llm, rung, self.ground.work), start_up_s)

    def _ground(self, llm: LLM) -> Ground:
        args, model = self._args, llm.engine.sessions.model
        positions = model.shape.max_length
        if args.prompt_tokens + args.max_new_tokens > positions:
            raise ConfigError(
                f"{args.prompt_tokens} + {args.max_new_tokens} tokens are more than the "
                f"model's {positions} positions"
            )
        prompts = random_prompts(args.batch, args.prompt_tokens, model.shape.vocab_size)
        greedy = SamplingParams(max_new_tokens=args.max_new_tokens, ignore_eos=True)
        floor = memory_floor(self.source.skeleton(), llm)
        return Ground(Work(prompts, greedy), floor, model.dtype)

    def _records(self, llm: LLM, rung: Rung, work: Work) -> list[RunRecord]:
        records = []
        for _ in range(self._args.warmup_runs + self._args.repeat_runs):
            before = Counter(llm.engine.sessions.kv.path_counts)
            record = perform(llm.engine, work, offline)
            _check_path(rung, Counter(llm.engine.sessions.kv.path_counts) - before, record, llm)
            records.append(record)
        return records[self._args.warmup_runs :]

    def _row(self, rung: Rung, records: list[RunRecord], start_up_s: float) -> RungRow:
        assert self.ground is not None
        floor = self.ground.floor
        row = ThroughputRow.over([ThroughputRow.of(rung.name, each, floor) for each in records])
        self.best = row
        tokens = records[-1].token_ids
        first = self._first_tokens = self._first_tokens or tokens
        gaps = [[g for seen in r.timelines for g in seen.inter_token_latencies] for r in records]
        spikes = [boundary_gaps(record, self._args.block_size) for record in records]
        return RungRow(
            rung=rung.name,
            step_ms=row.decode_step_ms,
            tok_per_s=row.decode_tok_per_s,
            times_floor=row.times_floor,
            itl_p50_ms=median(percentile_ms(each, 50) for each in gaps),
            itl_p99_ms=median(percentile_ms(each, 99) for each in gaps),
            itl_at_boundary_p99_ms=(
                median(percentile_ms(each, 99) for each in spikes) if all(spikes) else None
            ),
            same_tokens=sum(map(list.__eq__, first, tokens)) / len(tokens),
            start_up_s=start_up_s,
        )


def _check_path(rung: Rung, grown: Counter[str], record: RunRecord, llm: LLM) -> None:
    """Raise unless the rung's path wrote most layers of most decode steps."""
    writes = len(record.decode_steps()) * llm.engine.sessions.model.shape.num_layers
    if rung.path is not None and grown[rung.path] * 2 <= writes:
        raise WrongPath(
            f"{rung.path} was to write the cache, and ran {grown[rung.path]} times where "
            f"{writes} layers were written: {dict(grown)}"
        )


def boundary_gaps(record: RunRecord, block_size: int) -> list[float]:
    """The gaps before tokens whose step stored a sequence's first token of a block.

    The step that brings generated token ``n`` stores position ``prompt + n - 1``.
    """
    return list(
        chain.from_iterable(
            seen.gaps_before(lambda n, length=length: (length + n - 1) % block_size == 0)  # type: ignore[misc]
            for seen, length in zip(record.timelines, record.prompt_lengths, strict=True)
        )
    )
