"""The serve command with its engine in another process: responses, metrics and exit."""

from __future__ import annotations

import json
import os
import signal
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.cli.model_options import Parser
from roseinfer.config import TorchrunRank
from roseinfer.engine_client.in_process import InProcessClient
from roseinfer.server import serve
from roseinfer.server.serve import open_engine_client
from tests.python_process import run_python
from tests.server.load import metrics_of
from tests.server.serve_process import PATIENCE, serving
from tests.server.test_shutdown import LONG, client_of

if TYPE_CHECKING:
    from tests.server.serve_process import Serving
    from tests.server.served import Server

pytestmark = pytest.mark.slow

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
MESSAGES = [{"role": "user", "content": "Say something"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"dry": {"type": "boolean"}},
            "required": ["dry"],
        },
    },
}
PROMPT_S = 5.0
"""Seconds; it takes a twentieth of that on an idle machine."""
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("completions", {"prompt": "Once upon a time", "max_tokens": 60}),
    "several": ("completions", {"prompt": ["a", "bc"], "n": 3, "temperature": 1, "seed": 4}),
    "logprobs": ("completions", {"prompt": "Once", "logprobs": 3, "echo": True}),
    "stop": ("completions", {"prompt": "Once", "stop": ["e", "a"], "max_tokens": 200}),
    "chat": ("chat/completions", {"messages": MESSAGES, "max_tokens": 20, "logprobs": True}),
    "tool": (
        "chat/completions",
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"},
    ),
    "response": ("responses", {"input": "Once", "max_output_tokens": 20}),
    "too long": ("completions", {"prompt": "x" * 2000}),
    "unknown token": ("completions", {"prompt": [5, 999]}),
    "invalid guide": (
        "chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            },
        },
    ),
}


def request(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        data = None if body is None else json.dumps(GREEDY | body).encode()
        headers = {"content-type": "application/json"}
        connection.request("GET" if body is None else "POST", path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def without_ids(answer: Any) -> Any:
    """Return a response without ids and times."""
    if isinstance(answer, list):
        return [without_ids(each) for each in answer]
    if isinstance(answer, dict):
        return {
            name: without_ids(value)
            for name, value in answer.items()
            if name not in ("id", "created", "created_at", "completed_at", "item_id")
        }
    return round(answer, 3) if isinstance(answer, float) else answer


@pytest.mark.parametrize("body", BODIES)
def test_responses_match_those_of_one_process(
    subprocess_server: Serving, in_process_server: Server, body: str
) -> None:
    path, fields = BODIES[body]
    actual = request(subprocess_server.port, f"/v1/{path}", fields)
    expected = request(in_process_server.port, f"/v1/{path}", fields)
    assert actual[0] == expected[0]
    assert without_ids(json.loads(actual[1])) == without_ids(json.loads(expected[1]))


def child_of(server: Serving) -> int:
    """Return the process of the engine, the only child of the command's."""
    pid = server.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def metric(server: Serving, name: str) -> float:
    return metrics_of(request(server.port, "/metrics")[1].decode())[name]


def test_disconnect_frees_blocks_and_metrics_return_to_zero(subprocess_server: Serving) -> None:
    running = 'vllm:num_requests_running{engine="0",model_name="tiny"}'
    used = 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'
    with client_of(subprocess_server) as client:
        stream = client.completions.create(**LONG, n=3, max_tokens=900, stream=True)
        next(stream)
        assert metric(subprocess_server, used) > 0
        stream.close()
    closed_at = time.monotonic()
    while metric(subprocess_server, running) or metric(subprocess_server, used):
        assert time.monotonic() - closed_at < PROMPT_S
    assert (
        metric(subprocess_server, 'roseinfer:kv_blocks{engine="0",model_name="tiny",use="cached"}')
        > 0
    )


def test_engine_reports_the_times_of_requests(subprocess_server: Serving) -> None:
    names = ("request_queue_time", "request_prefill_time", "request_decode_time")
    labels = '{engine="0",model_name="tiny"}'

    def sums() -> list[float]:
        all_names = (*names, "e2e_request_latency")
        return [metric(subprocess_server, f"vllm:{name}_seconds_sum{labels}") for name in all_names]

    before = sums()
    request(
        subprocess_server.port,
        "/v1/completions",
        {"prompt": "x" * 40, "max_tokens": 200, "ignore_eos": True},
    )
    queue, prefill, decode, whole = (now - then for now, then in zip(sums(), before, strict=True))
    assert min(queue, prefill, decode) > 0
    assert 0.5 * whole < queue + prefill + decode <= whole
    steps = f"vllm:iteration_tokens_total_sum{labels}"
    assert metric(subprocess_server, steps) >= 240


def test_signals_to_the_process_group_do_not_end_the_engine(subprocess_server: Serving) -> None:
    child = child_of(subprocess_server)
    for each in (signal.SIGINT, signal.SIGTERM):
        os.kill(child, each)
    time.sleep(0.2)
    assert is_running(child)
    assert request(subprocess_server.port, "/v1/completions", {"prompt": "x"})[0] == 200


def test_engine_ends_with_the_killed_command() -> None:
    with serving() as server, client_of(server) as client:
        stream = client.completions.create(**LONG, n=64, max_tokens=900, stream=True)
        next(stream)
        child = child_of(server)
        server.process.kill()
        killed_at = time.monotonic()
        while is_running(child):
            assert time.monotonic() - killed_at < PROMPT_S
            time.sleep(0.01)


def test_error_of_the_engine_process_is_reported_in_one_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The error occurs in the other process, when the model is loaded."""
    parser = Parser()
    serve.add_options(parser)
    words = ["--port", "0", "--device", "cpu", "--max-length", "5000"]
    assert serve.run(parser.parse_args(words)) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "roseinfer serve: max_length=5000: GPT2LMHeadModel has 1024 positions"


def test_engine_is_in_process_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchrunRank, "from_env", classmethod(lambda cls: cls(0, 1)))
    parser = Parser()
    serve.add_options(parser)
    with open_engine_client(parser.parse_args(["--device", "cpu"]), "test") as engine:
        assert isinstance(engine, InProcessClient)
        engine.close()


def test_server_modules_do_not_import_torch() -> None:
    code = """
        import sys
        import roseinfer.server.serve, roseinfer.server.app, roseinfer.server.service
        import roseinfer.server.http_server
        print([name for name in ("torch", "transformers") if name in sys.modules])
    """
    assert run_python(code).strip() == "[]"
