"""vLLM's dashboards, and gateways made for it, find the series that they ask for, and the truth.

The names were read in vLLM's ``examples/observability`` and in the defaults of the endpoint picker,
on 2026-11-25.
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
"""Prompts of so many tokens as they have characters, and how many each is continued by."""
TEXTS = len(PROMPTS) + 1  # the first is asked for twice
READ = 2 * 40 + 23 + 1
FOUND = 32
"""Tokens of the first prompt, in whole blocks, that the prefix cache has the second time."""
GENERATED = 2 * 90 + 60 + 1
BETWEEN = GENERATED - TEXTS

GATEWAY = {
    "vllm:num_requests_waiting": 0,
    "vllm:num_requests_running": 0,
    "vllm:kv_cache_usage_perc": 0,
    "vllm:cache_config_info": 1,
}
"""What the endpoint picker asks for, but for adapters."""


def counted(name: str, count: float, total: float | None = None) -> dict[str, float | None]:
    """Return the series of a histogram, of which each is asked for by some panel."""
    return {f"{name}_bucket{{le=+Inf}}": count, f"{name}_count": count, f"{name}_sum": total}


DASHBOARDS: dict[str, float | None] = {
    # prometheus_grafana/grafana.json
    **counted("vllm:e2e_request_latency_seconds", TEXTS),
    "vllm:prompt_tokens_total": READ,
    "vllm:generation_tokens_total": GENERATED,
    **counted("vllm:inter_token_latency_seconds", BETWEEN),
    **counted("vllm:time_to_first_token_seconds", TEXTS),
    **counted("vllm:request_prompt_tokens", TEXTS, READ),
    **counted("vllm:request_generation_tokens", TEXTS, GENERATED),
    "vllm:request_success_total": TEXTS,
    "vllm:request_success_total{finished_reason=length}": TEXTS,
    "vllm:request_success_total{finished_reason=error}": 0,
    **counted("vllm:request_queue_time_seconds", TEXTS),
    **counted("vllm:request_prefill_time_seconds", TEXTS),
    **counted("vllm:request_decode_time_seconds", TEXTS),
    **counted("vllm:request_max_num_generation_tokens", TEXTS, GENERATED),
    # dashboards/grafana: vllm_overview.json, vllm_instances.json, vllm_kv_cache.json
    **counted("vllm:request_time_per_output_token_seconds", TEXTS),
    "vllm:iteration_tokens_total_sum": READ - FOUND + GENERATED,
    "vllm:iteration_tokens_total_count": None,
    "vllm:num_requests_waiting_by_reason{reason=capacity}": 0,
    "vllm:num_requests_waiting_by_reason{reason=deferred}": 0,
    "vllm:num_preemptions_total": 0,
    "vllm:prefix_cache_queries_total": READ,
    "vllm:prefix_cache_hits_total": FOUND,
    "vllm:prompt_tokens_cached_total": FOUND,
    "vllm:prompt_tokens_cached_by_source_total{source=device}": FOUND,
    "vllm:prompt_tokens_by_source_total{source=local_compute}": READ - FOUND,
    "vllm:prompt_tokens_by_source_total{source=local_cache_hit}": FOUND,
    **counted("vllm:request_prefill_kv_computed_tokens", TEXTS, READ - FOUND),
    "http_requests_total{status=2xx}": TEXTS,
    "http_requests_total{handler=/v1/completions}": TEXTS,
    "http_request_duration_seconds_count{handler=/v1/completions}": TEXTS,
    "http_request_duration_seconds_sum{handler=/v1/completions}": None,
    "process_start_time_seconds": None,
    "process_cpu_seconds_total": None,
    "process_resident_memory_bytes": None,
    "process_open_fds": None,
    "process_max_fds": None,
    # dashboards/grafana: vllm_service_status.json
    "vllm:engine_sleep_state{sleep_state=awake}": 1,
    "vllm:engine_sleep_state{sleep_state=discard_all}": 0,
    # by the names that dashboards of other makers ask for besides
    **counted("vllm:time_per_output_token_seconds", BETWEEN),
    **counted("vllm:request_inference_time_seconds", TEXTS),
    **counted("vllm:request_params_n", TEXTS, TEXTS),
    **counted("vllm:request_params_max_tokens", TEXTS, GENERATED),
}
"""The series, and the sum of what they must say; None where that is some time or size."""


class Page:
    """``/metrics``, looked at as Prometheus does."""

    def __init__(self, text: bytes) -> None:
        found = text_string_to_metric_families(text.decode())
        self.families = {family.name: family for family in found}
        self.samples = [each for family in self.families.values() for each in family.samples]

    def all_of(self, series: str) -> list[Sample]:
        """Return what a name, or one with a label, stands for."""
        name, label, value = re.fullmatch(r"([^{]+)(?:{(\w+)=(.+)})?", series).groups()  # type: ignore[union-attr]
        return [
            each
            for each in self.samples
            if each.name == name and (label is None or each.labels.get(label) == value)
        ]

    def sum(self, series: str) -> float:
        found = self.all_of(series)
        assert found, f"there is no {series}"
        return sum(each.value for each in found)


def page_of(server: Server) -> Page:
    return Page(server.ask("GET", "/metrics").data)


def ask_for_all(server: Server) -> None:
    for prompt, tokens in [*PROMPTS.items(), *PROMPTS.items()][:TEXTS]:
        answer = server.post("completions", prompt=prompt, max_tokens=tokens, ignore_eos=True)
        assert answer.json["usage"]["completion_tokens"] == tokens
    server.await_idleness()


def test_dashboards_and_gateways_find_what_they_ask_for_and_it_is_true() -> None:
    with running() as server:
        ask_for_all(server)
        page = page_of(server)
    for series, value in (DASHBOARDS | GATEWAY).items():
        if value is None:
            assert page.sum(series) > 0, series
        else:
            assert page.sum(series) == value, series


def test_what_a_gateway_reads_are_gauges() -> None:
    with running() as server:
        page = page_of(server)
    for name in GATEWAY:
        assert page.families[name].type == "gauge"
        assert len(page.all_of(name)) == 1


def test_every_series_is_there_before_anything_is_asked_for() -> None:
    """Rates are of two looks: what appears with its first request would miss that."""
    with running() as server:
        page = page_of(server)
    for series in DASHBOARDS | GATEWAY:
        if not series.startswith("http_"):
            assert page.all_of(series), series


def test_a_text_waits_then_is_read_then_written_and_that_is_all_its_time() -> None:
    with running(max_batch_size=1) as server:
        asked = {"prompt": ["x" * 40, "y" * 40], "max_tokens": 200, "ignore_eos": True}
        server.post("completions", **asked)
        page = page_of(server)
    queue, prefill, decode, inference, whole, first = (
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
    assert 0.8 * whole < queue + prefill + decode <= whole
    assert inference == pytest.approx(prefill + decode)
    # One waits for the other, which takes as long as itself will.
    assert 0.1 * inference < queue < 0.9 * inference
    assert 0 < prefill < decode
    assert 0.8 * first < queue + prefill <= first
    each_token = page.sum("vllm:request_time_per_output_token_seconds_sum")
    assert each_token == pytest.approx(decode / 199)
    assert page.sum("vllm:inter_token_latency_seconds_sum") == pytest.approx(decode, rel=0.2)


def test_choices_of_a_prompt_count_each_but_once_for_the_prompt() -> None:
    with running() as server:
        asked = {"prompt": ["one", "another"], "n": 3, "max_tokens": 8, "ignore_eos": True}
        server.post("completions", **asked)
        page = page_of(server)
    assert page.sum("vllm:request_generation_tokens_count") == 6
    assert page.sum("vllm:request_prompt_tokens_sum") == 3 * (3 + 7)
    assert page.sum("vllm:request_params_n_count") == 2
    assert page.sum("vllm:request_params_n_sum") == 6
    assert page.sum("vllm:request_max_num_generation_tokens_count") == 2
    assert page.sum("vllm:request_max_num_generation_tokens_sum") == 16


def test_drafts_are_counted_with_speculation_alone() -> None:
    drafts, drafted, accepted, by_place = (
        f"vllm:spec_decode_num_{name}_total"
        for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    )
    with running() as server:
        assert not page_of(server).all_of(drafts)
    llm = repeating_llm("cpu", speculation="ngram", resident_decode=False)
    served = InProcessClient(llm)
    shown = MetricsPage(CompletionMetrics(100), HttpMetrics(), served, "circles")
    assert Page(shown.text()).sum(drafts) == 0
    llm.generate([[7, 3, 90, 12]], SamplingParams(max_new_tokens=200, ignore_eos=True))
    page, counts = Page(shown.text()), llm.engine.path_counts
    served.close()
    assert 0 < page.sum(drafts) < page.sum(drafted) == counts[EnginePath.DRAFTED]
    assert 100 < page.sum(accepted) == counts[EnginePath.ACCEPTED]
    places = page.all_of(by_place)
    values = [each.value for each in places]
    assert [each.labels["position"] for each in places] == [*map(str, range(MAX_DRAFT_TOKENS))]
    assert sum(values) == page.sum(accepted)
    assert page.sum(drafts) >= values[0] > values[-1]
    assert sorted(values, reverse=True) == values


def test_only_known_paths_below_v1_are_told_apart() -> None:
    with running() as server:
        for path in ("/v1/models", "/v1/models/none", "/v1/what", "/v1/else", "/health", "/else"):
            server.ask("GET", path)
        server.post("completions", prompt="x", n=0)
        page = page_of(server)
    found = {
        (each.labels["handler"], each.labels["method"], each.labels["status"]): each.value
        for each in page.all_of("http_requests_total")
    }
    assert found == {
        ("/v1/models", "GET", "2xx"): 1,
        ("none", "GET", "4xx"): 3,
        ("/v1/completions", "POST", "4xx"): 1,
    }


SLOS = {
    "vllm:time_to_first_token_seconds": "0.1 0.25 0.5 0.75 1.0 2.5 5.0 10.0",
    "vllm:request_time_per_output_token_seconds": "0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.5",
}
"""The bounds that the Overview lets one choose from, and asks for by these very letters."""


def test_histograms_have_the_bounds_that_are_asked_for() -> None:
    with running() as server:
        page = page_of(server)
    for name, bounds in SLOS.items():
        for bound in bounds.split():
            assert len(page.all_of(f"{name}_bucket{{le={bound}}}")) == 1, (name, bound)


def test_lengths_have_the_bounds_of_vllm() -> None:
    assert length_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert length_bounds(1024)[-1] == 1000
    with running() as server:
        page = page_of(server)
    bounds = [each.labels["le"] for each in page.all_of("vllm:request_prompt_tokens_bucket")]
    assert bounds == [*map(str, length_bounds(1024)), "+Inf"]
    assert bounds[:3] == ["1.0", "2.0", "5.0"]
    steps = [each.labels["le"] for each in page.all_of("vllm:iteration_tokens_total_bucket")]
    assert [float(each) for each in steps[:3] + steps[-2:-1]] == [1, 8, 16, 16384]
