"""Two replicas under Ray, one of which is killed while serving."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, IncompleteRead
from typing import TYPE_CHECKING, Any

import openai
import pytest

from roseinfer import tiny_gpt2
from tests.python_process import ROOT
from tests.replicas.replica_processes import descendants_of, is_running, replicas_of
from tests.server.serve_process import CODE, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.server.serve_process import Serving

pytest.importorskip("ray.serve", reason="replicas run under Ray: pip install '.[scale]'")

TIMEOUT_S = 120
"""Seconds; two processes import torch meanwhile, on a machine that may be busy."""
BATCH_SIZE = 3
OPTIONS = (
    *("--replicas", "2", "--dtype", "float32", "--max-batch-size", str(BATCH_SIZE)),
    *("--kv-cache-tokens", "16384"),
)
LONG, SHORT = 800, 12
LENGTHS = (LONG, SHORT)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(*OPTIONS, timeout=TIMEOUT_S) as started:
        yield started


@pytest.fixture(scope="module")
def alone(server: Serving) -> dict[tuple[int, int], str]:
    """Return the completion of each prompt served alone, by its number and length."""
    request_body = [(number, length) for length in LENGTHS for number in range(4 * BATCH_SIZE)]
    with client_of(server) as client:
        return {each: "".join(texts_of(client, *each)) for each in request_body}


def client_of(server: Serving, retries: int = 0) -> Any:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=retries, timeout=TIMEOUT_S
    )


def body(number: int, length: int) -> dict[str, Any]:
    prompt = f"number {number} of those that ask" + "!" * number
    return {"model": "tiny", "prompt": prompt, "max_tokens": length, "temperature": 0}


def texts_of(client: Any, number: int, length: int) -> Iterator[str]:
    more = {"ignore_eos": True}
    for chunk in client.completions.create(**body(number, length), stream=True, extra_body=more):
        yield chunk.choices[0].text


class StreamOutcome:
    """Outcome of one stream."""

    def __init__(self, client: Any, number: int) -> None:
        self.number = number
        self.text = ""
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._read, args=(client,))
        self.thread.start()

    def _read(self, client: Any) -> None:
        try:
            for text in texts_of(client, self.number, LONG):
                self.text += text
        except Exception as error:
            self.error = error


def metric_by_replica(server: Serving, name: str, label: str = "") -> dict[str, float]:
    """Return a metric of each replica, with a label if it has several."""
    _, page = request(server, "GET", "/metrics")
    samples = re.findall(
        rf'^{name}{{engine="(\d+)".*{label}.*}} (\S+)$', page.decode(), re.MULTILINE
    )
    return {engine: float(value) for engine, value in samples}


def request(server: Serving, method: str, path: str, request_body: Any = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=TIMEOUT_S)
    try:
        data = None if request_body is None else json.dumps(request_body)
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def await_condition(description: str, condition: Any) -> None:
    end = time.monotonic() + TIMEOUT_S / 2
    while not condition():
        assert time.monotonic() < end, f"timed out: expected {description}"
        time.sleep(0.05)


def is_closed(server: Serving) -> bool:
    try:
        request(server, "GET", "/ready")
    except ConnectionRefusedError:
        return True
    return False


def test_startup_failure_of_replicas_is_reported_in_one_line(tmp_path: Path) -> None:
    tiny_gpt2().model.save_pretrained(tmp_path)
    words = ("--replicas", "1", "--device", "cpu", "--port", "0", "--model", str(tmp_path))
    process = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = process.stderr.splitlines()
    assert process.returncode == 2
    assert f"roseinfer serve: {tmp_path}: the model has no tokenizer; serve one that has" in lines
    assert not any("Traceback" in line for line in lines)


def test_disconnect_cancels_the_request_of_a_replica(server: Serving) -> None:
    def cancelled() -> float:
        ends = metric_by_replica(server, "vllm:request_success_total", 'finished_reason="abort"')
        return sum(ends.values())

    before = cancelled()
    with client_of(server) as client:
        stream = client.completions.create(**body(0, LONG), stream=True, n=8)
        next(iter(stream))
        stream.close()
    await_condition("cancelled requests", lambda: cancelled() > before)
    assert sum(metric_by_replica(server, "vllm:num_requests_running").values()) == 0


def test_killed_replica_ends_only_its_own_streams(
    server: Serving, alone: dict[tuple[int, int], str]
) -> None:
    """More requests are made than run at once, so some have not started when it is killed."""
    with client_of(server) as client:
        outcomes = [StreamOutcome(client, number) for number in range(4 * BATCH_SIZE)]
        await_condition(
            "both replicas busy",
            lambda: (
                [*metric_by_replica(server, "vllm:num_requests_running").values()]
                == [BATCH_SIZE] * 2
            ),
        )
        await_condition(
            "texts have begun", lambda: sum(bool(each.text) for each in outcomes) >= 2 * BATCH_SIZE
        )
        victim, other = replicas_of(server.process.pid)
        os.kill(victim, signal.SIGKILL)
        with client_of(server, retries=3) as retrying_client, ThreadPoolExecutor(4) as pool:
            short_texts = [
                *pool.map(lambda n: "".join(texts_of(retrying_client, n, SHORT)), range(8))
            ]
        for each in outcomes:
            each.thread.join(TIMEOUT_S)
    assert short_texts == [alone[number, SHORT] for number in range(8)]

    lost = [each for each in outcomes if each.error is not None]
    lost_after_start = [each for each in lost if each.text]
    assert 1 <= len(lost_after_start) <= BATCH_SIZE
    assert len(lost_after_start) < len(lost) < len(outcomes)
    for each in lost:
        assert alone[each.number, LONG].startswith(each.text)
        assert isinstance(each.error, openai.APIError)
        assert "try again, and another replica will answer" in str(each.error)
        if not each.text:
            assert isinstance(each.error, openai.InternalServerError)
            assert each.error.status_code == 503
    for each in outcomes:
        assert each.error is not None or each.text == alone[each.number, LONG]
    assert is_running(other)
    assert not is_running(victim)

    await_condition(
        "a replacement replica",
        lambda: metric_by_replica(server, "vllm:num_requests_running").keys() == {"0", "1"},
    )
    assert request(server, "GET", "/ready")[0] == 200

    def both_serve() -> bool:
        with client_of(server) as client:
            assert "".join(texts_of(client, 0, SHORT)) == alone[0, SHORT]
        return min(metric_by_replica(server, "vllm:generation_tokens_total").values()) > 0

    await_condition("both replicas serving", both_serve)


def test_stream_of_a_killed_replica_is_visibly_incomplete(
    server: Serving,
) -> None:
    request_body = body(0, LONG) | {"stream": True, "ignore_eos": True}
    await_condition("two replicas", lambda: len(replicas_of(server.process.pid)) == 2)
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(request, server, "POST", "/v1/completions", request_body) for _ in range(2)
        ]
        await_condition(
            "both requests running",
            lambda: sum(metric_by_replica(server, "vllm:num_requests_running").values()) == 2,
        )
        time.sleep(0.2)
        for replica in replicas_of(server.process.pid):
            os.kill(replica, signal.SIGKILL)
        for each in futures:
            failure = each.exception(TIMEOUT_S)
            assert isinstance(failure, IncompleteRead)
            assert b"data: " in failure.partial
            assert b'"code":"replica_lost"' in failure.partial
            assert b"[DONE]" not in failure.partial
    status, data = request(server, "POST", "/v1/completions", body(1, SHORT))
    assert status in (200, 503), data
    await_condition("a ready replica", lambda: request(server, "GET", "/ready")[0] == 200)


def test_sigterm_drains_and_leaves_no_process(
    server: Serving, alone: dict[tuple[int, int], str]
) -> None:
    await_condition(
        "two replicas", lambda: len(metric_by_replica(server, "roseinfer:kv_blocks")) == 2
    )
    processes = descendants_of(server.process.pid)
    assert len(processes) > 4
    with client_of(server) as client:
        stream = texts_of(client, 2, LONG)
        text = next(stream)
        server.process.send_signal(signal.SIGTERM)
        await_condition("a closed listener", lambda: is_closed(server))
        text += "".join(stream)
    assert text == alone[2, LONG]
    assert server.process.wait(TIMEOUT_S) == 0
    await_condition(
        "the last log line", lambda: any(str(LONG) in line for line in server.stdout_lines)
    )
    await_condition(
        "the end of all processes", lambda: not any(is_running(each) for each in processes)
    )
    log_lines = [json.loads(line) for line in server.stdout_lines if line.startswith("{")]
    assert {line["status"] for line in log_lines} <= {200, 499, 503}
    texts = [line for line in log_lines if "completion_tokens" in line]
    assert texts[-1]["completion_tokens"] == LONG
    assert "client_disconnected" not in texts[-1]
