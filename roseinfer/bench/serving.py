"""Throughput and latencies of the same requests, by arrival mode and on other systems."""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import cycle, islice
from typing import TYPE_CHECKING

from roseinfer.bench import cases, peers
from roseinfer.bench.driver import (
    Workload,
    latencies,
    median_row,
    memory_floor,
    require_positions,
    run_workload,
    throughput,
)
from roseinfer.bench.model_source import ModelSource, free_memory
from roseinfer.bench.peers import PeerJob
from roseinfer.bench.report import Report, Table
from roseinfer.cli.model_options import parsed_fields
from roseinfer.config import EngineConfig
from roseinfer.errors import ConfigError
from roseinfer.terminal import print_status, track_items

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from roseinfer.bench.driver import LatencyRow, Run, ThroughputRow

_THROUGHPUT = """\
Medians over the repeated runs. total s: from the first request's arrival to the last token.
decode s: in steps with tokens but without a first token of any request. floor ratio: that over
the time to read the weights once per step and the stored keys and values once per token, at the
measured copy bandwidth. fastest s, slowest s: extremes of total s over the runs."""
_LATENCIES = """\
Medians over the repeated runs of each run's percentiles. TTFT: arrival to first token. TPOT:
(last token - first token) / (tokens - 1). ITL: between two deliveries of tokens to a reader.
latency: arrival to last token. queue wait: arrival to the begin of the first step."""


def serve(
    benchmark: str, args: argparse.Namespace, arrival_modes: Mapping[str, Callable[[Run], None]]
) -> Report:
    """Measure every arrival mode, then the peers."""
    source, chosen_peers = ModelSource.of(args), cases.validate_peers(args.peers)
    params = cases.sampling(args)
    print_status(f"loading {source.name}")
    begin = time.perf_counter()
    llm = source.llm(parsed_fields(args, EngineConfig))
    start_up_s = time.perf_counter() - begin
    repeats = islice(cycle(args.prompt_repeats), args.num_requests)
    texts = tuple(" ".join([args.prompt] * times) for times in repeats)
    if llm.tokenizer is None:
        raise ConfigError(f"{args.hf_model_id}: the model has no tokenizer for text prompts")
    max_prompt_tokens = len(llm.tokenizer.encode(max(texts, key=len)))
    advice = "lower --max-new-tokens, or shorten prompts"
    require_positions(llm.engine, max_prompt_tokens, args.max_new_tokens, advice)
    tokens = tuple(map(llm.tokenizer.encode, texts)) if args.pretok or chosen_peers else ()
    work = Workload(tokens if args.pretok else texts, params)
    floor = memory_floor(source.skeleton(), llm)
    throughput_rows: list[ThroughputRow] = []
    latency_rows: list[LatencyRow] = []
    num_runs = args.warmup_runs + args.repeat_runs
    for name, drive in arrival_modes.items():
        records = [
            run_workload(llm.engine, work, drive, llm.tokenizer, args.tokenize_workers)
            for _ in track_items(range(num_runs), name, "runs")
        ][args.warmup_runs :]
        throughput_rows.append(throughput(name, records, floor))
        delivered = (
            [timeline.batch_tokens(args.stream_interval) for timeline in record.timelines]
            for record in records
        )
        rows = [latencies(name, timelines) for timelines in delivered]
        latency_rows += [median_row(same) for same in zip(*rows, strict=True)]
    model, config = llm.engine.sequence_runner.model, llm.config
    device, dtype = model.device, model.dtype
    del llm, model  # the peers need the memory
    free_memory()
    job = PeerJob.of(args, source, Workload(tokens, params), config.max_batch_size)
    compared = peers.compare(chosen_peers, job, throughput_rows[-1], floor)
    return Report(
        benchmark,
        args.command,
        device,
        {**source.describe(dtype), **asdict(config), **asdict(params)},
        (
            Table("throughput", _THROUGHPUT, throughput_rows),
            Table("latencies", _LATENCIES, latency_rows),
            Table("peers", peers.CAPTION, compared),
        ),
        {"start_up_s": start_up_s, **floor.facts()},
    )
