"""Metrics that vLLM's dashboards and gateways query: each series exists and is correct.

The names are from vLLM's ``examples/observability`` and from the defaults of the endpoint picker,
as of 2026-11-25.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from roseinfer import EnginePath, SamplingParams
from roseinfer.engine.drafter import MAX_DRAFT_TOKENS
from roseinfer.engine_client.in_process import InProcessClient
from roseinfer.server.metrics import CompletionMetrics, HttpMetrics, MetricsPage, length_bounds
from tests.engine.repeating_models import repeating_llm
from tests.server.served import running

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

    from tests.server.served import Server

PROMPTS = {"a" * 40: 90, "b" * 23: 60, "c": 1}
"""Prompts, one token per character, each with the number of tokens to generate."""
REQUESTS = len(PROMPTS) + 1  # the first is requested twice
PROMPT_TOKENS = 2 * 40 + 23 + 1
CACHED_TOKENS = 32
"""Tokens of the first prompt, in whole blocks, that hit the prefix cache the second time."""
GENERATED_TOKENS = 2 * 90 + 60 + 1
TOKEN_INTERVALS = GENERATED_TOKENS - REQUESTS

GATEWAY = {
    "vllm:num_requests_waiting": 0,
    "vllm:num_requests_running": 0,
    "vllm:kv_cache_usage_perc": 0,
    "vllm:cache_config_info": 1,
}
"""Series that the endpoint picker queries, except those of adapters."""


def histogram(name: str, count: float, total: float | None = None) -> dict[str, float | None]:
    """Return the series of a histogram, each of which some panel queries."""
    return {f"{name}_bucket{{le=+Inf}}": count, f"{name}_count": count, f"{name}_sum": total}


DASHBOARDS: dict[str, float | None] = {
    # prometheus_grafana/grafana.json
    **histogram("vllm:e2e_request_latency_seconds", REQUESTS),
    "vllm:prompt_tokens_total": PROMPT_TOKENS,
    "vllm:generation_tokens_total": GENERATED_TOKENS,
    **histogram("vllm:inter_token_latency_seconds", TOKEN_INTERVALS),
    **histogram("vllm:time_to_first_token_seconds", REQUESTS),
    **histogram("vllm:request_prompt_tokens", REQUESTS, PROMPT_TOKENS),
    **histogram("vllm:request_generation_tokens", REQUESTS, GENERATED_TOKENS),
    "vllm:request_success_total": REQUESTS,
    "vllm:request_success_total{finished_reason=length}": REQUESTS,
    "vllm:request_success_total{finished_reason=error}": 0,
    **histogram("vllm:request_queue_time_seconds", REQUESTS),
    **histogram("vllm:request_prefill_time_seconds", REQUESTS),
    **histogram("vllm:request_decode_time_seconds", REQUESTS),
    **histogram("vllm:request_max_num_generation_tokens", REQUESTS, GENERATED_TOKENS),
    # dashboards/grafana: vllm_overview.json, vllm_instances.json, vllm_kv_cache.json
    **histogram("vllm:request_time_per_output_token_seconds", REQUESTS),
    "vllm:iteration_tokens_total_sum": PROMPT_TOKENS - CACHED_TOKENS + GENERATED_TOKENS,
    "vllm:iteration_tokens_total_count": None,
    "vllm:num_requests_waiting_by_reason{reason=capacity}": 0,
    "vllm:num_requests_waiting_by_reason{reason=deferred}": 0,
    "vllm:num_preemptions_total": 0,
    "vllm:prefix_cache_queries_total": PROMPT_TOKENS,
    "vllm:prefix_cache_hits_total": CACHED_TOKENS,
    "vllm:prompt_tokens_cached_total": CACHED_TOKENS,
    "vllm:prompt_tokens_cached_by_source_total{source=device}": CACHED_TOKENS,
    "vllm:prompt_tokens_by_source_total{source=local_compute}": PROMPT_TOKENS - CACHED_TOKENS,
    "vllm:prompt_tokens_by_source_total{source=local_cache_hit}": CACHED_TOKENS,
    **histogram("vllm:request_prefill_kv_computed_tokens", REQUESTS, PROMPT_TOKENS - CACHED_TOKENS),
    "http_requests_total{status=2xx}": REQUESTS,
    "http_requests_total{handler=/v1/completions}": REQUESTS,
    "http_request_duration_seconds_count{handler=/v1/completions}": REQUESTS,
    "http_request_duration_seconds_sum{handler=/v1/completions}": None,
    "process_start_time_seconds": None,
    "process_cpu_seconds_total": None,
    "process_resident_memory_bytes": None,
    "process_open_fds": None,
    "process_max_fds": None,
    # dashboards/grafana: vllm_service_status.json
    "vllm:engine_sleep_state{sleep_state=awake}": 1,
    "vllm:engine_sleep_state{sleep_state=discard_all}": 0,
    # names that dashboards of other vendors query
    **histogram("vllm:time_per_output_token_seconds", TOKEN_INTERVALS),
    **histogram("vllm:request_inference_time_seconds", REQUESTS),
    **histogram("vllm:request_params_n", REQUESTS, REQUESTS),
    **histogram("vllm:request_params_max_tokens", REQUESTS, GENERATED_TOKENS),
}
"""Expected sum of each series; None if it is a time or a size."""


class ParsedMetrics:
    """Page of ``/metrics``, parsed as Prometheus does."""

    def __init__(self, text: bytes) -> None:
        samples = text_string_to_metric_families(text.decode())
        self.families = {family.name: family for family in samples}
        self.samples = [each for family in self.families.values() for each in family.samples]

    def samples_of(self, series: str) -> list[Sample]:
        """Return the samples of a name, or of a name with a label."""
        name, label, value = re.fullmatch(r"([^{]+)(?:{(\w+)=(.+)})?", series).groups()  # type: ignore[union-attr]
        return [
            each
            for each in self.samples
            if each.name == name and (label is None or each.labels.get(label) == value)
        ]

    def sum(self, series: str) -> float:
        samples = self.samples_of(series)
        assert samples, f"there is no {series}"
        return sum(each.value for each in samples)


def page_of(server: Server) -> ParsedMetrics:
    return ParsedMetrics(server.request("GET", "/metrics").data)


def send_requests(server: Server) -> None:
    for prompt, tokens in [*PROMPTS.items(), *PROMPTS.items()][:REQUESTS]:
        answer = server.post("completions", prompt=prompt, max_tokens=tokens, ignore_eos=True)
        assert answer.json["usage"]["completion_tokens"] == tokens
    server.await_idleness()


def test_queried_series_exist_with_correct_values() -> None:
    with running() as server:
        send_requests(server)
        page = page_of(server)
    for series, value in (DASHBOARDS | GATEWAY).items():
        if value is None:
            assert page.sum(series) > 0, series
        else:
            assert page.sum(series) == value, series


def test_series_of_gateways_are_gauges() -> None:
    with running() as server:
        page = page_of(server)
    for name in GATEWAY:
        assert page.families[name].type == "gauge"
        assert len(page.samples_of(name)) == 1


def test_every_series_exists_before_the_first_request() -> None:
    """A rate needs two samples: a series that appears with its first request would miss one."""
    with running() as server:
        page = page_of(server)
    for series in DASHBOARDS | GATEWAY:
        if not series.startswith("http_"):
            assert page.samples_of(series), series


@pytest.mark.slow
def test_queue_prefill_and_decode_times_sum_to_the_latency() -> None:
    with running(max_batch_size=1) as server:
        options = {"prompt": ["x" * 40, "y" * 40], "max_tokens": 200, "ignore_eos": True}
        server.post("completions", **options)
        page = page_of(server)
    queue, prefill, decode, inference, latency, ttft = (
        page.sum(f"vllm:{name}_seconds_sum")
        for name in (
            "request_queue_time",
            "request_prefill_time",
            "request_decode_time",
            "request_inference_time",
            "e2e_request_latency",
            "time_to_first_token",
        )
    )
    assert 0.8 * latency < queue + prefill + decode <= latency
    assert inference == pytest.approx(prefill + decode)
    # One request waits for the other, which takes as long as it does.
    assert 0.1 * inference < queue < 0.9 * inference
    assert 0 < prefill < decode
    assert 0.8 * ttft < queue + prefill <= ttft
    each_token = page.sum("vllm:request_time_per_output_token_seconds_sum")
    assert each_token == pytest.approx(decode / 199)
    assert page.sum("vllm:inter_token_latency_seconds_sum") == pytest.approx(decode, rel=0.2)


def test_choices_are_counted_per_choice_and_parameters_per_prompt() -> None:
    with running() as server:
        options = {"prompt": ["one", "another"], "n": 3, "max_tokens": 8, "ignore_eos": True}
        server.post("completions", **options)
        page = page_of(server)
    assert page.sum("vllm:request_generation_tokens_count") == 6
    assert page.sum("vllm:request_prompt_tokens_sum") == 3 * (3 + 7)
    assert page.sum("vllm:request_params_n_count") == 2
    assert page.sum("vllm:request_params_n_sum") == 6
    assert page.sum("vllm:request_max_num_generation_tokens_count") == 2
    assert page.sum("vllm:request_max_num_generation_tokens_sum") == 16


def test_drafts_are_counted_only_with_speculation() -> None:
    drafts, drafted, accepted, by_place = (
        f"vllm:spec_decode_num_{name}_total"
        for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    )
    with running() as server:
        assert not page_of(server).samples_of(drafts)
    llm = repeating_llm("cpu", speculation="ngram", resident_decode=False)
    served = InProcessClient(llm)
    metrics = MetricsPage(CompletionMetrics(100), HttpMetrics(), served, "circles")
    assert ParsedMetrics(metrics.text()).sum(drafts) == 0
    llm.generate([[7, 3, 90, 12]], SamplingParams(max_new_tokens=200, ignore_eos=True))
    page, counts = ParsedMetrics(metrics.text()), llm.engine.path_counts
    served.close()
    assert 0 < page.sum(drafts) < page.sum(drafted) == counts[EnginePath.DRAFTED]
    assert 100 < page.sum(accepted) == counts[EnginePath.ACCEPTED]
    places = page.samples_of(by_place)
    values = [each.value for each in places]
    assert [each.labels["position"] for each in places] == [*map(str, range(MAX_DRAFT_TOKENS))]
    assert sum(values) == page.sum(accepted)
    assert page.sum(drafts) >= values[0] > values[-1]
    assert sorted(values, reverse=True) == values


def test_only_known_paths_are_labels() -> None:
    with running() as server:
        for path in ("/v1/models", "/v1/models/none", "/v1/what", "/v1/else", "/health", "/else"):
            server.request("GET", path)
        server.post("completions", prompt="x", n=0)
        page = page_of(server)
    samples = {
        (each.labels["handler"], each.labels["method"], each.labels["status"]): each.value
        for each in page.samples_of("http_requests_total")
    }
    assert samples == {
        ("/v1/models", "GET", "2xx"): 1,
        ("none", "GET", "4xx"): 3,
        ("/v1/completions", "POST", "4xx"): 1,
    }


SLOS = {
    "vllm:time_to_first_token_seconds": "0.1 0.25 0.5 0.75 1.0 2.5 5.0 10.0",
    "vllm:request_time_per_output_token_seconds": "0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.5",
}
"""Bucket bounds that the Overview dashboard offers, and queries literally."""


def test_histograms_have_the_queried_bounds() -> None:
    with running() as server:
        page = page_of(server)
    for name, bounds in SLOS.items():
        for bound in bounds.split():
            assert len(page.samples_of(f"{name}_bucket{{le={bound}}}")) == 1, (name, bound)


def test_length_histograms_have_the_bounds_of_vllm() -> None:
    assert length_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert length_bounds(1024)[-1] == 1000
    with running() as server:
        page = page_of(server)
    bounds = [each.labels["le"] for each in page.samples_of("vllm:request_prompt_tokens_bucket")]
    assert bounds == [*map(str, length_bounds(1024)), "+Inf"]
    assert bounds[:3] == ["1.0", "2.0", "5.0"]
    steps = [each.labels["le"] for each in page.samples_of("vllm:iteration_tokens_total_bucket")]
    assert [float(each) for each in steps[:3] + steps[-2:-1]] == [1, 8, 16, 16384]
