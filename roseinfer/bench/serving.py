"""Serves the same requests in one way after the other, and then on other systems, and reports."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import cycle, islice
from typing import TYPE_CHECKING

from roseinfer.bench import cases, peers
from roseinfer.bench.driving import (
    Work,
    latencies,
    median_row,
    memory_floor,
    perform,
    require_positions,
    throughput,
)
from roseinfer.bench.model_source import ModelSource, collect
from roseinfer.bench.peers import PeerJob
from roseinfer.bench.report import Report, Table
from roseinfer.cli.model_options import given_of
from roseinfer.config import EngineConfig
from roseinfer.errors import ConfigError
from roseinfer.progress import counted, say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from roseinfer.bench.driving import LatencyRow, Run, ThroughputRow

_THROUGHPUT = """\
Medians over the repeated runs. total s: from the first request's arrival to the last token.
decode s: inside the steps that brought tokens and nobody's first one. times floor: that over
the time to read the weights once a step and the stored keys and values once a token, at the
measured copy bandwidth. fastest s, slowest s: of the runs' total times."""
_LATENCIES = """\
Medians over the repeated runs of each run's percentiles. TTFT: arrival to first token. TPOT:
(last token - first token) / (tokens - 1). ITL: between one handing over of tokens to a reader
and the next. latency: arrival to last token. queue wait: arrival to the first step's begin."""


def serve(
    benchmark: str, args: argparse.Namespace, ways: Mapping[str, Callable[[Run], None]]
) -> Report:
    """Measure every way of driving, then the peers."""
    source, others = ModelSource.of(args), cases.peers_named(args.peers)
    params = cases.sampling(args)
    say(f"loading {source.name}")
    begin = time.perf_counter()
    llm = source.llm(given_of(args, EngineConfig))
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
            for _ in counted(range(turns), name, "runs")
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
    job = PeerJob.of(args, source, Work(tokens, params), config.max_batch_size)
    compared = peers.compare(others, job, speeds[-1], floor)
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
