"""The benchmarks of ``python -m roseinfer.bench`` and their options, checked without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.bench import arguments, charts
from roseinfer.bench.attention.attention_shape import Shape
from roseinfer.bench.equal_requests import add_equal_requests
from roseinfer.config import AppendPolicy, EngineConfig, ServerConfig, require_device

if TYPE_CHECKING:
    import argparse

    from roseinfer.bench.reporting import Report
    from roseinfer.cli.parser import Parser

    Subparsers = argparse._SubParsersAction[Parser]


def add_all(commands: Subparsers) -> None:
    for add in _COMMANDS:
        add(commands)


def _add_append(commands: Subparsers) -> None:
    parser = commands.add_parser("append", help="what an append to the KV cache costs, by path")
    option, whole = parser.add_argument, arguments.whole
    option("--batch", type=whole(1), nargs="+", default=[1, 8, 64, 256], help="sequences")
    option("--layers", type=whole(1), default=12)
    option("--heads", type=whole(1), default=12, help="KV heads")
    option("--head-dim", type=whole(1), default=64)
    option("--block-size", type=whole(2), default=64)
    option("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    dtypes = ("fp32", "fp16", "bf16")
    option("--dtype", choices=dtypes, help="default: bf16 on a GPU, fp32 on a CPU")
    option("--quick", action="store_true", help="few repeats: to see that it works")
    arguments.add_outputs(parser, plot=False)
    parser.set_defaults(run=_append)


def _append(args: argparse.Namespace) -> Report:
    AppendPolicy.from_env()  # refuses a bad variable
    _before_torch(args)
    from roseinfer.bench.appends import append_bench

    return append_bench.run(args)


def _add_attention(commands: Subparsers) -> None:
    parser = commands.add_parser("attention", help="what attending costs, by shape")
    option, whole = parser.add_argument, arguments.whole
    shapes = "as 64x1024:32/8x128, or of prompts, stored and new tokens: 8x0+2048:32/8x128"
    option("--shapes", type=Shape.read, nargs="+", metavar="SHAPE", help=shapes)
    option("--block-size", type=whole(1), default=64, help="%(default)s")
    option("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    option("--rounds", type=whole(1), default=15, help="%(default)s")
    arguments.add_outputs(parser, plot=False)
    parser.set_defaults(run=_attention)


def _attention(args: argparse.Namespace) -> Report:
    _before_torch(args)
    from roseinfer.bench.attention import attention_bench

    return attention_bench.run(args)


def _before_torch(args: argparse.Namespace) -> None:
    if args.device is not None:
        require_device(args.device)
    arguments.say_importing()


def _add_ladder(commands: Subparsers) -> None:
    parser = commands.add_parser("ladder", help="what each optimisation of decoding is worth")
    arguments.add_model(parser)
    option = add_equal_requests(parser).add_argument
    ahead = arguments.whole(1)
    option("--run-ahead", type=ahead, default=4, help="steps, on the last two rungs (4)")
    arguments.add_runs(parser)
    arguments.add_outputs(parser, plot=True)
    parser.set_defaults(run=_ladder)


def _ladder(args: argparse.Namespace) -> Report:
    EngineConfig(run_ahead=args.run_ahead)  # refused now, not at the last two rungs
    arguments.require_model(args)
    arguments.say_importing()
    from roseinfer.bench import ladder

    return ladder.run(args)


def _add_peers(commands: Subparsers) -> None:
    parser = commands.add_parser("peers", help="the same work on other systems, side by side")
    arguments.add_model(parser)
    add_equal_requests(parser)
    arguments.add_runs(parser)
    arguments.add_outputs(parser, plot=False)
    parser.set_defaults(run=_peers)


def _peers(args: argparse.Namespace) -> Report:
    EngineConfig()  # refuses bad variables
    arguments.require_model(args)
    arguments.say_importing()
    from roseinfer.bench.peers import peers_bench

    return peers_bench.run(args)


def _add_trace(commands: Subparsers) -> None:
    parser = commands.add_parser("trace", help="what host and device do in a decode step")
    arguments.add_model(parser)
    option, whole = parser.add_argument_group("work").add_argument, arguments.whole
    sizes = [1, 16, 64, 128, 256]
    option("--sequences", type=whole(1), nargs="+", default=sizes, metavar="N")
    option("--context", type=whole(1), default=128, help="tokens (%(default)s)")
    option("--steps", type=whole(8), default=60, help="timed (%(default)s)")
    gpus = "GPUs that compute the model together (%(default)s)"
    option("--tensor-parallel-size", type=whole(1), default=1, metavar="N", help=gpus)
    arguments.add_outputs(parser, plot=True)
    parser.set_defaults(run=_trace)


def _trace(args: argparse.Namespace) -> Report:
    EngineConfig()  # refuses bad variables
    arguments.require_model(args)
    arguments.say_importing()
    from roseinfer.bench import step_trace

    return step_trace.run(args)


def _add_start(commands: Subparsers) -> None:
    parser = commands.add_parser("start", help="how long an engine takes to be ready")
    arguments.add_model(parser)
    arguments.add_engine(parser)
    option, whole = parser.add_argument_group("runs").add_argument, arguments.whole
    runs = "starts with kernels on disk, and of the weights alone, in turns (3)"
    option("--repeat-runs", type=whole(1), default=3, metavar="N", help=runs)
    arguments.add_outputs(parser, plot=False)
    parser.set_defaults(run=_start)


def _start(args: argparse.Namespace) -> Report:
    EngineConfig(**arguments.engine_settings(args))  # refused now, not in another process
    arguments.require_model(args)
    arguments.say_importing()
    from roseinfer.bench.starting import start_bench

    return start_bench.run(args)


def _add_speculation(commands: Subparsers) -> None:
    parser = commands.add_parser("speculation", help="what drafts are worth, and what they cost")
    arguments.add_model(parser)
    add_equal_requests(parser)
    arguments.add_runs(parser, peers=False)
    arguments.add_outputs(parser, plot=False)
    parser.set_defaults(run=_speculation, batch=1)


def _speculation(args: argparse.Namespace) -> Report:
    EngineConfig()  # refuses bad variables
    arguments.require_model(args)
    arguments.say_importing()
    from roseinfer.bench import speculation_bench

    return speculation_bench.run(args)


def _add_endpoint(commands: Subparsers) -> None:
    what = "what any server with an API like OpenAI's streams to many clients"
    parser = commands.add_parser("endpoint", help=what)
    option, whole = parser.add_argument, arguments.whole
    option("--url", default="http://127.0.0.1:8000", help="%(default)s")
    option("--model", required=True, metavar="NAME", help="as the server names it")
    option("--in-flight", type=whole(1), default=128, metavar="N", help="texts (%(default)s)")
    option("--prompt-tokens", type=whole(1), default=32, metavar="N", help="%(default)s")
    option("--max-new-tokens", type=whole(2), default=512, metavar="N", help="%(default)s")
    option("--seconds", type=whole(1), default=60, metavar="S", help="measured (%(default)s)")
    option("--warmup-seconds", type=whole(1), default=3, metavar="S", help="%(default)s")
    processes = "that ask, so that they do not hold up each other (%(default)s)"
    option("--processes", type=whole(1), default=4, metavar="N", help=processes)
    arguments.add_outputs(parser, plot=False)
    parser.set_defaults(run=_endpoint)


def _endpoint(args: argparse.Namespace) -> Report:
    ServerConfig()  # refuses an empty key
    arguments.say_importing()
    from roseinfer.bench.endpoint import endpoint_bench

    return endpoint_bench.run(args)


def _add_plot(commands: Subparsers) -> None:
    parser = commands.add_parser("plot", help="draw the chart of a report that --json wrote")
    parser.add_argument("report", type=Path)
    parser.add_argument("chart", type=Path, metavar="chart.png")
    parser.set_defaults(run=_plot)


def _plot(args: argparse.Namespace) -> None:
    charts.redraw(args.report, args.chart)


_COMMANDS = (
    *(_add_append, _add_attention, _add_ladder),
    *(_add_peers, _add_trace, _add_start, _add_speculation),
    *(_add_endpoint, _add_plot),
)
