"""What every benchmark's command does: check its files, measure, print, write and draw."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.bench import cases, charts
from roseinfer.cli.model_options import Parser, add_settings, given_of
from roseinfer.config import AppendPolicy, EngineConfig, ServerConfig, require_device
from roseinfer.errors import BadArgument, ConfigError, UnsupportedModel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from roseinfer.bench.driving import Run
    from roseinfer.bench.report import Report


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse the arguments and call ``args.run(args)``, which returns the report if there is one."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    args.command = f"{parser.prog} {shlex.join(words)}"
    files = {name: getattr(args, name, None) for name in ("json", "plot", "chart")}
    try:
        for name, path in files.items():
            if path:
                _require_writable("chart" if name == "chart" else f"--{name}", path)
        if files["plot"]:
            charts.check(files["plot"])  # before an hour of measuring, not after it
        report = args.run(args)
    except (ConfigError, UnsupportedModel, BadArgument) as error:
        # As argparse says it, but without the usage: the spelling of the options is right.
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if report is None:
        return 0
    print(report.text())
    if files["json"]:
        report.write_json(files["json"])
    if files["plot"]:
        charts.draw(report.document, files["plot"])
    return 0


def _require_writable(option: str, path: Path) -> None:
    """Raise where no file could be written; one that is there already keeps its content."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: make the directory {path.parent} first")
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a directory, and a file is to be written")
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from error
    if not there:
        path.unlink()


# The commands ``python -m roseinfer.benchmark_scheduler`` and ``benchmark_streaming``.


_SCHEDULER = """\
Serve requests one after the other (naive), all at once (offline), or one more before every
step (online), and say how long it took."""
_STREAMING = """\
Submit requests over time, hand their tokens over as they come, and say how long each reader
waited for what."""


def benchmark_scheduler(argv: Sequence[str] | None = None) -> int:
    parser = _parser("benchmark_scheduler", _SCHEDULER)
    add_settings(parser, EngineConfig)
    cases.add_runs(parser)
    parser.add_argument("--mode", choices=[*cases.WAYS, "all"], default="all", help="default: all")
    cases.add_outputs(parser, plot=True)
    parser.set_defaults(run=_schedule, tokenize_workers=0, stream_interval=1, prompt_repeats=(1,))
    return run_command(parser, argv)


def benchmark_streaming(argv: Sequence[str] | None = None) -> int:
    parser = _parser("benchmark_streaming", _STREAMING)
    cases.add_streams(parser)
    add_settings(parser, EngineConfig)
    cases.add_runs(parser)
    cases.add_outputs(parser, plot=True)
    parser.set_defaults(run=_stream)
    return run_command(parser, argv)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"python -m roseinfer.{name}", description=description)
    cases.add_model(parser)
    cases.add_requests(parser)
    return parser


def _schedule(args: argparse.Namespace) -> Report:
    if args.peers is not None and args.mode not in ("offline", "all"):
        raise ConfigError(f"--peers are given all requests at once: drop --mode {args.mode}")
    ways = cases.WAYS if args.mode == "all" else {args.mode: cases.WAYS[args.mode]}
    return _serve("scheduler", args, ways)


def _stream(args: argparse.Namespace) -> Report:
    if args.pretok and args.tokenize_workers:
        raise ConfigError("--pretok leaves nothing for --tokenize-workers to do: drop one of them")
    if args.peers is not None and args.submit_interval_ms:
        raise ConfigError("--peers are given all requests at once: drop --submit-interval-ms")
    return _serve("streaming", args, {"streaming": cases.paced(args.submit_interval_ms / 1e3)})


def _serve(
    benchmark: str, args: argparse.Namespace, ways: Mapping[str, Callable[[Run], None]]
) -> Report:
    """Refuse what makes no sense before torch is imported, then measure."""
    EngineConfig(**given_of(args, EngineConfig))
    cases.sampling(args)
    if cases.peers_named(args.peers) and (args.do_sample or not args.no_stop_on_eos):
        raise ConfigError(
            "--peers: all systems are to do the same work, which is the likeliest token up "
            "to the full length: add --no-stop-on-eos, and leave --do-sample"
        )
    cases.require_model(args)
    cases.say_importing()
    from roseinfer.bench.serving import serve

    return serve(benchmark, args, ways)


if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[Parser]


def add_all(commands: Subparsers) -> None:
    """The benchmarks of ``python -m roseinfer.bench`` and their options, checked without torch."""
    for add in _COMMANDS:
        add(commands)


def _add_append(commands: Subparsers) -> None:
    parser = commands.add_parser("append", help="what an append to the KV cache costs, by path")
    option, whole = parser.add_argument, cases.whole
    option("--batch", type=whole(1), nargs="+", default=[1, 8, 64, 256], help="sequences")
    option("--layers", type=whole(1), default=12)
    option("--heads", type=whole(1), default=12, help="KV heads")
    option("--head-dim", type=whole(1), default=64)
    option("--block-size", type=whole(2), default=64)
    option("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    dtypes = ("fp32", "fp16", "bf16")
    option("--dtype", choices=dtypes, help="default: bf16 on a GPU, fp32 on a CPU")
    option("--quick", action="store_true", help="few repeats: to see that it works")
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_append)


def _append(args: argparse.Namespace) -> Report:
    AppendPolicy.from_env()  # refuses a bad variable
    _before_torch(args)
    from roseinfer.bench import append

    return append.run(args)


