"""Prometheus metrics of the server and the engine, named as in vLLM."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from roseinfer.paths import STEP_TOKEN_BOUNDS, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.core import Metric

    from roseinfer.engine_client.protocol import EngineClient, PrefillStats

# Metrics of completions. They mean the same as vLLM's, so that its dashboards work.


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_TTFT_BOUNDS = _numbers(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_ITL_BOUNDS = _numbers(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
_LATENCY_BOUNDS = _numbers(
    "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
)
_CHOICES_BOUNDS = _numbers("1 2 5 10 20")
_FINISH_REASONS = ("stop", "length", "abort", "error")


def length_bounds(max_length: int) -> tuple[float, ...]:
    """Return vLLM's histogram bounds of lengths up to ``max_length``: 1, 2, 5, 10 and so on."""

    def all_bounds() -> Iterator[float]:
        power = 1
        while True:
            yield from (float(power), 2.0 * power, 5.0 * power)
            power *= 10

    return tuple(takewhile(lambda bound: bound <= max_length, all_bounds()))


class FinishedCompletion(NamedTuple):
    """Figures of a completion that ended after its prefill."""

    prompt_tokens: int
    tokens: int
    max_new_tokens: int
    """Tokens that it could have had at most."""
    prefill_stats: PrefillStats
    decode_s: float
    """Seconds from its first token to its last."""
    e2e_s: float
    """Seconds from the request to its end."""


class CompletionMetrics:
    """Counters and histograms of the completions of one event loop."""

    def __init__(self, max_model_len: int) -> None:
        """Start at zero; a prompt and its completion have at most ``max_model_len`` tokens."""
        lengths = length_bounds(max_model_len)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Prompt tokens served from the prefix cache."""
        self.generation_tokens = 0
        self.finish_reasons: Counter[str] = Counter(dict.fromkeys(_FINISH_REASONS, 0))
        self.ttft = Histogram(_TTFT_BOUNDS)
        self.inter_token_latency = Histogram(_ITL_BOUNDS)
        self.longest_completion = Histogram(lengths)
        self.choices = Histogram(_CHOICES_BOUNDS)

        # One value per completion, recorded when it has ended:
        self.e2e_latency = Histogram(_LATENCY_BOUNDS)
        self.queued = Histogram(_LATENCY_BOUNDS)
        self.prefill = Histogram(_LATENCY_BOUNDS)
        self.decode = Histogram(_LATENCY_BOUNDS)
        self.inference = Histogram(_LATENCY_BOUNDS)
        self.time_per_output_token = Histogram(_ITL_BOUNDS)
        self.prompt_lengths = Histogram(lengths)
        self.computed_prompt_lengths = Histogram(lengths)
        self.lengths = Histogram(lengths)
        self.max_tokens_params = Histogram(lengths)

    def record_prefill(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Record a prefilled prompt, whose first token came ``seconds`` after the request."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.ttft.add(seconds)

    def record_tokens(self, tokens: int, seconds: float, *, first: bool) -> None:
        """Record tokens of one completion that arrived together, ``seconds`` after the previous.

        The ``first`` token of a completion has no inter-token latency.
        """
        self.generation_tokens += tokens
        later = tokens - first
        if later > 0:
            self.inter_token_latency.add(seconds / later, later)

    def record_finish(self, finish_reason: str, text: FinishedCompletion | None) -> None:
        """Record the end of a completion; ``text`` is None if it had no token."""
        self.finish_reasons[finish_reason] += 1
        if text is None:
            return
        prefill = text.prefill_stats
        self.e2e_latency.add(text.e2e_s)
        self.queued.add(prefill.queued_s)
        self.prefill.add(prefill.prefill_s)
        self.decode.add(text.decode_s)
        self.inference.add(prefill.prefill_s + text.decode_s)
        self.time_per_output_token.add(text.decode_s / max(1, text.tokens - 1))
        self.prompt_lengths.add(text.prompt_tokens)
        self.computed_prompt_lengths.add(text.prompt_tokens - prefill.cached_tokens)
        self.lengths.add(text.tokens)
        self.max_tokens_params.add(text.max_new_tokens)

    def record_prompt(self, choices: int, longest_completion: int) -> None:
        """Record a prompt whose choices have all ended, and the tokens of the longest one."""
        self.choices.add(choices)
        self.longest_completion.add(longest_completion)


# Metrics of HTTP requests to paths below ``/v1/``.


_KNOWN_PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"}
_METHODS = {"GET", "POST"}
_OTHER = "none"
"""Label of all other paths and methods: clients can invent any number of them."""
_DURATION_BOUNDS = (0.1, 0.5, 1.0)


class HttpMetrics:
    """Counts and durations of answered requests, for metrics that vLLM has as well."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()
        """Requests by path, method and class of the status, such as ``2xx``."""
        self.seconds: defaultdict[tuple[str, str], Histogram]
        self.seconds = defaultdict(lambda: Histogram(_DURATION_BOUNDS))
        """Durations in seconds, by path and method."""

    def add(self, path: str, method: str, status: int, seconds: float) -> None:
        """Record an answered request; ignore paths for monitoring, which are not below ``/v1/``."""
        if not path.startswith("/v1/"):
            return
        known_path = path if path in _KNOWN_PATHS else _OTHER
        key = (known_path, method if method in _METHODS else _OTHER)
        self.requests[*key, f"{status // 100}xx"] += 1
        self.seconds[key].add(seconds)


