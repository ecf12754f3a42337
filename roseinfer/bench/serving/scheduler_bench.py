"""``python -m roseinfer.benchmark_scheduler``: how requests are served, by how they come."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from roseinfer.bench import options
from roseinfer.bench.command import run_command
from roseinfer.bench.serving.driving import WAYS
from roseinfer.bench.serving.serving import Serving
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.bench.reporting import Report

DESCRIPTION = """\
Serve requests one after the other (naive), all at once (offline), or one more before every
step (online), and say how long it took."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m roseinfer.benchmark_scheduler", description=DESCRIPTION
    )
    options.add_model(parser)
    options.add_requests(parser)
    options.add_engine(parser)
    options.add_runs(parser)
    parser.add_argument("--mode", choices=[*WAYS, "all"], default="all", help="default: all")
    options.add_outputs(parser, plot=True)
    parser.set_defaults(run=_measure, tokenize_workers=0, stream_interval=1)
    return run_command(parser, argv)


def _measure(args: argparse.Namespace, command: str) -> Report:
    if args.peers is not None and args.mode not in ("offline", "all"):
        raise ConfigError(f"--peers are given all requests at once: drop --mode {args.mode}")
    ways = WAYS if args.mode == "all" else {args.mode: WAYS[args.mode]}
    return Serving(args, repeats=(1,)).report("scheduler", command, ways)
