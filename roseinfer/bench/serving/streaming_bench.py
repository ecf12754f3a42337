"""``python -m roseinfer.benchmark_streaming``: what those who read the texts as they grow see."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from roseinfer.bench import options
from roseinfer.bench.command import run_command
from roseinfer.bench.serving.driving import paced
from roseinfer.bench.serving.serving import Serving
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.bench.reporting import Report

DESCRIPTION = """\
Submit requests over time, hand their tokens over as they come, and say how long each reader
waited for what."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m roseinfer.benchmark_streaming", description=DESCRIPTION
    )
    options.add_model(parser)
    options.add_requests(parser)
    _add_streams(parser)
    options.add_prefill(options.add_engine(parser))
    options.add_runs(parser)
    options.add_outputs(parser, plot=True)
    parser.set_defaults(run=_measure)
    return run_command(parser, argv)


def _add_streams(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("streams").add_argument
    add(
        "--prompt-repeats",
        type=options.counts,
        default=(1,),
        metavar="N[,N...]",
        help="times that the prompt is repeated within a request's; with several numbers the "
        "requests take them in turns (default: 1)",
    )
    add(
        "--tokenize-workers",
        type=options.whole(0),
        default=0,
        metavar="N",
        help="threads that tokenize prompts before they are due (default: 0, when submitted)",
    )
    add(
        "--submit-interval-ms",
        type=options.milliseconds,
        default=0.0,
        metavar="MS",
        help="time between two requests (default: 0, all at once)",
    )
    add(
        "--stream-interval",
        type=options.whole(1),
        default=1,
        metavar="N",
        help="tokens handed over at a time, after the first (default: 1)",
    )


def _measure(args: argparse.Namespace, command: str) -> Report:
    if args.pretok and args.tokenize_workers:
        raise ConfigError("--pretok leaves nothing for --tokenize-workers to do: drop one of them")
    if args.peers is not None and args.submit_interval_ms:
        raise ConfigError("--peers are given all requests at once: drop --submit-interval-ms")
    drive = paced(args.submit_interval_ms / 1e3)
    return Serving(args, args.prompt_repeats).report("streaming", command, {"streaming": drive})
