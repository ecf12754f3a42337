"""Serving requests and timing it: what both serving benchmarks share."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from roseinfer.bench import reporting
from roseinfer.bench.model_source import ModelSource, collect
from roseinfer.bench.options import engine_settings, sampling
from roseinfer.bench.reporting import Report, Table
from roseinfer.bench.serving import peers
from roseinfer.bench.serving.driving import perform
from roseinfer.bench.serving.figures import LatencyRow, ThroughputRow, latencies, median_row
from roseinfer.bench.serving.prompt_feed import PromptFeed, tokenized
from roseinfer.bench.serving.work import Work, repeated
from roseinfer.bench.steps.memory_floor import MemoryFloor, memory_floor
from roseinfer.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from roseinfer.bench.serving.driving import Run, RunRecord
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

    def __init__(self, args: argparse.Namespace, repeats: Sequence[int]) -> None:
        self._args = args
        self.source = ModelSource.of(args)
        self.params = sampling(args)
        self._peers = peers.named(args.peers)
        if self._peers and (args.do_sample or not args.no_stop_on_eos):
            raise ConfigError(
                "--peers: all systems are to do the same work, which is the likeliest token up "
                "to the full length: add --no-stop-on-eos, and leave --do-sample"
            )
        begin = time.perf_counter()
        self.llm: LLM = self.source.llm(engine_settings(args))
        self._start_up_s = time.perf_counter() - begin
        texts = repeated(args.prompt, repeats, args.num_requests)
        if self.llm.tokenizer is None:
            raise ConfigError(f"{args.hf_model_id} has no tokenizer, and prompts are text")
        self._check_length(max(texts, key=len))
        prompts = tokenized(texts, self.llm.tokenizer) if args.pretok else texts
        self.work = Work(prompts, self.params)

    def _check_length(self, longest: str) -> None:
        """A request that ends early brings fewer tokens than were asked for."""
        most = self.llm.engine.sessions.model.shape.max_length
        prompt = len(self.llm.tokenizer.encode(longest))
        if prompt + self.params.max_new_tokens > most:
            raise ConfigError(
                f"a prompt of {prompt} tokens and {self.params.max_new_tokens} new ones are more "
                f"than the model's {most} positions: lower --max-new-tokens, or shorten prompts"
            )

    def measure(
        self, name: str, drive: Callable[[Run], None], floor: MemoryFloor
    ) -> tuple[ThroughputRow, list[LatencyRow]]:
        """One way of driving, over its repeated runs."""
        records = self._records(name, drive)
        interval = self._args.stream_interval
        waits = [
            latencies(name, [seen.in_parts(interval) for seen in record.timelines])
            for record in records
        ]
        return (
            ThroughputRow.over([ThroughputRow.of(name, record, floor) for record in records]),
            [median_row(rows) for rows in zip(*waits, strict=True)],
        )

    def _records(self, name: str, drive: Callable[[Run], None]) -> list[RunRecord]:
        warmups, repeats = self._args.warmup_runs, self._args.repeat_runs
        records = []
        workers = self._args.tokenize_workers
        with tqdm(total=warmups + repeats, desc=name, unit="run", disable=None) as bar:
            for turn in range(warmups + repeats):
                feed = PromptFeed(self.work.prompts, self.llm.tokenizer, workers)
                record = perform(self.llm.engine, feed, self.params, drive)
                if turn >= warmups:
                    records.append(record)
                bar.update()
        return records

    def report(
        self, benchmark: str, command: str, ways: Mapping[str, Callable[[Run], None]]
    ) -> Report:
        """Measure every way of driving, then the peers."""
        device = self.llm.engine.sessions.model.device
        floor = memory_floor(self.source.skeleton(), self.llm)
        throughput: list[ThroughputRow] = []
        waits: list[LatencyRow] = []
        for name, drive in ways.items():
            row, more = self.measure(name, drive, floor)
            throughput.append(row)
            waits += more
        config = self._config()
        return Report(
            benchmark=benchmark,
            command=command,
            date=reporting.now(),
            machine=reporting.this_machine(device),
            config=config,
            facts={"start_up_s": self._start_up_s, **floor.facts()},
            tables=(
                Table("throughput", _THROUGHPUT, throughput),
                Table("latencies", _LATENCIES, waits),
                Table("peers", peers.CAPTION, self._compared(throughput[-1])),
            ),
        )

    def _config(self) -> dict[str, Any]:
        model = self.llm.engine.sessions.model
        return {
            **self.source.described(model.dtype),
            **asdict(self.llm.config),
            **asdict(self.params),
        }

    def _compared(self, ours: ThroughputRow) -> list[peers.PeerRow]:
        """Lets go of the engine first: others need the memory."""
        if not self._peers:
            return []
        prompts = tokenized(self.work.prompts, self.llm.tokenizer)
        slots = self.llm.config.max_batch_size
        del self.llm
        collect()
        job = peers.PeerJob.of(
            self.source,
            Work(prompts, self.params),
            slots,
            self._args.warmup_runs,
            self._args.repeat_runs,
        )
        return peers.compare(self._peers, job, peers.PeerRow.ours(ours))
