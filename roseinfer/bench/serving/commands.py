"""The commands ``python -m roseinfer.benchmark_scheduler`` and ``benchmark_streaming``."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from itertools import cycle, islice
from typing import TYPE_CHECKING

from tqdm import tqdm

from roseinfer.bench import arguments
from roseinfer.bench.command import run_command
from roseinfer.bench.model_source import ModelSource, collect
from roseinfer.bench.reporting import Report, Table
from roseinfer.bench.serving import peers
from roseinfer.bench.serving.driving import WAYS, Work, paced, perform, require_positions
from roseinfer.bench.serving.figures import latencies, median_row, throughput
from roseinfer.bench.serving.memory_floor import memory_floor
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roseinfer.bench.serving.driving import Run
    from roseinfer.bench.serving.figures import LatencyRow, ThroughputRow

_SCHEDULER = """\
Serve requests one after the other (naive), all at once (offline), or one more before every
step (online), and say how long it took."""
_STREAMING = """\
Submit requests over time, hand their tokens over as they come, and say how long each reader
waited for what."""
_THROUGHPUT = """\
Medians over the repeated runs. total s: from the first request's arrival to the last token.
decode s: inside the steps that brought tokens and nobody's first one. times floor: that over
the time to read the weights once a step and the stored keys and values once a token, at the
measured copy bandwidth. fastest s, slowest s: of the runs' total times."""
_LATENCIES = """\
Medians over the repeated runs of each run's percentiles. TTFT: arrival to first token. TPOT:
(last token - first token) / (tokens - 1). ITL: between one handing over of tokens to a reader
and the next. latency: arrival to last token. queue wait: arrival to the first step's begin."""


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
    parser = argparse.ArgumentParser(prog=f"python -m roseinfer.{name}", description=description)
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
    """Measure every way of driving, then the peers."""
    source, others = ModelSource.of(args), peers.named(args.peers)
    params = arguments.sampling(args)
    if others and (args.do_sample or not args.no_stop_on_eos):
        raise ConfigError(
            "--peers: all systems are to do the same work, which is the likeliest token up "
            "to the full length: add --no-stop-on-eos, and leave --do-sample"
        )
    begin = time.perf_counter()
    llm = source.llm(arguments.engine_settings(args))
    start_up_s = time.perf_counter() - begin
    repeats = islice(cycle(args.prompt_repeats), args.num_requests)
    texts = tuple(" ".join([args.prompt] * times) for times in repeats)
    if llm.tokenizer is None:
        raise ConfigError(f"{args.hf_model_id} has no tokenizer, and prompts are text")
    longest = len(llm.tokenizer.encode(max(texts, key=len)))
    advice = "lower --max-new-tokens, or shorten prompts"
    require_positions(llm.engine, longest, args.max_new_tokens, advice)
    tokens = tuple(map(llm.tokenizer.encode, texts)) if args.pretok or others else ()
    work = Work(tokens if args.pretok else texts, params)
    floor = memory_floor(source.skeleton(), llm)
    speeds: list[ThroughputRow] = []
    waits: list[LatencyRow] = []
    turns = args.warmup_runs + args.repeat_runs
    for name, drive in ways.items():
        records = [
            perform(llm.engine, work, drive, llm.tokenizer, args.tokenize_workers)
            for _ in tqdm(range(turns), desc=name, unit="run", disable=None)
        ][args.warmup_runs :]
        speeds.append(throughput(name, records, floor))
        handed_over = (
            [seen.in_parts(args.stream_interval) for seen in record.timelines] for record in records
        )
        rows = [latencies(name, timelines) for timelines in handed_over]
        waits += [median_row(same) for same in zip(*rows, strict=True)]
    model, config = llm.engine.sessions.model, llm.config
    device, dtype = model.device, model.dtype
    del llm, model  # the peers need the memory
    collect()
    job = peers.PeerJob.of(args, source, Work(tokens, params), config.max_batch_size)
    compared = peers.compare(others, job, speeds[-1])
    return Report(
        benchmark,
        args.command,
        device,
        {**source.described(dtype), **asdict(config), **asdict(params)},
        (
            Table("throughput", _THROUGHPUT, speeds),
            Table("latencies", _LATENCIES, waits),
            Table("peers", peers.CAPTION, compared),
        ),
        {"start_up_s": start_up_s, **floor.facts()},
    )
