"""Metrics and the access log, which contain no prompt and no completion."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from roseinfer import __version__
from roseinfer.paths import Histogram
from roseinfer.server.prompts import PromptEncoder
from tests.server.clients import Call, both_clients
from tests.server.served import MODEL, running

if TYPE_CHECKING:
    from roseinfer.server.prompts import Prompt
    from tests.server.served import Server

NAMES = {
    "vllm:cache_config_info",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:engine_sleep_state",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:prompt_tokens_by_source",
    "vllm:prompt_tokens_cached_by_source",
    "vllm:generation_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:iteration_tokens_total",
    "http_requests",
    "http_request_duration_seconds",
    "roseinfer:engine_restarts",
    "roseinfer:kv_blocks",
}


def metric_values(server: Server, *names: str) -> dict[str, float]:
    return {name: server.metric(f"vllm:{name}") for name in names}


def test_metrics_have_the_names_of_vllm_and_a_model_label() -> None:
    with running(config={"served_model_name": ("rose", "other")}) as server:
        text = server.request("GET", "/metrics").data.decode()
        families = [
            family
            for family in text_string_to_metric_families(text)
            if not family.name.startswith("process_")
        ]
        assert {family.name for family in families} == NAMES
        for family in families:
            assert family.documentation
            assert all(each.labels["model_name"] == "rose" for each in family.samples)


def test_counters_match_the_requests() -> None:
    with running() as server:
        prompt = "x" * 40
        for stream in (False, True):
            options = {"prompt": prompt, "max_tokens": 9, "ignore_eos": True, "stream": stream}
            server.post("completions", **options, n=2)
        server.post("completions", prompt="q", stop=[chr(code) for code in range(32, 64)])
        usage = server.post("chat/completions", messages=[{"role": "user", "content": "x"}]).json[
            "usage"
        ]
        ends = {
            reason: server.metric("vllm:request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert sum(ends.values()) == 6
        assert ends["length"] >= 4
        assert ends["abort"] == ends["error"] == 0
        counts = metric_values(server, "prompt_tokens_total", "time_to_first_token_seconds_count")
        assert counts == {
            "prompt_tokens_total": 4 * 40 + 1 + usage["prompt_tokens"],
            "time_to_first_token_seconds_count": 6,
        }
        generated = server.metric("vllm:generation_tokens_total")
        lines = [json.loads(line) for line in server.lines]
        assert generated == sum(line.get("completion_tokens", 0) for line in lines)
        assert server.metric("vllm:inter_token_latency_seconds_count") == generated - 6
        assert server.metric("vllm:time_per_output_token_seconds_count") == generated - 6
        assert server.metric("vllm:e2e_request_latency_seconds_count") == 6
        assert server.metric("vllm:e2e_request_latency_seconds_bucket", le="+Inf") == 6
        assert server.metric("roseinfer:kv_blocks", use="cached") > 5
        engine = server.llm.engine
        assert server.metric("vllm:prefix_cache_queries_total") == engine.prefix_queries
        assert server.metric("vllm:prefix_cache_hits_total") == engine.prefix_hits >= 3 * 32


def test_gauges_show_running_requests_and_used_blocks() -> None:
    with running(kv_cache_tokens=1600, max_batch_size=1) as server:
        total = server.metric("roseinfer:kv_blocks", use="free")
        assert total == 100
        assert server.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
        gauges = {}
        with server.client() as client:
            options = {"model": MODEL, "prompt": "x" * 100, "max_tokens": 800, "stream": True}
            stream = client.completions.create(**options, n=2, extra_body={"ignore_eos": True})
            for at, _ in enumerate(stream):
                if at == 3:
                    gauges = metric_values(
                        server,
                        "num_requests_running",
                        "num_requests_waiting",
                        "kv_cache_usage_perc",
                    )
                    break
            stream.close()
        assert gauges["num_requests_running"] == 1
        assert gauges["num_requests_waiting"] == 1
        assert 0.07 <= gauges["kv_cache_usage_perc"] < 1
        server.await_idleness()
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2


def test_latency_includes_reading_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    read, slow = PromptEncoder._read, 0.2

    def slow_read(self: PromptEncoder, prompt: str | list[int], field: str) -> Prompt:
        time.sleep(slow)
        return read(self, prompt, field)

    monkeypatch.setattr(PromptEncoder, "_read", slow_read)
    with running() as server:
        server.post("completions", prompt="x", max_tokens=1)
        for name in ("time_to_first_token", "e2e_request_latency"):
            assert server.metric(f"vllm:{name}_seconds_sum") >= slow
        assert server.metric("vllm:request_queue_time_seconds_sum") < slow


def test_preemptions_are_counted() -> None:
    with running(kv_cache_tokens=96, block_size=4) as server:
        prompts = ["x" * 20, "y" * 20, "z" * 20]
        server.post("completions", prompt=prompts, max_tokens=60, ignore_eos=True)
        assert server.metric("vllm:num_preemptions_total") > 0


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram((0.1, 1.0))
    for value, times in ((0.05, 1), (0.1, 2), (0.5, 1), (3.0, 1)):
        histogram.add(value, times)
    assert histogram.buckets() == [("0.1", 3.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == pytest.approx(3.75)


# ------------------------------------------------------------------------------- access log


def test_access_log_has_a_line_per_request_without_its_text(
    capfd: pytest.CaptureFixture[str],
) -> None:
    secret = "a secret that nobody else may read"
    with running() as server:
        text = server.post("completions", prompt=secret, temperature=0).json["choices"][0]["text"]
        server.post("completions", prompt=secret, n=0)
        server.post("chat/completions", messages=[{"role": "user", "content": secret}])
        server.post("responses", input=secret, stream=True)
        server.request("GET", f"/v1/models?prompt={secret.replace(' ', '+')}")
        answer = server.request("GET", "/health")
    lines = [json.loads(line) for line in server.lines]
    assert [line["status"] for line in lines] == [200, 400, 200, 200, 200, 200]
    assert lines[0]["path"] == "/v1/completions"
    assert lines[0]["prompt_tokens"] == len(secret)
    assert lines[-1]["id"] == answer.headers["x-request-id"]
    assert all(line["seconds"] >= 0 and line["client"] == "127.0.0.1" for line in lines)
    output = "".join(server.lines) + "".join(capfd.readouterr())
    for word in (secret, "secret", text):
        assert word not in output


def test_access_log_can_be_disabled(capfd: pytest.CaptureFixture[str]) -> None:
    with running(config={"access_log": False}) as server:
        server.post("completions", prompt="x")
        assert server.lines == []
    assert capfd.readouterr().out == ""


# ---------------------------------------------------------------------- other endpoints


@both_clients
def test_models_are_listed_and_retrieved(server: Server, call_api: Call) -> None:
    (page,) = call_api(server, "models.list")
    (model,) = page.data
    assert call_api(server, "models.retrieve", model=MODEL) == [model]
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "roseinfer")
    assert model.max_model_len == 1024
    assert model.batch_invariant is server.llm.batch_invariant
    assert model.batch_variance_reason == server.llm.batch_variance_reason


def test_version_is_reported(server: Server) -> None:
    assert server.request("GET", "/version").json == {"version": __version__}


def test_model_may_have_several_names_with_slashes() -> None:
    with running(config={"served_model_name": ("org/rose", "rose")}) as server:
        with server.client() as client:
            assert [model.id for model in client.models.list()] == ["org/rose", "rose"]
            assert client.models.retrieve("org/rose").id == "org/rose"
            for name in ("org/rose", "rose"):
                assert client.completions.create(model=name, prompt="x").model == name
        assert server.post("completions", prompt="x").status == 404


def test_openapi_document_is_complete(server: Server) -> None:
    document = server.request("GET", "/openapi.json").json
    assert {*document["paths"]} >= {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
    schema = document["components"]["schemas"]["CompletionBody"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["model"]["enum"] == [MODEL]
    named = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert {*named} <= document["components"]["schemas"].keys()
