"""The page of metrics: what is counted, here and by the engine, by the names that vLLM gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from roseinfer.histogram import STEP_BOUNDS, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from roseinfer.engine_process.any_process import ServedEngine
    from roseinfer.server.metrics.http_counts import HttpCounts
    from roseinfer.server.metrics.text_counts import TextCounts


class MetricsPage:
    """Has what the server counts, and asks the engine for the rest when it is looked at."""

    def __init__(
        self,
        metrics: TextCounts,
        http_counts: HttpCounts,
        served: ServedEngine,
        model_name: str,
        number: int = 0,
    ) -> None:
        """``number`` tells replicas of one model apart."""
        self._metrics = metrics
        self._http_counts = http_counts
        self._served = served
        self._labels = {"model_name": model_name, "engine": str(number)}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._drafts()
        yield from self._histograms()
        yield from self._http()

    def _gauges(self) -> Iterator[Metric]:
        figures = self._served.figures
        total, held, cached = figures.blocks, figures.held, figures.cached
        yield self._gauge("vllm:num_requests_running", "Texts that are generated.", figures.running)
        yield self._gauge("vllm:num_requests_waiting", "Texts that wait to begin.", figures.waiting)
        yield self._told_apart(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "The same by what they wait for.",
            "reason",
            {"capacity": figures.waiting, "deferred": 0},
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it.", held / total
        )
        yield self._told_apart(
            GaugeMetricFamily,
            "roseinfer:kv_blocks",
            "Blocks of the KV cache.",
            "use",
            {"held": held, "cached": cached, "free": total - held - cached},
        )
        yield self._cache_config(total)
        if not self._served.closed:
            yield self._told_apart(
                GaugeMetricFamily,
                "vllm:engine_sleep_state",
                "The engine is awake as long as there is one.",
                "sleep_state",
                {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            )

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
        figures, counted = self._served.figures, self._metrics
        cached = counted.cached_tokens
        for name, what, value in (
            ("prompt_tokens", "Tokens of prompts that were read.", counted.prompt_tokens),
            ("prompt_tokens_cached", "Those that were cached.", cached),
            ("generation_tokens", "Tokens generated.", counted.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked for.", figures.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", figures.prefix_hits),
            ("num_preemptions", "Texts that had to begin again.", figures.preemptions),
        ):
            yield self._counter(f"vllm:{name}", what, value)
        yield self._counter(
            "roseinfer:engine_restarts",
            "Times that the engine's process was started again.",
            self._served.restarts,
        )
        for name, what, label, values in (
            (
                "prompt_tokens_by_source",
                "Tokens of prompts that were read, by where their keys and values are from.",
                "source",
                {"local_compute": counted.prompt_tokens - cached, "local_cache_hit": cached},
            ),
            (
                "prompt_tokens_cached_by_source",
                "Tokens of prompts that were cached, by where.",
                "source",
                {"device": cached},
            ),
            ("request_success", "Texts that ended.", "finished_reason", counted.ends),
        ):
            yield self._told_apart(CounterMetricFamily, f"vllm:{name}", what, label, values)

    def _drafts(self) -> Iterator[Metric]:
        figures = self._served.figures
        if not figures.accepted_at:
            return
        for name, what, value in (
            ("drafts", "Drafts that were verified.", figures.drafts),
            ("draft_tokens", "Their tokens.", figures.drafted),
            ("accepted_tokens", "Those accepted.", sum(figures.accepted_at)),
        ):
            yield self._counter(f"vllm:spec_decode_num_{name}", what, value)
        yield self._told_apart(
            CounterMetricFamily,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Those accepted, by their places in drafts.",
            "position",
            {str(place): count for place, count in enumerate(figures.accepted_at)},
        )

    def _histograms(self) -> Iterator[Metric]:
        counted, figures = self._metrics, self._served.figures
        steps = Histogram(STEP_BOUNDS, list(figures.steps), figures.step_tokens)
        for name, what, histogram in (
            ("time_to_first_token_seconds", "Request to first token.", counted.until_first),
            ("inter_token_latency_seconds", "Between two tokens of a text.", counted.between),
            ("time_per_output_token_seconds", "The older name for it.", counted.between),
            ("request_time_per_output_token_seconds", "Its mean per text.", counted.each_token),
            ("e2e_request_latency_seconds", "Request to end.", counted.whole),
            ("request_queue_time_seconds", "Queued to first step.", counted.queued),
            ("request_prefill_time_seconds", "First step to first token.", counted.prefill),
            ("request_decode_time_seconds", "First token to last.", counted.decode),
            ("request_inference_time_seconds", "First step to last token.", counted.inference),
            ("request_prompt_tokens", "Tokens of prompts.", counted.prompt_lengths),
            (
                "request_prefill_kv_computed_tokens",
                "Tokens of prompts that were not cached.",
                counted.computed_lengths,
            ),
            ("request_generation_tokens", "Tokens of texts.", counted.lengths),
            (
                "request_max_num_generation_tokens",
                "Tokens of the longest text of a prompt.",
                counted.most_generated,
            ),
            ("request_params_max_tokens", "Tokens a text might have.", counted.most_lengths),
            ("request_params_n", "Texts asked for of a prompt.", counted.choices),
            ("iteration_tokens_total", "Tokens of a step of the engine.", steps),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", what, labels=tuple(self._labels))
            family.add_metric([*self._labels.values()], histogram.buckets(), histogram.total)
            yield family

    def _http(self) -> Iterator[Metric]:
        labels = (*self._labels, "handler", "method")
        counts = CounterMetricFamily(
            "http_requests", "Requests that were answered.", labels=(*labels, "status")
        )
        for named, count in self._http_counts.requests.items():
            counts.add_metric([*self._labels.values(), *named], count)
        yield counts
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "Request to the end of its answer.", labels=labels
        )
        for asked, histogram in self._http_counts.seconds.items():
            values = [*self._labels.values(), *asked]
            seconds.add_metric(values, histogram.buckets(), histogram.total)
        yield seconds

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, what, labels=tuple(self._labels))
        family.add_metric([*self._labels.values()], value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(name, what, labels=tuple(self._labels))
        family.add_metric([*self._labels.values()], value)
        return family

    def _told_apart(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        what: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        """Return a metric with several values, and a label that tells them apart."""
        family = kind(name, what, labels=(*self._labels, label))
        for each, value in values.items():
            family.add_metric([*self._labels.values(), each], value)
        return family
