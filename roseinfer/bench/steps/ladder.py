"""``ladder``: what each optimisation is worth, all of them measured on the same work."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from roseinfer.bench.model_source import check_settings, collect
from roseinfer.bench.serving.driving import offline, perform
from roseinfer.bench.serving.figures import ThroughputRow, decode_steps, percentile_ms
from roseinfer.bench.serving.prompt_feed import PromptFeed
from roseinfer.bench.serving.work import Work, random_prompts
from roseinfer.bench.steps.memory_floor import MemoryFloor, memory_floor
from roseinfer.bench.timing import WrongPath
from roseinfer.config import SamplingParams
from roseinfer.errors import ConfigError, RoseinferError
from roseinfer.models.loading import resolve_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from roseinfer.bench.model_source import ModelSource
    from roseinfer.bench.serving.driving import RunRecord
    from roseinfer.bench.steps.rungs import Rung
    from roseinfer.llm import LLM


@dataclass(frozen=True, slots=True)
class LadderConfig:
    source: ModelSource
    batch: int
    prompt_tokens: int
    max_new_tokens: int
    block_size: int
    warmup_runs: int
    repeat_runs: int

    @property
    def mean_stored(self) -> int:
        """Tokens of all sequences that a decode step attends to, in the middle of a run."""
        return round(self.batch * (self.prompt_tokens + self.max_new_tokens / 2))

    @property
    def settings(self) -> dict[str, Any]:
        """Of every rung: all requests run at once, from the same step on, each on its own."""
        blocks = -(-(self.prompt_tokens + self.max_new_tokens) // self.block_size) + 1
        return {
            "max_batch_size": self.batch,
            "block_size": self.block_size,
            "kv_cache_tokens": self.batch * blocks * self.block_size,
            "prefix_cache": False,
            "prefill_max_batch_size": self.batch,
            "prefill_max_tokens": self.batch * self.prompt_tokens,
        }


@dataclass(frozen=True, slots=True)
class RungRow:
    rung: str
    step_ms: float | None = None
    tok_per_s: float | None = None
    times_floor: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    itl_at_boundary_p99_ms: float | None = None
    """Of the gaps in which a sequence goes on in a new block; None where none did."""
    same_tokens: float | None = None
    """The share of requests that got the tokens they got on the first rung."""
    start_up_s: float | None = None
    not_available: str | None = None


@dataclass(frozen=True, slots=True)
class Ground:
    """What is the same on every rung, known once the first one is built."""

    work: Work
    floor: MemoryFloor
    dtype: torch.dtype


class Ladder:
    """Climbs, and keeps what later rungs are compared with."""

    def __init__(self, config: LadderConfig) -> None:
        self._config = config
        self.device = resolve_device(config.source.device)
        self.ground: Ground | None = None
        self.best: ThroughputRow | None = None
        """Of the last rung that ran."""
        self._first_tokens: list[list[int]] | None = None

    def climb(self, all_rungs: Sequence[Rung]) -> list[RungRow]:
        rows = []
        with tqdm(all_rungs, desc="ladder", unit="rung", disable=None) as bar:
            for rung in bar:
                bar.set_postfix_str(rung.name)
                try:
                    rows.append(self._measure(rung))
                except (RoseinferError, RuntimeError) as error:
                    rows.append(RungRow(rung.name, not_available=" ".join(str(error).split())))
                collect()
        return rows

    def _measure(self, rung: Rung) -> RungRow:
        settings = {**self._config.settings, **rung.supported_settings}
        check_settings(settings)
        if reason := rung.why_not_on(self.device):
            raise ConfigError(reason)
        begin = time.perf_counter()
        llm = self._config.source.llm(settings)
        start_up_s = time.perf_counter() - begin
        self.ground = self.ground or self._ground(llm)
        return self._row(rung, self._records(llm, rung, self.ground.work), start_up_s)

    def _ground(self, llm: LLM) -> Ground:
        config, model = self._config, llm.engine.sessions.model
        positions = model.shape.max_length
        if config.prompt_tokens + config.max_new_tokens > positions:
            raise ConfigError(
                f"{config.prompt_tokens} + {config.max_new_tokens} tokens are more than the "
                f"model's {positions} positions"
            )
        prompts = random_prompts(config.batch, config.prompt_tokens, model.shape.vocab_size)
        greedy = SamplingParams(
            temperature=0.0, max_new_tokens=config.max_new_tokens, ignore_eos=True
        )
        floor = memory_floor(config.source.skeleton(), llm)
        return Ground(Work(prompts, greedy), floor, model.dtype)

    def _records(self, llm: LLM, rung: Rung, work: Work) -> list[RunRecord]:
        records = []
        for turn in range(self._config.warmup_runs + self._config.repeat_runs):
            before = Counter(llm.engine.sessions.kv.path_counts)
            record = perform(llm.engine, PromptFeed(work.prompts, None), work.params, offline)
            check_path(rung, Counter(llm.engine.sessions.kv.path_counts) - before, record, llm)
            if turn >= self._config.warmup_runs:
                records.append(record)
        return records

    def _row(self, rung: Rung, records: list[RunRecord], start_up_s: float) -> RungRow:
        assert self.ground is not None
        floor = self.ground.floor
        row = ThroughputRow.over([ThroughputRow.of(rung.name, each, floor) for each in records])
        self.best = row
        tokens = records[-1].token_ids
        first = self._first_tokens = self._first_tokens or tokens
        gaps = [[g for seen in r.timelines for g in seen.inter_token_latencies] for r in records]
        spikes = [boundary_gaps(record, self._config.block_size) for record in records]
        return RungRow(
            rung=rung.name,
            step_ms=row.decode_step_ms,
            tok_per_s=row.decode_tok_per_s,
            times_floor=row.times_floor,
            itl_p50_ms=median(percentile_ms(each, 50) for each in gaps),
            itl_p99_ms=median(percentile_ms(each, 99) for each in gaps),
            itl_at_boundary_p99_ms=(
                median(percentile_ms(each, 99) for each in spikes) if all(spikes) else None
            ),
            same_tokens=sum(map(list.__eq__, first, tokens)) / len(tokens),
            start_up_s=start_up_s,
        )


def check_path(rung: Rung, grown: Counter[str], record: RunRecord, llm: LLM) -> None:
    """Raise unless the rung's path wrote most layers of most decode steps."""
    writes = len(decode_steps(record)) * llm.engine.sessions.model.shape.num_layers
    if rung.path is not None and grown[rung.path] * 2 <= writes:
        raise WrongPath(
            f"{rung.path} was to write the cache, and ran {grown[rung.path]} times where "
            f"{writes} layers were written: {dict(grown)}"
        )


def boundary_gaps(record: RunRecord, block_size: int) -> list[float]:
    """The gaps before tokens whose step stored a sequence's first token of a block.

    The step that brings generated token ``n`` stores position ``prompt + n - 1``.
    """
    return list(
        chain.from_iterable(
            seen.gaps_before(lambda n, length=length: (length + n - 1) % block_size == 0)  # type: ignore[misc]
            for seen, length in zip(record.timelines, record.prompt_lengths, strict=True)
        )
    )
