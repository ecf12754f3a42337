"""``/metrics`` says what happened, and the access log too, but for what was asked."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from roseinfer import __version__
from roseinfer.histogram import Histogram
from roseinfer.server.prompts import PromptEncoder
from tests.server.clients import Asking, by_both_clients
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


def counted(server: Server, *names: str) -> dict[str, float]:
    return {name: server.metric(f"vllm:{name}") for name in names}


def test_names_are_vllms_and_all_have_the_models_name() -> None:
    with running(config={"served_model_name": ("rose", "other")}) as server:
        text = server.ask("GET", "/metrics").data.decode()
        families = [
            family
            for family in text_string_to_metric_families(text)
            if not family.name.startswith("process_")
        ]
        assert {family.name for family in families} == NAMES
        for family in families:
            assert family.documentation
            assert all(each.labels["model_name"] == "rose" for each in family.samples)


def test_the_counts_are_those_of_what_was_asked() -> None:
    with running() as server:
        prompt = "x" * 40
        for stream in (False, True):
            asked = {"prompt": prompt, "max_tokens": 9, "ignore_eos": True, "stream": stream}
            server.post("completions", **asked, n=2)
        server.post("completions", prompt="q", stop=[chr(code) for code in range(32, 64)])
        usage = server.post("chat/completions", messages=[{"role": "user", "content": "x"}]).json[
            "usage"
        ]
        ends = {
            why: server.metric("vllm:request_success_total", finished_reason=why)
            for why in ("stop", "length", "abort", "error")
        }
        assert sum(ends.values()) == 6
        assert ends["length"] >= 4
        assert ends["abort"] == ends["error"] == 0
        found = counted(server, "prompt_tokens_total", "time_to_first_token_seconds_count")
        assert found == {
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


def test_blocks_and_requests_are_seen_while_they_are_there() -> None:
    with running(kv_cache_tokens=1600, max_batch_size=1) as server:
        total = server.metric("roseinfer:kv_blocks", use="free")
        assert total == 100
        assert server.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
        seen = {}
        with server.client() as client:
            asked = {"model": MODEL, "prompt": "x" * 100, "max_tokens": 800, "stream": True}
            stream = client.completions.create(**asked, n=2, extra_body={"ignore_eos": True})
            for at, _ in enumerate(stream):
                if at == 3:
                    seen = counted(
                        server,
                        "num_requests_running",
                        "num_requests_waiting",
                        "kv_cache_usage_perc",
                    )
                    break
            stream.close()
        assert seen["num_requests_running"] == 1
        assert seen["num_requests_waiting"] == 1
        assert 0.07 <= seen["kv_cache_usage_perc"] < 1
        server.await_idleness()
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2


def test_a_request_begins_before_its_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, slow = PromptEncoder._read, 0.2

    def read_slowly(self: PromptEncoder, prompt: str | list[int], field: str) -> Prompt:
        time.sleep(slow)
        return read(self, prompt, field)

    monkeypatch.setattr(PromptEncoder, "_read", read_slowly)
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


def test_a_histogram_counts_like_prometheus() -> None:
    histogram = Histogram((0.1, 1.0))
    for value, times in ((0.05, 1), (0.1, 2), (0.5, 1), (3.0, 1)):
        histogram.add(value, times)
    assert histogram.buckets() == [("0.1", 3.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == pytest.approx(3.75)


# ------------------------------------------------------------------------------- the access log


def test_a_line_for_each_request_says_how_it_ended_and_never_what_was_asked(
    capfd: pytest.CaptureFixture[str],
) -> None:
    secret = "a secret that nobody else may read"
    with running() as server:
        text = server.post("completions", prompt=secret, temperature=0).json["choices"][0]["text"]
        server.post("completions", prompt=secret, n=0)
        server.post("chat/completions", messages=[{"role": "user", "content": secret}])
        server.post("responses", input=secret, stream=True)
        server.ask("GET", f"/v1/models?prompt={secret.replace(' ', '+')}")
        answer = server.ask("GET", "/health")
    lines = [json.loads(line) for line in server.lines]
    assert [line["status"] for line in lines] == [200, 400, 200, 200, 200, 200]
    assert lines[0]["path"] == "/v1/completions"
    assert lines[0]["prompt_tokens"] == len(secret)
    assert lines[-1]["id"] == answer.headers["x-request-id"]
    assert all(line["seconds"] >= 0 and line["client"] == "127.0.0.1" for line in lines)
    said = "".join(server.lines) + "".join(capfd.readouterr())
    for word in (secret, "secret", text):
        assert word not in said


def test_it_can_be_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with running(config={"access_log": False}) as server:
        server.post("completions", prompt="x")
        assert server.lines == []
    assert capfd.readouterr().out == ""


# --------------------------------------------------------------------------------- small things


@by_both_clients
def test_models(server: Server, asking: Asking) -> None:
    (page,) = asking(server, "models.list")
    (model,) = page.data
    assert asking(server, "models.retrieve", model=MODEL) == [model]
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "roseinfer")
    assert model.max_model_len == 1024
    assert model.batch_invariant is server.llm.batch_invariant
    assert model.why_batch_variant == server.llm.why_batch_variant


def test_version(server: Server) -> None:
    assert server.ask("GET", "/version").json == {"version": __version__}


def test_a_model_may_have_several_names_with_slashes_in_them() -> None:
    with running(config={"served_model_name": ("org/rose", "rose")}) as server:
        with server.client() as client:
            assert [model.id for model in client.models.list()] == ["org/rose", "rose"]
            assert client.models.retrieve("org/rose").id == "org/rose"
            for name in ("org/rose", "rose"):
                assert client.completions.create(model=name, prompt="x").model == name
        assert server.post("completions", prompt="x").status == 404


def test_the_document_says_what_there_is(server: Server) -> None:
    document = server.ask("GET", "/openapi.json").json
    assert {*document["paths"]} >= {"/v1/completions", "/v1/chat/completions", "/v1/responses"}
    schema = document["components"]["schemas"]["CompletionBody"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["model"]["enum"] == [MODEL]
    named = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert {*named} <= document["components"]["schemas"].keys()
