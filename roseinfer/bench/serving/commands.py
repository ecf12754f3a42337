"""The commands ``python -m roseinfer.benchmark_scheduler`` and ``benchmark_streaming``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.bench import arguments
from roseinfer.bench.command import run_command
from roseinfer.bench.serving.ways import WAYS, paced
from roseinfer.cli.parser import Parser
from roseinfer.config import EngineConfig
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from roseinfer.bench.reporting import Report
    from roseinfer.bench.serving.driving import Run

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


def benchmark_streaming(argv: Sequence[str] | None = None) -> int:
    parser = _parser("benchmark_streaming", _STREAMING)
    arguments.add_streams(parser)
    arguments.add_prefill(arguments.add_engine(parser))
    arguments.add_runs(parser)
    arguments.add_outputs(parser, plot=True)
    parser.set_defaults(run=_stream)
    return run_command(parser, argv)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"python -m roseinfer.{name}", description=description)
    arguments.add_model(parser)
    arguments.add_requests(parser)
    return parser


def _schedule(args: argparse.Namespace) -> Report:
    if args.peers is not None and args.mode not in ("offline", "all"):
        raise ConfigError(f"--peers are given all requests at once: drop --mode {args.mode}")
    ways = WAYS if args.mode == "all" else {args.mode: WAYS[args.mode]}
    return _serve("scheduler", args, ways)


def _stream(args: argparse.Namespace) -> Report:
    if args.pretok and args.tokenize_workers:
        raise ConfigError("--pretok leaves nothing for --tokenize-workers to do: drop one of them")
    if args.peers is not None and args.submit_interval_ms:
        raise ConfigError("--peers are given all requests at once: drop --submit-interval-ms")
    return _serve("streaming", args, {"streaming": paced(args.submit_interval_ms / 1e3)})


def _serve(
    benchmark: str, args: argparse.Namespace, ways: Mapping[str, Callable[[Run], None]]
) -> Report:
    """Refuse what makes no sense before torch is imported, then measure."""
    EngineConfig(**arguments.engine_settings(args))
    arguments.sampling(args)
    if arguments.peers_named(args.peers) and (args.do_sample or not args.no_stop_on_eos):
        raise ConfigError(
            "--peers: all systems are to do the same work, which is the likeliest token up "
            "to the full length: add --no-stop-on-eos, and leave --do-sample"
        )
    arguments.require_model(args)
    arguments.say_importing()
    from roseinfer.bench.serving.serve import serve

    return serve(benchmark, args, ways)
