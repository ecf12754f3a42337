"""Process of a server: startup messages, draining, and exit status."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
import pytest

from roseinfer.cli.model_options import Parser
from roseinfer.config import API_KEY
from roseinfer.server import serve
from roseinfer.server.http_server import open_listener
from tests.server.serve_process import PATIENCE, serving
from tests.server.served import MODEL, running

if TYPE_CHECKING:
    from tests.server.serve_process import Serving

LONG: dict[str, Any] = {"model": MODEL, "prompt": "x", "extra_body": {"ignore_eos": True}}


def client_of(server: Serving, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)


def refuses_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return True
    return False


def status_of(url: str | Request) -> int:
    """Return the status of a request on a new connection."""
    try:
        with urlopen(url, timeout=PATIENCE) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code


def await_status(url: str, status: int) -> None:
    end = time.monotonic() + PATIENCE
    while status_of(url) != status:
        assert time.monotonic() < end, f"expected status {status} of {url}"
        time.sleep(0.01)


@pytest.mark.slow
def test_printed_example_runs_and_sigterm_drains_completions() -> None:
    """The three printed lines of client code run."""
    with serving() as server:
        stderr = "".join(server.stderr_lines)
        assert re.match(r"roseinfer serve: at most \d+ connections \(\d+ open files", stderr)
        assert "roseinfer serve: importing torch and transformers\n" in stderr
        assert "roseinfer serve: loading tiny\n" in stderr
        lines = [line[4:] for line in server.stderr_lines if line.startswith("    ")]
        assert len(lines) == 3
        code = "\n".join(line.rstrip() for line in lines)
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert process.stdout.strip()
        foreign_host = Request(f"{server.url}/health", headers={"Host": "evil.example"})
        assert status_of(foreign_host) == 421

        with client_of(server) as client:
            stream = client.completions.create(**LONG, max_tokens=400, stream=True)
            text = next(stream).choices[0].text
            server.process.send_signal(signal.SIGTERM)
            await_status(f"{server.url}/ready", 503)
            assert status_of(f"{server.url}/health") == 200
            with client_of(server) as late, pytest.raises(openai.InternalServerError) as rejected:
                late.completions.create(model=MODEL, prompt="x")
            chunks = list(stream)
        assert (rejected.value.status_code, rejected.value.code) == (503, "draining")
        assert rejected.value.response.headers["retry-after"] == "1"
        assert rejected.value.response.headers["connection"] == "close"
        assert chunks[-1].choices[0].finish_reason == "length"
        assert text
        assert server.process.wait(PATIENCE) == 0
        assert refuses_connections(server.port)
    assert "shutting down; waiting up to 30 s for 1 completions" in "".join(server.stderr_lines)
    lines_of_log = [json.loads(line) for line in server.stdout_lines]
    assert [line["status"] for line in lines_of_log if line["path"] == "/v1/completions"] == [
        503,
        200,
    ]
    assert lines_of_log[-1]["completion_tokens"] == 400


@pytest.mark.slow
def test_completions_are_aborted_with_an_error_after_drain_seconds() -> None:
    """The API key comes from the environment, and is never printed."""
    options = ("--host", "0.0.0.0", "--drain-seconds", "0.2", "--max-length", "1000")
    with serving(*options, variables={API_KEY: "rose-key"}) as server:
        assert 'api_key="..."' in "".join(server.stderr_lines)
        assert "no API key" not in "".join(server.stderr_lines)
        with client_of(server, "rose-key") as client:
            stream = client.completions.create(**LONG, n=64, max_tokens=900, stream=True)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="the engine was closed"):
                list(stream)
        assert server.process.wait(PATIENCE) == 0
    assert "rose-key" not in "".join([*server.stderr_lines, *server.stdout_lines])


BLOCK_PROMPTS = """\
from threading import Event
from roseinfer.terminal import print_status
from roseinfer.server.prompts import PromptEncoder

