"""Serving requests and timing it: the measuring that both serving benchmarks share."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from tqdm import tqdm

from roseinfer.bench.arguments import engine_settings, sampling
from roseinfer.bench.model_source import ModelSource, collect
from roseinfer.bench.reporting import Report, Table
from roseinfer.bench.serving import peers
from roseinfer.bench.serving.driving import perform
from roseinfer.bench.serving.figures import LatencyRow, ThroughputRow, latencies, median_row
from roseinfer.bench.serving.memory_floor import memory_floor
from roseinfer.bench.serving.prompts import Work, repeated, tokenized
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from roseinfer.bench.serving.driving import Run
    from roseinfer.bench.serving.record import RunRecord, Timeline
    from roseinfer.llm import LLM

_THROUGHPUT = """\
Medians over the repeated runs. total s: from the first request's arrival to the last token.
decode s: inside the steps that brought tokens and nobody's first one. times floor: that over
the time to read the weights once a step and the stored keys and values once a token, at the
measured copy bandwidth. fastest s, slowest s: of the runs' total times."""
_LATENCIES = """\
Medians over the repeated runs of each run's percentiles. TTFT: arrival to first token. TPOT:
(last token - first token) / (tokens - 1). ITL: between one handing over of tokens to a reader
and the next. latency: arrival to last token. queue wait: arrival to the first step's begin."""


class Serving:
    """An engine, the requests it is measured with, and how often."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.source = ModelSource.of(args)
        self._peers = peers.named(args.peers)
        params = sampling(args)
        if self._peers and (args.do_sample or not args.no_stop_on_eos):
            raise ConfigError(
                "--peers: all systems are to do the same work, which is the likeliest token up "
                "to the full length: add --no-stop-on-eos, and leave --do-sample"
            )
        begin = time.perf_counter()
        self.llm: LLM = self.source.llm(engine_settings(args))
        self._start_up_s = time.perf_counter() - begin
        texts = repeated(args.prompt, args.prompt_repeats, args.num_requests)
        if self.llm.tokenizer is None:
            raise ConfigError(f"{args.hf_model_id} has no tokenizer, and prompts are text")
        self._check_length(max(texts, key=len), params.max_new_tokens)
        self.work = Work(tokenized(texts, self.llm.tokenizer) if args.pretok else texts, params)

    def _check_length(self, longest: str, new: int) -> None:
        """A request that ends early brings fewer tokens than were asked for."""
        most = self.llm.engine.sessions.model.shape.max_length
        prompt = len(self.llm.tokenizer.encode(longest))
        if prompt + new > most:
            raise ConfigError(
                f"a prompt of {prompt} tokens and {new} new ones are more "
                f"than the model's {most} positions: lower --max-new-tokens, or shorten prompts"
            )

    def report(self, benchmark: str, ways: Mapping[str, Callable[[Run], None]]) -> Report:
        """Measure every way of driving, then the peers."""
        model, config = self.llm.engine.sessions.model, self.llm.config
        floor = memory_floor(self.source.skeleton(), self.llm)
        throughput: list[ThroughputRow] = []
        waits: list[LatencyRow] = []
        for name, drive in ways.items():
            records = self._records(name, drive)
            runs = [ThroughputRow.of(name, record, floor) for record in records]
            throughput.append(ThroughputRow.over(runs))
            seen = [latencies(name, self._handed_over(record)) for record in records]
            waits += [median_row(rows) for rows in zip(*seen, strict=True)]
        return Report(
            benchmark,
            self._args.command,
            model.device,
            {
                **self.source.described(model.dtype),
                **asdict(config),
                **asdict(self.work.params),
            },
            (
                Table("throughput", _THROUGHPUT, throughput),
                Table("latencies", _LATENCIES, waits),
                Table("peers", peers.CAPTION, self._compared(throughput[-1])),
            ),
            {"start_up_s": self._start_up_s, **floor.facts()},
        )

    def _records(self, name: str, drive: Callable[[Run], None]) -> list[RunRecord]:
        args, llm = self._args, self.llm
        turns = args.warmup_runs + args.repeat_runs
        records = [
            perform(llm.engine, self.work, drive, llm.tokenizer, args.tokenize_workers)
            for _ in tqdm(range(turns), desc=name, unit="run", disable=None)
        ]
        return records[args.warmup_runs :]

    def _handed_over(self, record: RunRecord) -> list[Timeline]:
        return [seen.in_parts(self._args.stream_interval) for seen in record.timelines]

    def _compared(self, ours: ThroughputRow) -> list[peers.PeerRow]:
        """Lets go of the engine first: others need the memory."""
        if not self._peers:
            return []
        work = Work(tokenized(self.work.prompts, self.llm.tokenizer), self.work.params)
        slots = self.llm.config.max_batch_size
        del self.llm
        collect()
        job = peers.PeerJob.of(self._args, self.source, work, slots)
        return peers.compare(self._peers, job, ours)
