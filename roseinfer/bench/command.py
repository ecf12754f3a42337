"""Commands of the benchmarks: options, checks of files, measurement, tables, JSON and charts."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.bench import cases, charts
from roseinfer.cli.model_options import Parser, add_settings, parsed_fields
from roseinfer.config import AppendPolicy, EngineConfig, ServerConfig, require_device
from roseinfer.errors import BadArgument, ConfigError, UnsupportedModel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from roseinfer.bench.driver import Run
    from roseinfer.bench.report import Report


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Parse the arguments, call ``args.run(args)``, and print and write the report, if any."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(arguments)
    args.command = f"{parser.prog} {shlex.join(arguments)}"
    files = {name: getattr(args, name, None) for name in ("json", "plot", "chart")}
    try:
        for name, path in files.items():
            if path:
                _require_writable("chart" if name == "chart" else f"--{name}", path)
        if files["plot"]:
            charts.check(files["plot"])  # before an hour of measuring
        report = args.run(args)
    except (ConfigError, UnsupportedModel, BadArgument) as error:
        # In argparse's format, but without the usage: the options are spelt correctly.
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
    """Raise if a file cannot be written; an existing file keeps its content."""
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: no such directory; make the directory {path.parent} first"
        )
    if path.is_dir():
        raise ConfigError(f"{option} {path}: this is a directory; name a file")
    exists = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from error
    if not exists:
        path.unlink()


# The commands ``python -m roseinfer.benchmark_scheduler`` and ``benchmark_streaming``.


_SCHEDULER = """\
Measure the throughput and latency of requests that are served one after the other (naive), all
at once (offline), or with one more submitted before every step (online)."""
_STREAMING = """\
Measure the throughput and latency of requests that arrive over time and stream their tokens."""


def benchmark_scheduler(argv: Sequence[str] | None = None) -> int:
    parser = _parser("benchmark_scheduler", _SCHEDULER)
    add_settings(parser, EngineConfig)
    cases.add_runs(parser)
    parser.add_argument(
        "--mode", choices=[*cases.ARRIVAL_MODES, "all"], default="all", help="default: all"
    )
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
        raise ConfigError(f"--peers: peers get all requests at once; drop --mode {args.mode}")
    arrival_modes = (
        cases.ARRIVAL_MODES if args.mode == "all" else {args.mode: cases.ARRIVAL_MODES[args.mode]}
    )
    return _serve("scheduler", args, arrival_modes)


def _stream(args: argparse.Namespace) -> Report:
    if args.pretok and args.tokenize_workers:
        raise ConfigError("--pretok: leaves no prompts for --tokenize-workers; drop one of them")
    if args.peers is not None and args.submit_interval_ms:
        raise ConfigError("--peers: peers get all requests at once; drop --submit-interval-ms")
    return _serve("streaming", args, {"streaming": cases.paced(args.submit_interval_ms / 1e3)})


def _serve(
    benchmark: str, args: argparse.Namespace, arrival_modes: Mapping[str, Callable[[Run], None]]
) -> Report:
    """Check the options before torch is imported, then measure."""
    EngineConfig(**parsed_fields(args, EngineConfig))
    cases.sampling(args)
    if cases.validate_peers(args.peers) and (args.do_sample or not args.no_stop_on_eos):
        raise ConfigError(
            "--peers: all systems must do the same work, greedy decoding up to the full length; "
            "add --no-stop-on-eos, and drop --do-sample"
        )
    cases.require_model(args)
    cases.announce_import()
    from roseinfer.bench.serving import serve

    return serve(benchmark, args, arrival_modes)


if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[Parser]


def add_all(commands: Subparsers) -> None:
    """Add all benchmarks of ``python -m roseinfer.bench`` and their options, without torch."""
    for add in _COMMANDS:
        add(commands)


def _add_append(commands: Subparsers) -> None:
    parser = commands.add_parser("append", help="time appends to the KV cache, by path")
    option, int_at_least = parser.add_argument, cases.int_at_least
    option("--batch", type=int_at_least(1), nargs="+", default=[1, 8, 64, 256], help="sequences")
    option("--layers", type=int_at_least(1), default=12)
    option("--heads", type=int_at_least(1), default=12, help="KV heads")
    option("--head-dim", type=int_at_least(1), default=64)
    option("--block-size", type=int_at_least(2), default=64)
    option("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    dtypes = ("fp32", "fp16", "bf16")
    option("--dtype", choices=dtypes, help="default: bf16 on a GPU, fp32 on a CPU")
    option("--quick", action="store_true", help="few rounds, as a smoke test")
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_append)


def _append(args: argparse.Namespace) -> Report:
    AppendPolicy.from_env()  # raises for invalid variables
    _before_torch(args)
    from roseinfer.bench import append

    return append.run(args)


def _add_attention(commands: Subparsers) -> None:
    parser = commands.add_parser("attention", help="time attention, by shape")
    option, int_at_least = parser.add_argument, cases.int_at_least
    shapes = "such as 64x1024:32/8x128; for prompts, stored+new tokens: 8x0+2048:32/8x128"
    option("--shapes", type=cases.Shape.read, nargs="+", metavar="SHAPE", help=shapes)
    option("--block-size", type=int_at_least(1), default=64, help="%(default)s")
    option("--device", help="cpu, cuda or cuda:1 (default: cuda if there is a GPU)")
    option("--rounds", type=int_at_least(1), default=15, help="%(default)s")
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_attention)


def _attention(args: argparse.Namespace) -> Report:
    _before_torch(args)
    from roseinfer.bench import attention

    return attention.run(args)


def _before_torch(args: argparse.Namespace) -> None:
    if args.device is not None:
        require_device(args.device)
    cases.announce_import()


def _add_ladder(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "ladder", help="time each optimisation of decoding, added one by one"
    )
    cases.add_model(parser)
    option = cases.add_equal_requests(parser).add_argument
    ahead = cases.int_at_least(1)
    option("--run-ahead", type=ahead, default=4, help="steps in flight, on the last two rungs (4)")
    cases.add_runs(parser)
    cases.add_outputs(parser, plot=True)
    parser.set_defaults(run=_ladder)


def _ladder(args: argparse.Namespace) -> Report:
    EngineConfig(run_ahead=args.run_ahead)  # raises now instead of at the last two rungs
    cases.require_model(args)
    cases.announce_import()
    from roseinfer.bench import ladder

    return ladder.run(args)


def _add_peers(commands: Subparsers) -> None:
    parser = commands.add_parser("peers", help="compare with other systems on the same work")
    cases.add_model(parser)
    cases.add_equal_requests(parser)
    cases.add_runs(parser)
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_peers)


def _peers(args: argparse.Namespace) -> Report:
    EngineConfig()  # raises for invalid variables
    cases.require_model(args)
    cases.announce_import()
    from roseinfer.bench import peers

    return peers.run(args)


def _add_trace(commands: Subparsers) -> None:
    parser = commands.add_parser("trace", help="trace host and device in a decode step")
    cases.add_model(parser)
    option, int_at_least = parser.add_argument_group("work").add_argument, cases.int_at_least
    sizes = [1, 16, 64, 128, 256]
    option("--sequences", type=int_at_least(1), nargs="+", default=sizes, metavar="N")
    option("--context", type=int_at_least(1), default=128, help="tokens (%(default)s)")
    option("--steps", type=int_at_least(8), default=60, help="timed steps (%(default)s)")
    gpus = "GPUs that share the model (%(default)s)"
    option("--tensor-parallel-size", type=int_at_least(1), default=1, metavar="N", help=gpus)
    cases.add_outputs(parser, plot=True)
    parser.set_defaults(run=_trace)


def _trace(args: argparse.Namespace) -> Report:
    EngineConfig()  # raises for invalid variables
    cases.require_model(args)
    cases.announce_import()
    from roseinfer.bench import trace

    return trace.run(args)


def _add_start(commands: Subparsers) -> None:
    parser = commands.add_parser("start", help="time the start of an engine")
    cases.add_model(parser)
    add_settings(parser, EngineConfig)
    option, int_at_least = parser.add_argument_group("runs").add_argument, cases.int_at_least
    runs = "starts with compiled kernels on disk, and of the weights alone, alternating (3)"
    option("--repeat-runs", type=int_at_least(1), default=3, metavar="N", help=runs)
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_start)


def _start(args: argparse.Namespace) -> Report:
    EngineConfig(**parsed_fields(args, EngineConfig))  # raises now, not in another process
    cases.require_model(args)
    cases.announce_import()
    from roseinfer.bench import start

    return start.run(args)


def _add_speculation(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "speculation", help="compare decoding with and without speculation"
    )
    cases.add_model(parser)
    cases.add_equal_requests(parser)
    cases.add_runs(parser, peers=False)
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_speculation, batch=1)


def _speculation(args: argparse.Namespace) -> Report:
    EngineConfig()  # raises for invalid variables
    cases.require_model(args)
    cases.announce_import()
    from roseinfer.bench import speculation

    return speculation.run(args)


def _add_endpoint(commands: Subparsers) -> None:
    summary = "load any OpenAI-compatible server with many streaming clients"
    parser = commands.add_parser("endpoint", help=summary)
    option, int_at_least = parser.add_argument, cases.int_at_least
    option("--url", default="http://127.0.0.1:8000", help="%(default)s")
    option("--model", required=True, metavar="NAME", help="model name of the server")
    option(
        "--in-flight", type=int_at_least(1), default=128, metavar="N", help="clients (%(default)s)"
    )
    rate = (
        "requests per second of all clients together (default: each sends the next one when it has "
        "read a completion)"
    )
    option("--rate", type=int_at_least(1), metavar="R", help=rate)
    option("--prompt-tokens", type=int_at_least(1), default=32, metavar="N", help="%(default)s")
    option("--max-new-tokens", type=int_at_least(2), default=512, metavar="N", help="%(default)s")
    option("--seconds", type=int_at_least(1), default=60, metavar="S", help="timed (%(default)s)")
    option("--warmup-seconds", type=int_at_least(1), default=3, metavar="S", help="%(default)s")
    processes = "client processes, so that clients do not delay each other (%(default)s)"
    option("--processes", type=int_at_least(1), default=4, metavar="N", help=processes)
    cases.add_outputs(parser, plot=False)
    parser.set_defaults(run=_endpoint)


def _endpoint(args: argparse.Namespace) -> Report:
    ServerConfig()  # raises for an empty API key
    cases.announce_import()
    from roseinfer.bench import endpoint

    return endpoint.run(args)


def _add_plot(commands: Subparsers) -> None:
    parser = commands.add_parser("plot", help="draw the chart of a report written by --json")
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