encode = PromptEncoder._encode

def held(self, text, *args, **options):
    if text[:4] == "hold":
        print_status("held")
        Event().wait()
    return encode(self, text, *args, **options)

PromptEncoder._encode = held
"""


@pytest.mark.slow
def test_prompts_being_read_are_aborted_after_drain_seconds() -> None:
    """Their threads delay neither draining nor the exit of the process."""
    with serving("--drain-seconds", "0.2", before=BLOCK_PROMPTS) as server:
        with client_of(server) as client, ThreadPoolExecutor(2) as pool:
            complete = partial(client.completions.create, model=MODEL)
            futures = [pool.submit(complete, prompt="hold" + "x" * many) for many in (2000, 40_000)]
            end = time.monotonic() + PATIENCE
            while server.stderr_lines.count("held\n") < 2:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert client.completions.create(model=MODEL, prompt="x").choices
            server.process.send_signal(signal.SIGTERM)
            for each in futures:
                with pytest.raises(openai.InternalServerError, match="the engine was closed"):
                    each.result()
        assert server.process.wait(PATIENCE) == 0
    assert [json.loads(line)["status"] for line in server.stdout_lines] == [200, 503, 503]


@pytest.mark.slow
def test_second_signal_ends_the_process_at_once() -> None:
    with serving("--host", "0.0.0.0") as server, client_of(server) as client:
        assert "no API key: every client that reaches this machine is served" in "".join(
            server.stderr_lines
        )
        stream = client.completions.create(**LONG, n=64, max_tokens=900, stream=True)
        next(stream)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 128 + signal.SIGINT
        assert time.monotonic() - began < 2


def test_draining_server_is_not_ready_and_rejects_requests() -> None:
    with running() as server:
        assert server.request("GET", "/ready").json == {"ready": True}
        server.service.admission.draining = True
        assert server.request("GET", "/ready").status == 503
        assert server.request("GET", "/health").status == 200
        rejected = server.post("completions", prompt="x")
        assert (rejected.status, rejected.error["code"]) == (503, "draining")
        assert rejected.headers["retry-after"] == "1"
        assert rejected.headers["connection"] == "close"


def test_probe_connection_does_not_delay_shutdown() -> None:
    """A probe may keep its connection."""
    with running() as server:
        connection = server.connection()
        connection.request("GET", "/ready")
        connection.getresponse().read()
        server.http.end()
        began = time.monotonic()
        while not refuses_connections(server.port):
            assert time.monotonic() - began < 3
            time.sleep(0.01)
        connection.close()


def test_idle_server_ends_at_once_and_closes_its_engine() -> None:
    with running() as server:
        server.post("completions", prompt="x")
        assert any(each.name == "roseinfer" for each in threading.enumerate())
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert server.service.engine_client.closed
    assert server.served._async_llm.closed


def rejected(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error line of a command that does not start a server."""
    parser = Parser()
    serve.add_options(parser)
    assert serve.run(parser.parse_args(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("roseinfer serve: ")
    return line


def test_port_in_use_is_reported_before_loading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert f"--port {port}: cannot listen" in rejected(capsys, "--port", port)


def test_port_of_a_loading_server_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open_listener("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
        stderr = rejected(capsys, "--port", port)
        assert f"--port {port}: cannot listen: Address already in use" in stderr


@pytest.mark.parametrize(
    ("words", "stderr"),
    [
        (["--model", "/nowhere"], "there is no such directory"),
        (["--chat-template", "/nowhere"], "--chat-template /nowhere: cannot read the file"),
        (["--max-queue", "0"], "max_queue must be"),
        (["--api-key", ""], "the API key is empty"),
        (["--host", "nowhere.invalid"], "--host nowhere.invalid"),
        (["--block-size", "0"], "block_size must be"),
    ],
)
def test_invalid_option_is_reported_in_one_line(
    words: list[str], stderr: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stderr in rejected(capsys, *words)
