"""Two replicas under Ray, one of which is killed while it serves."""

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
from tests.replicas.replica_processes import below, replicas_of, runs
from tests.server.serve_process import CODE, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.server.serve_process import Serving

pytest.importorskip("ray.serve", reason="replicas run under Ray: pip install '.[scale]'")

PATIENCE = 120
"""Seconds: two processes import torch meanwhile, on a machine that may be busy."""
AT_ONCE = 3
OPTIONS = (
    *("--replicas", "2", "--dtype", "float32", "--max-batch-size", str(AT_ONCE)),
    *("--kv-cache-tokens", "16384"),
)
LONG, SHORT = 800, 12
LENGTHS = (LONG, SHORT)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(*OPTIONS, patience=PATIENCE) as started:
        yield started


@pytest.fixture(scope="module")
def alone(server: Serving) -> dict[tuple[int, int], str]:
    """Return the text that each prompt gets with no other there, by its number and length."""
    asked = [(number, length) for length in LENGTHS for number in range(4 * AT_ONCE)]
    with client_of(server) as client:
        return {each: "".join(texts_of(client, *each)) for each in asked}


def client_of(server: Serving, retries: int = 0) -> Any:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=retries, timeout=PATIENCE
    )


def body(number: int, length: int) -> dict[str, Any]:
    prompt = f"number {number} of those that ask" + "!" * number
    return {"model": "tiny", "prompt": prompt, "max_tokens": length, "temperature": 0}


def texts_of(client: Any, number: int, length: int) -> Iterator[str]:
    more = {"ignore_eos": True}
    for chunk in client.completions.create(**body(number, length), stream=True, extra_body=more):
        yield chunk.choices[0].text


class Told:
    """What came of one stream."""

    def __init__(self, client: Any, number: int) -> None:
        self.number = number
        self.text = ""
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._listen, args=(client,))
        self.thread.start()

    def _listen(self, client: Any) -> None:
        try:
            for text in texts_of(client, self.number, LONG):
                self.text += text
        except Exception as error:
            self.error = error


def numbers_of(server: Serving, name: str, label: str = "") -> dict[str, float]:
    """Return a metric of each replica, the one with a label if it has several."""
    _, page = ask(server, "GET", "/metrics")
    found = re.findall(rf'^{name}{{engine="(\d+)".*{label}.*}} (\S+)$', page.decode(), re.MULTILINE)
    return {engine: float(value) for engine, value in found}


def ask(server: Serving, method: str, path: str, asked: Any = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
    try:
        data = None if asked is None else json.dumps(asked)
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def await_that(what: str, holds: Any) -> None:
    end = time.monotonic() + PATIENCE / 2
    while not holds():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)


def is_closed(server: Serving) -> bool:
    try:
        ask(server, "GET", "/ready")
    except ConnectionRefusedError:
        return True
    return False


