"""The command ``ladder``: the rungs, a table, a chart with the memory floor drawn in."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from roseinfer.bench import options, reporting
from roseinfer.bench.model_source import ModelSource
from roseinfer.bench.reporting import Report, Table
from roseinfer.bench.serving import peers
from roseinfer.bench.steps.ladder import Ladder, LadderConfig
from roseinfer.bench.steps.rungs import rungs
from roseinfer.config import EngineConfig
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    import torch

    from roseinfer.bench.serving.figures import ThroughputRow
    from roseinfer.bench.serving.work import Work

_RUNGS = """\
Decoding, all sequences in step; each rung keeps what those before it have. step ms: the median
decode step. times floor: decode time over the time to read the weights once a step and the
stored keys and values once a token. itl at boundary p99 ms: of the gaps in which a sequence
goes on in a new block. same tokens: the share of requests that got the tokens of the first
rung; another order of additions may round another way, but in float32 all are the same."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("ladder", help="what each optimisation of decoding is worth")
    options.add_model(parser)
    group = parser.add_argument_group("work")
    whole = options.whole
    group.add_argument("--batch", type=whole(1), default=64, help="sequences (%(default)s)")
    group.add_argument("--prompt-tokens", type=whole(1), default=128, help="%(default)s")
    group.add_argument("--max-new-tokens", type=whole(2), default=256, help="%(default)s")
    group.add_argument("--block-size", type=whole(1), default=64, help="%(default)s")
    group.add_argument(
        "--run-ahead", type=whole(1), default=4, help="steps, on the last two rungs (%(default)s)"
    )
    options.add_runs(parser)
    options.add_outputs(parser, plot=True)
    parser.set_defaults(run=_measure)


def _measure(args: argparse.Namespace, command: str) -> Report:
    config = LadderConfig(
        ModelSource.of(args),
        args.batch,
        args.prompt_tokens,
        args.max_new_tokens,
        args.block_size,
        args.warmup_runs,
        args.repeat_runs,
    )
    EngineConfig(run_ahead=args.run_ahead)  # refused now, not at the last two rungs
    others = peers.named(args.peers)
    ladder = Ladder(config)
    rows = ladder.climb(rungs(args.run_ahead))
    ground = ladder.ground
    if ladder.best is None or ground is None:
        raise ConfigError(f"no rung could be measured: {rows[0].not_available}")
    return Report(
        benchmark="ladder",
        command=command,
        date=reporting.now(),
        machine=reporting.this_machine(ladder.device),
        config=_described(config, ground.dtype),
        facts={
            "floor_ms": ground.floor.seconds(1, config.mean_stored) * 1e3,
            **ground.floor.facts(),
        },
        tables=(
            Table("rungs", _RUNGS, rows),
            Table("peers", peers.CAPTION, _compared(others, config, ground.work, ladder.best)),
        ),
    )


def _described(config: LadderConfig, dtype: torch.dtype) -> dict[str, Any]:
    values = asdict(config)
    del values["source"]
    return {**config.source.described(dtype), **values}


def _compared(
    names: tuple[str, ...], config: LadderConfig, work: Work, ours: ThroughputRow
) -> list[peers.PeerRow]:
    if not names:
        return []
    job = peers.PeerJob.of(
        config.source, work, config.batch, config.warmup_runs, config.repeat_runs
    )
    return peers.compare(names, job, peers.PeerRow.ours(ours))
