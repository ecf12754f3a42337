"""The commands ``python -m roseinfer.benchmark_scheduler`` and ``benchmark_streaming``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from roseinfer.bench import arguments
from roseinfer.bench.command import run_command
from roseinfer.bench.serving.driving import WAYS, paced
from roseinfer.bench.serving.serving import Serving
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.bench.reporting import Report

_SCHEDULER = """\
Serve requests one after the other (naive), all at once (offline), or one more before every
step (online), and say how long it took."""
_STREAMING = """\
Submit requests over time, hand their tokens over as they come, and say how long each reader
waited for what."""


def benchmark_scheduler(argv: Sequence[str] | None = None) -> int:
    parser = _parser("benchmark_scheduler", _SCHEDULER)
    arguments.add_engine(parser)
    arguments.add_runs(parser)
    parser.add_argument("--mode", choices=[*WAYS, "all"], default="all", help="default: all")
    arguments.add_outputs(parser, plot=True)
    parser.set_defaults(run=_schedule, tokenize_workers=0, stream_interval=1, prompt_repeats=(1,))
    return run_command(parser, argv)


def _schedule(args: argparse.Namespace) -> Report:
    if args.peers is not None and args.mode not in ("offline", "all"):
        raise ConfigError(f"--peers are given all requests at once: drop --mode {args.mode}")
    ways = WAYS if args.mode == "all" else {args.mode: WAYS[args.mode]}
    return Serving(args).report("scheduler", ways)


def benchmark_streaming(argv: Sequence[str] | None = None) -> int:
    parser = _parser("benchmark_streaming", _STREAMING)
    arguments.add_streams(parser)
    arguments.add_prefill(arguments.add_engine(parser))
    arguments.add_runs(parser)
    arguments.add_outputs(parser, plot=True)
    parser.set_defaults(run=_stream)
    return run_command(parser, argv)


def _stream(args: argparse.Namespace) -> Report:
    if args.pretok and args.tokenize_workers:
        raise ConfigError("--pretok leaves nothing for --tokenize-workers to do: drop one of them")
    if args.peers is not None and args.submit_interval_ms:
        raise ConfigError("--peers are given all requests at once: drop --submit-interval-ms")
    return Serving(args).report("streaming", {"streaming": paced(args.submit_interval_ms / 1e3)})


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m roseinfer.{name}", description=description)
    arguments.add_model(parser)
    arguments.add_requests(parser)
    return parser
