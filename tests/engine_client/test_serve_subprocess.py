"""The command with its engine in another process answers as one process does, and ends as one."""

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

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
SAID = [{"role": "user", "content": "Say something"}]
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
SOON = 5.0
"""Seconds. It takes a twentieth of that, but for machines with more to do."""
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("completions", {"prompt": "Once upon a time", "max_tokens": 60}),
    "several": ("completions", {"prompt": ["a", "bc"], "n": 3, "temperature": 1, "seed": 4}),
    "told": ("completions", {"prompt": "Once", "logprobs": 3, "echo": True}),
    "stop": ("completions", {"prompt": "Once", "stop": ["e", "a"], "max_tokens": 200}),
    "chat": ("chat/completions", {"messages": SAID, "max_tokens": 20, "logprobs": True}),
    "tool": ("chat/completions", {"messages": SAID, "tools": [TOOL], "tool_choice": "required"}),
    "response": ("responses", {"input": "Once", "max_output_tokens": 20}),
    "too long": ("completions", {"prompt": "x" * 2000}),
    "unknown token": ("completions", {"prompt": [5, 999]}),
    "no guide": (
        "chat/completions",
        {
            "messages": SAID,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nothing"}},
            },
        },
    ),
}


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        data = None if body is None else json.dumps(GREEDY | body).encode()
        said = {"content-type": "application/json"}
        connection.request("GET" if body is None else "POST", path, data, said)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def without_names(answer: Any) -> Any:
    """Return an answer without what no two have in common."""
    if isinstance(answer, list):
        return [without_names(each) for each in answer]
    if isinstance(answer, dict):
        return {
            name: without_names(value)
            for name, value in answer.items()
            if name not in ("id", "created", "created_at", "completed_at", "item_id")
        }
    return round(answer, 3) if isinstance(answer, float) else answer


@pytest.mark.many_alike
@pytest.mark.parametrize("body", BODIES)
def test_it_answers_as_one_process_does(apart: Serving, here: Server, body: str) -> None:
    path, asked = BODIES[body]
    found = ask(apart.port, f"/v1/{path}", asked)
    wanted = ask(here.port, f"/v1/{path}", asked)
    assert found[0] == wanted[0]
    assert without_names(json.loads(found[1])) == without_names(json.loads(wanted[1]))


def child_of(server: Serving) -> int:
    """Return the process of the engine, which is the only child of the command's."""
    pid = server.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def figure(server: Serving, name: str) -> float:
    return metrics_of(ask(server.port, "/metrics")[1].decode())[name]


def test_a_client_that_leaves_is_forgotten_and_metrics_come_to_rest(apart: Serving) -> None:
    running = 'vllm:num_requests_running{engine="0",model_name="tiny"}'
    used = 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'
    with client_of(apart) as client:
        stream = client.completions.create(**LONG, n=3, max_tokens=900, stream=True)
        next(stream)
        assert figure(apart, used) > 0
        stream.close()
    left = time.monotonic()
    while figure(apart, running) or figure(apart, used):
        assert time.monotonic() - left < SOON
    assert figure(apart, 'roseinfer:kv_blocks{engine="0",model_name="tiny",use="cached"}') > 0


def test_the_engine_tells_how_long_its_texts_took(apart: Serving) -> None:
    names = ("request_queue_time", "request_prefill_time", "request_decode_time")
    labels = '{engine="0",model_name="tiny"}'

    def sums() -> list[float]:
        of = (*names, "e2e_request_latency")
        return [figure(apart, f"vllm:{name}_seconds_sum{labels}") for name in of]

    before = sums()
    ask(apart.port, "/v1/completions", {"prompt": "x" * 40, "max_tokens": 200, "ignore_eos": True})
    queue, prefill, decode, whole = (now - then for now, then in zip(sums(), before, strict=True))
    assert min(queue, prefill, decode) > 0
    assert 0.5 * whole < queue + prefill + decode <= whole
    steps = f"vllm:iteration_tokens_total_sum{labels}"
    assert figure(apart, steps) >= 240


def test_signals_to_all_processes_do_not_end_the_engine(apart: Serving) -> None:
    child = child_of(apart)
    for each in (signal.SIGINT, signal.SIGTERM):
        os.kill(child, each)
    time.sleep(0.2)
    assert runs(child)
    assert ask(apart.port, "/v1/completions", {"prompt": "x"})[0] == 200


def test_the_engine_ends_with_the_command_even_within_a_step() -> None:
    with serving() as server, client_of(server) as client:
        stream = client.completions.create(**LONG, n=64, max_tokens=900, stream=True)
        next(stream)
        child = child_of(server)
        server.process.kill()
        killed = time.monotonic()
        while runs(child):
            assert time.monotonic() - killed < SOON
            time.sleep(0.01)


def test_what_the_engine_refuses_is_said_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """It is found out in the other process, when the model is loaded."""
    parser = Parser()
    serve.add_options(parser)
    words = ["--port", "0", "--device", "cpu", "--max-length", "5000"]
    assert serve.run(parser.parse_args(words)) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "roseinfer serve: max_length=5000: GPT2LMHeadModel has 1024 positions"


def test_under_torchrun_it_stays_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchrunRank, "from_env", classmethod(lambda cls: cls(0, 1)))
    parser = Parser()
    serve.add_options(parser)
    with open_engine_client(parser.parse_args(["--device", "cpu"]), "test") as engine:
        assert isinstance(engine, InProcessClient)
        engine.close()


def test_what_serves_http_is_there_before_torch() -> None:
    code = """
        import sys
        import roseinfer.server.serve, roseinfer.server.app, roseinfer.server.service
        import roseinfer.server.http_server
        print([name for name in ("torch", "transformers") if name in sys.modules])
    """
    assert run_python(code).strip() == "[]"
