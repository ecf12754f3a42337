"""Metrics of several replicas, merged into one page that Prometheus can read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from roseinfer.replicas.front import merge_metrics_pages
from tests.server.served import running

FIRST = b"""\
# HELP vllm:tokens_total Tokens.
# TYPE vllm:tokens_total counter
vllm:tokens_total{engine="0",model_name="a b"} 3.0
# HELP process_threads Of a process.
# TYPE process_threads gauge
process_threads 4.0
"""
SECOND = (
    FIRST.replace(b'"0"', b'"1"').replace(b"3.0", b"4.0")
    + b"""\
# HELP vllm:new New.
# TYPE vllm:new gauge
vllm:new{engine="1"} 1.0
"""
)


def test_metric_descriptions_are_merged() -> None:
    assert merge_metrics_pages([FIRST, SECOND]).decode().splitlines() == [
        "# HELP vllm:tokens_total Tokens.",
        "# TYPE vllm:tokens_total counter",
        'vllm:tokens_total{engine="0",model_name="a b"} 3.0',
        'vllm:tokens_total{engine="1",model_name="a b"} 4.0',
        "# HELP vllm:new New.",
        "# TYPE vllm:new gauge",
        'vllm:new{engine="1"} 1.0',
    ]
    assert merge_metrics_pages([]) == b""


def test_merged_pages_of_servers_are_complete() -> None:
    with running() as server:
        server.post("completions", prompt="x", max_tokens=4)
        page = server.request("GET", "/metrics").data
    second = page.replace(b'engine="0"', b'engine="1"')
    samples_of_one = _samples(page)
    samples_of_both = _samples(merge_metrics_pages([page, second]))
    assert {labels["engine"] for _, labels, _ in samples_of_both} == {"0", "1"}
    assert [each for each in samples_of_both if each[1]["engine"] == "0"] == [
        each for each in samples_of_one if "engine" in each[1]
    ]
    assert len(samples_of_both) > 100


def _samples(page: bytes) -> list[tuple[str, dict[str, str], float]]:
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    ]