def _add_attention(commands: Subparsers) -> None:
    parser = commands.add_parser("attention", help="what attending costs, by shape")
    option, whole = parser.add_argument, cases.whole
    shapes = "as 64x1024:32/8x128, or of prompts, stored and new tokens: 8x0+2048:32/8x128"
    option("--shapes", type=cases.Shape.read, nargs="+", metavar="SHAPE", help=shapes)
    option("--block-size", type=whole(1), default=64, help="%(default)s")
    option("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    option("--rounds", type=whole(1), default=15, help="%(default)s")
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_attention)


def _attention(args: argparse.Namespace) -> Report:
    _before_torch(args)
    from roseinfer.bench import attention

    return attention.run(args)


def _before_torch(args: argparse.Namespace) -> None:
    if args.device is not None:
        require_device(args.device)
    cases.say_importing()


def _add_ladder(commands: Subparsers) -> None:
    parser = commands.add_parser("ladder", help="what each optimisation of decoding is worth")
    cases.add_model(parser)
    option = cases.add_equal_requests(parser).add_argument
    ahead = cases.whole(1)
    option("--run-ahead", type=ahead, default=4, help="steps, on the last two rungs (4)")
    cases.add_runs(parser)
    cases.add_outputs(parser, plot=True)
    parser.set_defaults(run=_ladder)


def _ladder(args: argparse.Namespace) -> Report:
    EngineConfig(run_ahead=args.run_ahead)  # refused now, not at the last two rungs
    cases.require_model(args)
    cases.say_importing()
    from roseinfer.bench import ladder

    return ladder.run(args)


def _add_peers(commands: Subparsers) -> None:
    parser = commands.add_parser("peers", help="the same work on other systems, side by side")
    cases.add_model(parser)
    cases.add_equal_requests(parser)
    cases.add_runs(parser)
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_peers)


def _peers(args: argparse.Namespace) -> Report:
    EngineConfig()  # refuses bad variables
    cases.require_model(args)
    cases.say_importing()
    from roseinfer.bench import peers

    return peers.run(args)


def _add_trace(commands: Subparsers) -> None:
    parser = commands.add_parser("trace", help="what host and device do in a decode step")
    cases.add_model(parser)
    option, whole = parser.add_argument_group("work").add_argument, cases.whole
    sizes = [1, 16, 64, 128, 256]
    option("--sequences", type=whole(1), nargs="+", default=sizes, metavar="N")
    option("--context", type=whole(1), default=128, help="tokens (%(default)s)")
    option("--steps", type=whole(8), default=60, help="timed (%(default)s)")
    gpus = "GPUs that compute the model together (%(default)s)"
    option("--tensor-parallel-size", type=whole(1), default=1, metavar="N", help=gpus)
    cases.add_outputs(parser, plot=True)
    parser.set_defaults(run=_trace)


def _trace(args: argparse.Namespace) -> Report:
    EngineConfig()  # refuses bad variables
    cases.require_model(args)
    cases.say_importing()
    from roseinfer.bench import trace

    return trace.run(args)


def _add_start(commands: Subparsers) -> None:
    parser = commands.add_parser("start", help="how long an engine takes to be ready")
    cases.add_model(parser)
    add_settings(parser, EngineConfig)
    option, whole = parser.add_argument_group("runs").add_argument, cases.whole
    runs = "starts with kernels on disk, and of the weights alone, in turns (3)"
    option("--repeat-runs", type=whole(1), default=3, metavar="N", help=runs)
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_start)


def _start(args: argparse.Namespace) -> Report:
    EngineConfig(**given_of(args, EngineConfig))  # refused now, not in another process
    cases.require_model(args)
    cases.say_importing()
    from roseinfer.bench import start

    return start.run(args)


def _add_speculation(commands: Subparsers) -> None:
    parser = commands.add_parser("speculation", help="what drafts are worth, and what they cost")
    cases.add_model(parser)
    cases.add_equal_requests(parser)
    cases.add_runs(parser, peers=False)
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_speculation, batch=1)


def _speculation(args: argparse.Namespace) -> Report:
    EngineConfig()  # refuses bad variables
    cases.require_model(args)
    cases.say_importing()
    from roseinfer.bench import speculation

    return speculation.run(args)


def _add_endpoint(commands: Subparsers) -> None:
    what = "what any server with an API like OpenAI's streams to many clients"
    parser = commands.add_parser("endpoint", help=what)
    option, whole = parser.add_argument, cases.whole
    option("--url", default="http://127.0.0.1:8000", help="%(default)s")
    option("--model", required=True, metavar="NAME", help="as the server names it")
    option("--in-flight", type=whole(1), default=128, metavar="N", help="texts (%(default)s)")
    option("--prompt-tokens", type=whole(1), default=32, metavar="N", help="%(default)s")
    option("--max-new-tokens", type=whole(2), default=512, metavar="N", help="%(default)s")
    option("--seconds", type=whole(1), default=60, metavar="S", help="measured (%(default)s)")
    option("--warmup-seconds", type=whole(1), default=3, metavar="S", help="%(default)s")
    processes = "that ask, so that they do not hold up each other (%(default)s)"
    option("--processes", type=whole(1), default=4, metavar="N", help=processes)
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_endpoint)


def _endpoint(args: argparse.Namespace) -> Report:
    ServerConfig()  # refuses an empty key
    cases.say_importing()
    from roseinfer.bench import endpoint

    return endpoint.run(args)


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