def test_why_no_replica_can_serve_is_said_in_a_line(tmp_path: Path) -> None:
    tiny_gpt2().model.save_pretrained(tmp_path)
    words = ("--replicas", "1", "--device", "cpu", "--port", "0", "--model", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert f"roseinfer serve: {tmp_path}: the model has no tokenizer; serve one that has" in lines
    assert not any("Traceback" in line for line in lines)


def test_who_leaves_cancels_what_a_replica_does(server: Serving) -> None:
    def cancelled() -> float:
        ends = numbers_of(server, "vllm:request_success_total", 'finished_reason="abort"')
        return sum(ends.values())

    before = cancelled()
    with client_of(server) as client:
        stream = client.completions.create(**body(0, LONG), stream=True, n=8)
        next(iter(stream))
        stream.close()
    await_that("its texts are cancelled", lambda: cancelled() > before)
    assert sum(numbers_of(server, "vllm:num_requests_running").values()) == 0


def test_a_killed_replica_takes_only_its_own_streams_with_it(
    server: Serving, alone: dict[tuple[int, int], str]
) -> None:
    """More texts are asked for than run at once, so some have not begun when it is killed."""
    with client_of(server) as client:
        told = [Told(client, number) for number in range(4 * AT_ONCE)]
        await_that(
            "both replicas are busy",
            lambda: [*numbers_of(server, "vllm:num_requests_running").values()] == [AT_ONCE] * 2,
        )
        await_that("texts have begun", lambda: sum(bool(each.text) for each in told) >= 2 * AT_ONCE)
        victim, other = replicas_of(server.process.pid)
        os.kill(victim, signal.SIGKILL)
        with client_of(server, retries=3) as patient, ThreadPoolExecutor(4) as pool:
            soon = [*pool.map(lambda n: "".join(texts_of(patient, n, SHORT)), range(8))]
        for each in told:
            each.thread.join(PATIENCE)
    assert soon == [alone[number, SHORT] for number in range(8)]

    lost = [each for each in told if each.error is not None]
    begun = [each for each in lost if each.text]
    assert 1 <= len(begun) <= AT_ONCE
    assert len(begun) < len(lost) < len(told)
    for each in lost:
        assert alone[each.number, LONG].startswith(each.text)
        assert isinstance(each.error, openai.APIError)
        assert "try again, and another replica will answer" in str(each.error)
        if not each.text:
            assert isinstance(each.error, openai.InternalServerError)
            assert each.error.status_code == 503
    for each in told:
        assert each.error is not None or each.text == alone[each.number, LONG]
    assert runs(other)
    assert not runs(victim)

    await_that(
        "another comes in its place",
        lambda: numbers_of(server, "vllm:num_requests_running").keys() == {"0", "1"},
    )
    assert ask(server, "GET", "/ready")[0] == 200

    def both_serve() -> bool:
        with client_of(server) as client:
            assert "".join(texts_of(client, 0, SHORT)) == alone[0, SHORT]
        return min(numbers_of(server, "vllm:generation_tokens_total").values()) > 0

    await_that("both serve", both_serve)


def test_the_bytes_of_a_stream_that_breaks_off_are_not_those_of_one_that_ended(
    server: Serving,
) -> None:
    asked = body(0, LONG) | {"stream": True, "ignore_eos": True}
    await_that("two are there", lambda: len(replicas_of(server.process.pid)) == 2)
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, server, "POST", "/v1/completions", asked) for _ in range(2)]
        await_that(
            "both run",
            lambda: sum(numbers_of(server, "vllm:num_requests_running").values()) == 2,
        )
        time.sleep(0.2)
        for replica in replicas_of(server.process.pid):
            os.kill(replica, signal.SIGKILL)
        for each in asking:
            broken = each.exception(PATIENCE)
            assert isinstance(broken, IncompleteRead)
            assert b"data: " in broken.partial
            assert b'"code":"replica_lost"' in broken.partial
            assert b"[DONE]" not in broken.partial
    status, said = ask(server, "POST", "/v1/completions", body(1, SHORT))
    assert status in (200, 503), said
    await_that("one is there again", lambda: ask(server, "GET", "/ready")[0] == 200)


def test_sigterm_lets_texts_end_and_leaves_no_process(
    server: Serving, alone: dict[tuple[int, int], str]
) -> None:
    await_that("two are there", lambda: len(numbers_of(server, "roseinfer:kv_blocks")) == 2)
    processes = below(server.process.pid)
    assert len(processes) > 4
    with client_of(server) as client:
        stream = texts_of(client, 2, LONG)
        text = next(stream)
        server.process.send_signal(signal.SIGTERM)
        await_that("nobody is let in any more", lambda: is_closed(server))
        text += "".join(stream)
    assert text == alone[2, LONG]
    assert server.process.wait(PATIENCE) == 0
    await_that("the last line is read", lambda: any(str(LONG) in line for line in server.logged))
    await_that("all have ended", lambda: not any(runs(each) for each in processes))
    logged = [json.loads(line) for line in server.logged if line.startswith("{")]
    assert {line["status"] for line in logged} <= {200, 499, 503}
    texts = [line for line in logged if "completion_tokens" in line]
    assert texts[-1]["completion_tokens"] == LONG
    assert "left" not in texts[-1]
