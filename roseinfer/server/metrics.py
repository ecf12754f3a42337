"""The page of metrics: what is counted, here and by the engine, by the names that vLLM gives it."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from roseinfer.histogram import STEP_BOUNDS, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from roseinfer.engine_client.protocol import ServedEngine, Start

# What the server counts, with the meaning that vLLM gives it: dashboards made for it work.


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_FIRST = _numbers(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_BETWEEN = _numbers(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
_WHOLE = _numbers("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_CHOICES = _numbers("1 2 5 10 20")
_ENDS = ("stop", "length", "abort", "error")


def lengths_up_to(most: int) -> tuple[float, ...]:
    """Return the bounds that vLLM has for lengths: 1, 2, 5, 10, 20, 50 and so on."""

    def all_of_them() -> Iterator[float]:
        power = 1
        while True:
            yield from (float(power), 2.0 * power, 5.0 * power)
            power *= 10

    return tuple(takewhile(lambda bound: bound <= most, all_of_them()))


class Ended(NamedTuple):
    """A text that ended, of a prompt that was read."""

    prompt_tokens: int
    tokens: int
    most_tokens: int
    """So many it might have had."""
    start: Start
    decode_s: float
    """From its first token to its last."""
    whole_s: float
    """From the request to its end."""


class TextCounts:
    """Counts what one event loop serves."""

    def __init__(self, most_tokens: int) -> None:
        """No prompt and its text have more than ``most_tokens`` together."""
        lengths = lengths_up_to(most_tokens)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Those of them that the prefix cache had."""
        self.generation_tokens = 0
        self.ends: Counter[str] = Counter(dict.fromkeys(_ENDS, 0))
        self.until_first = Histogram(_FIRST)
        self.between = Histogram(_BETWEEN)
        self.most_generated = Histogram(lengths)
        self.choices = Histogram(_CHOICES)

        # Of each text, when it has ended:
        self.whole = Histogram(_WHOLE)
        self.queued = Histogram(_WHOLE)
        self.prefill = Histogram(_WHOLE)
        self.decode = Histogram(_WHOLE)
        self.inference = Histogram(_WHOLE)
        self.each_token = Histogram(_BETWEEN)
        self.prompt_lengths = Histogram(lengths)
        self.computed_lengths = Histogram(lengths)
        self.lengths = Histogram(lengths)
        self.most_lengths = Histogram(lengths)

    def began(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Count a prompt, whose first token came so long after it was asked for."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.until_first.add(seconds)

    def generated(self, tokens: int, seconds: float, *, first: bool) -> None:
        """Count tokens of one text that came together, so long after the one before them.

        The very first of a text had none before it.
        """
        self.generation_tokens += tokens
        later = tokens - first
        if later > 0:
            self.between.add(seconds / later, later)

    def ended(self, why: str, text: Ended | None) -> None:
        """Count an end. There is no ``text`` where no token of it came."""
        self.ends[why] += 1
        if text is None:
            return
        start = text.start
        self.whole.add(text.whole_s)
        self.queued.add(start.queued_s)
        self.prefill.add(start.prefill_s)
        self.decode.add(text.decode_s)
        self.inference.add(start.prefill_s + text.decode_s)
        self.each_token.add(text.decode_s / max(1, text.tokens - 1))
        self.prompt_lengths.add(text.prompt_tokens)
        self.computed_lengths.add(text.prompt_tokens - start.found)
        self.lengths.add(text.tokens)
        self.most_lengths.add(text.most_tokens)

    def answered(self, choices: int, most_generated: int) -> None:
        """Count a prompt of which all choices have ended, the longest with so many tokens."""
        self.choices.add(choices)
        self.most_generated.add(most_generated)


# How many HTTP requests there were below ``/v1/``, how they were answered and how long it took.


_KNOWN = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"}
_METHODS = {"GET", "POST"}
_OTHER = "none"
"""Clients can make up any number of paths and methods, and each would have numbers of its own."""
_SECONDS = (0.1, 0.5, 1.0)


class HttpCounts:
    """Counts requests when they have been answered, for metrics that vLLM has as well."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """By path, method and class of the status, such as ``2xx``."""
        self.seconds: defaultdict[tuple[str, str], Histogram]
        self.seconds = defaultdict(lambda: Histogram(_SECONDS))
        """By path and method."""

    def add(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count a request, unless it was one of those by which servers are watched."""
        if not path.startswith("/v1/"):
            return
        known = path if path in _KNOWN else _OTHER
        asked = (known, method if method in _METHODS else _OTHER)
        self.requests[*asked, f"{status // 100}xx"] += 1
        self.seconds[asked].add(seconds)


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
