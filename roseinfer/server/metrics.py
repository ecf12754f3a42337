"""What the server measures, by the names that vLLM gives it: dashboards made for it work."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from roseinfer.engine_process.any_process import ServedEngine


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_FIRST = _numbers(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_BETWEEN = _numbers(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
_WHOLE = _numbers("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_ENDS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class Seconds:
    """A histogram. The one of prometheus-client takes a lock for every token."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def buckets(self) -> list[tuple[str, float]]:
        sums, so_far = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts, strict=True):
            so_far += count
            sums.append((str(bound), float(so_far)))
        return sums


class Metrics:
    """Counts what one event loop serves, and has the rest from the engine when it is looked at."""

    def __init__(self, served: ServedEngine, model_name: str, number: int = 0) -> None:
        """``number`` tells replicas of one model apart."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.ends: Counter[str] = Counter(dict.fromkeys(_ENDS, 0))
        self._until_first = Seconds(_FIRST)
        self._between = Seconds(_BETWEEN)
        self._whole = Seconds(_WHOLE)
        self._served = served
        self._labels = {"model_name": model_name, "engine": str(number)}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def began(self, prompt_tokens: int, seconds: float) -> None:
        """Count a prompt, whose first token came so long after it was asked for."""
        self.prompt_tokens += prompt_tokens
        self._until_first.add(seconds)

    def generated(self, tokens: int, seconds: float, *, first: bool) -> None:
        """Count tokens of one text that came together, so long after the one before them.

        The very first of a text had none before it.
        """
        self.generation_tokens += tokens
        later = tokens - first
        if later > 0:
            self._between.add(seconds / later, later)

    def ended(self, why: str, tokens: int, seconds: float) -> None:
        self.ends[why] += 1
        if tokens:
            self._whole.add(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        figures = self._served.figures
        total, held, cached = figures.blocks, figures.held, figures.cached
        for name, what, value in (
            ("vllm:num_requests_running", "Texts that are generated.", figures.running),
            ("vllm:num_requests_waiting", "Texts that wait to begin.", figures.waiting),
            ("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it.", held / total),
        ):
            yield self._labelled(GaugeMetricFamily(name, what, labels=tuple(self._labels)), value)
        blocks = GaugeMetricFamily(
            "roseinfer:kv_blocks", "Blocks of the KV cache.", labels=(*self._labels, "use")
        )
        for use, count in (("held", held), ("cached", cached), ("free", total - held - cached)):
            blocks.add_metric([*self._labels.values(), use], count)
        yield blocks

        yield self._cache_config(total)

    def _cache_config(self, blocks: int) -> Metric:
        """Return what gateways look for, by labels: they place prompts by their blocks."""
        labels = self._labels | {
            "block_size": str(self._served.facts.room.needs.block_size),
            "num_gpu_blocks": str(blocks),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache, by its labels.", labels=tuple(labels)
        )
        family.add_metric([*labels.values()], 1)
        return family

    def _counters(self) -> Iterator[Metric]:
        figures = self._served.figures
        for name, what, value in (
            ("vllm:prompt_tokens", "Tokens of prompts that were read.", self.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self.generation_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked for.", figures.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", figures.prefix_hits),
            ("vllm:num_preemptions", "Texts that had to begin again.", figures.preemptions),
        ):
            yield self._labelled(CounterMetricFamily(name, what, labels=tuple(self._labels)), value)
        ends = CounterMetricFamily(
            "vllm:request_success", "Texts that ended.", labels=(*self._labels, "finished_reason")
        )
        for why, count in self.ends.items():
            ends.add_metric([*self._labels.values(), why], count)
        yield ends

    def _histograms(self) -> Iterator[Metric]:
        for name, what, seconds in (
            ("time_to_first_token", "From a request to its first token.", self._until_first),
            ("inter_token_latency", "Between two tokens of a text.", self._between),
            ("time_per_output_token", "The older name for the same.", self._between),
            ("e2e_request_latency", "From a request to its end.", self._whole),
        ):
            family = HistogramMetricFamily(f"vllm:{name}_seconds", what, labels=tuple(self._labels))
            family.add_metric([*self._labels.values()], seconds.buckets(), seconds.total)
            yield family

    def _labelled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: float
    ) -> GaugeMetricFamily | CounterMetricFamily:
        family.add_metric([*self._labels.values()], value)
        return family