class MetricsPage:
    """Page of metrics, which collects those of the server and the engine when it is read."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        metrics: CompletionMetrics,
        http_counts: HttpMetrics,
        engine_client: EngineClient,
        model_name: str,
        number: int = 0,
    ) -> None:
        """Register the metrics; ``number`` is the label of a replica among those of one model."""
        self._metrics = metrics
        self._http_counts = http_counts
        self._engine_client = engine_client
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
        stats = self._engine_client.stats
        total, num_held, cached = stats.blocks, stats.num_held, stats.num_cached
        yield self._gauge("vllm:num_requests_running", "Running completions.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Queued completions.", stats.waiting)
        yield self._labeled_family(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Queued completions by the reason for their wait.",
            "reason",
            {"capacity": stats.waiting, "deferred": 0},
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it.", num_held / total
        )
        yield self._labeled_family(
            GaugeMetricFamily,
            "roseinfer:kv_blocks",
            "Blocks of the KV cache.",
            "use",
            {"held": num_held, "cached": cached, "free": total - num_held - cached},
        )
        yield self._cache_config(total)
        if not self._engine_client.closed:
            yield self._labeled_family(
                GaugeMetricFamily,
                "vllm:engine_sleep_state",
                "Sleep state of the engine, which is always awake.",
                "sleep_state",
                {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
            )

    def _cache_config(self, blocks: int) -> Metric:
        """Return the cache's configuration as labels: gateways route prompts by their blocks."""
        labels = self._labels | {
            "block_size": str(
                self._engine_client.info.request_limits.block_requirements.block_size
            ),
            "num_gpu_blocks": str(blocks),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache.", labels=tuple(labels)
        )
        family.add_metric([*labels.values()], 1)
        return family

    def _counters(self) -> Iterator[Metric]:
        stats, metrics = self._engine_client.stats, self._metrics
        cached = metrics.cached_tokens
        for name, description, value in (
            ("prompt_tokens", "Prefilled prompt tokens.", metrics.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens served from the prefix cache.", cached),
            ("generation_tokens", "Generated tokens.", metrics.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("num_preemptions", "Preemptions of sequences.", stats.preemptions),
        ):
            yield self._counter(f"vllm:{name}", description, value)
        yield self._counter(
            "roseinfer:engine_restarts",
            "Restarts of the engine's process.",
            self._engine_client.restarts,
        )
        for name, description, label, values in (
            (
                "prompt_tokens_by_source",
                "Prompt tokens by the source of their keys and values.",
                "source",
                {"local_compute": metrics.prompt_tokens - cached, "local_cache_hit": cached},
            ),
            (
                "prompt_tokens_cached_by_source",
                "Cached prompt tokens by the location of the cache.",
                "source",
                {"device": cached},
            ),
            (
                "request_success",
                "Completions that ended.",
                "finished_reason",
                metrics.finish_reasons,
            ),
        ):
            yield self._labeled_family(
                CounterMetricFamily, f"vllm:{name}", description, label, values
            )

    def _drafts(self) -> Iterator[Metric]:
        stats = self._engine_client.stats
        if not stats.num_accepted_per_position:
            return
        for name, description, value in (
            ("drafts", "Verified drafts.", stats.drafts),
            ("draft_tokens", "Drafted tokens.", stats.drafted),
            ("accepted_tokens", "Accepted tokens.", sum(stats.num_accepted_per_position)),
        ):
            yield self._counter(f"vllm:spec_decode_num_{name}", description, value)
        yield self._labeled_family(
            CounterMetricFamily,
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position in the draft.",
            "position",
            {str(place): count for place, count in enumerate(stats.num_accepted_per_position)},
        )

    def _histograms(self) -> Iterator[Metric]:
        metrics, stats = self._metrics, self._engine_client.stats
        steps = Histogram(STEP_TOKEN_BOUNDS, list(stats.steps), stats.step_tokens)
        for name, description, histogram in (
            ("time_to_first_token_seconds", "From request to first token.", metrics.ttft),
            (
                "inter_token_latency_seconds",
                "Between two tokens of a completion.",
                metrics.inter_token_latency,
            ),
            (
                "time_per_output_token_seconds",
                "Between two tokens of a completion; older name.",
                metrics.inter_token_latency,
            ),
            (
                "request_time_per_output_token_seconds",
                "Mean time between two tokens, per completion.",
                metrics.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "From request to end.", metrics.e2e_latency),
            ("request_queue_time_seconds", "From queued to first step.", metrics.queued),
            ("request_prefill_time_seconds", "From first step to first token.", metrics.prefill),
            ("request_decode_time_seconds", "From first token to last.", metrics.decode),
            ("request_inference_time_seconds", "From first step to last token.", metrics.inference),
            ("request_prompt_tokens", "Tokens per prompt.", metrics.prompt_lengths),
            (
                "request_prefill_kv_computed_tokens",
                "Computed (not cached) tokens per prompt.",
                metrics.computed_prompt_lengths,
            ),
            ("request_generation_tokens", "Tokens per completion.", metrics.lengths),
            (
                "request_max_num_generation_tokens",
                "Tokens of the longest completion of a prompt.",
                metrics.longest_completion,
            ),
            (
                "request_params_max_tokens",
                "Token limit of a completion.",
                metrics.max_tokens_params,
            ),
            ("request_params_n", "Completions requested per prompt.", metrics.choices),
            ("iteration_tokens_total", "Tokens per engine step.", steps),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", description, labels=tuple(self._labels))
            family.add_metric([*self._labels.values()], histogram.buckets(), histogram.total)
            yield family

    def _http(self) -> Iterator[Metric]:
        labels = (*self._labels, "handler", "method")
        counts = CounterMetricFamily(
            "http_requests", "Answered requests.", labels=(*labels, "status")
        )
        for labeled, count in self._http_counts.requests.items():
            counts.add_metric([*self._labels.values(), *labeled], count)
        yield counts
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "From request to end of response.", labels=labels
        )
        for path_method, histogram in self._http_counts.seconds.items():
            values = [*self._labels.values(), *path_method]
            seconds.add_metric(values, histogram.buckets(), histogram.total)
        yield seconds

    def _gauge(self, name: str, description: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, description, labels=tuple(self._labels))
        family.add_metric([*self._labels.values()], value)
        return family

    def _counter(self, name: str, description: str, value: float) -> Metric:
        family = CounterMetricFamily(name, description, labels=tuple(self._labels))
        family.add_metric([*self._labels.values()], value)
        return family

    def _labeled_family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        description: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        """Return a metric with several values, one for each value of a label."""
        family = kind(name, description, labels=(*self._labels, label))
        for each, value in values.items():
            family.add_metric([*self._labels.values(), each], value)
        return family
