"""The process of a server: what it says, how it drains, and how it ends."""

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
    """Ask by a connection of its own."""
    try:
        with urlopen(url, timeout=PATIENCE) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code


def await_status(url: str, status: int) -> None:
    end = time.monotonic() + PATIENCE
    while status_of(url) != status:
        assert time.monotonic() < end, f"{url} never says {status}"
        time.sleep(0.01)


def test_what_it_says_works_and_sigterm_lets_texts_end() -> None:
    """The three lines of a client's code run as they are printed."""
    with serving() as server:
        said = "".join(server.said)
        assert re.match(r"roseinfer serve: at most \d+ connections \(\d+ open files", said)
        assert "roseinfer serve: importing torch and transformers\n" in said
        assert "roseinfer serve: loading tiny\n" in said
        lines = [line[4:] for line in server.said if line.startswith("    ")]
        assert len(lines) == 3
        code = "\n".join(line.rstrip() for line in lines)
        tried = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert tried.stdout.strip()
        stranger = Request(f"{server.url}/health", headers={"Host": "evil.example"})
        assert status_of(stranger) == 421

        with client_of(server) as client:
            stream = client.completions.create(**LONG, max_tokens=400, stream=True)
            text = next(stream).choices[0].text
            server.process.send_signal(signal.SIGTERM)
            await_status(f"{server.url}/ready", 503)
            assert status_of(f"{server.url}/health") == 200
            with client_of(server) as late, pytest.raises(openai.InternalServerError) as refused:
                late.completions.create(model=MODEL, prompt="x")
            chunks = list(stream)
        assert (refused.value.status_code, refused.value.code) == (503, "draining")
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.response.headers["connection"] == "close"
        assert chunks[-1].choices[0].finish_reason == "length"
        assert text
        assert server.process.wait(PATIENCE) == 0
        assert refuses_connections(server.port)
    assert "shutting down; waiting up to 30 s for 1 completions" in "".join(server.said)
    logged = [json.loads(line) for line in server.logged]
    assert [line["status"] for line in logged if line["path"] == "/v1/completions"] == [503, 200]
    assert logged[-1]["completion_tokens"] == 400


def test_texts_that_take_too_long_are_cut_with_an_error() -> None:
    """The key comes from the environment here, and is never said."""
    options = ("--host", "0.0.0.0", "--drain-seconds", "0.2", "--max-length", "1000")
    with serving(*options, variables={API_KEY: "rose-key"}) as server:
        assert 'api_key="..."' in "".join(server.said)
        assert "no API key" not in "".join(server.said)
        with client_of(server, "rose-key") as client:
            stream = client.completions.create(**LONG, n=64, max_tokens=900, stream=True)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="the engine was closed"):
                list(stream)
        assert server.process.wait(PATIENCE) == 0
    assert "rose-key" not in "".join([*server.said, *server.logged])


NEVER_READ = """\
from threading import Event
from roseinfer.progress import print_status
from roseinfer.server.prompts import PromptEncoder

encode = PromptEncoder._encode

def held(self, text, *given, **options):
    if text[:4] == "hold":
        print_status("held")
        Event().wait()
    return encode(self, text, *given, **options)

PromptEncoder._encode = held
"""


def test_prompts_that_take_too_long_are_cut_too() -> None:
    """Their threads hold up neither the draining nor the end of the process."""
    with serving("--drain-seconds", "0.2", before=NEVER_READ) as server:
        with client_of(server) as client, ThreadPoolExecutor(2) as pool:
            ask = partial(client.completions.create, model=MODEL)
            asked = [pool.submit(ask, prompt="hold" + "x" * many) for many in (2000, 40_000)]
            end = time.monotonic() + PATIENCE
            while server.said.count("held\n") < 2:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert client.completions.create(model=MODEL, prompt="x").choices
            server.process.send_signal(signal.SIGTERM)
            for each in asked:
                with pytest.raises(openai.InternalServerError, match="the engine was closed"):
                    each.result()
        assert server.process.wait(PATIENCE) == 0
    assert [json.loads(line)["status"] for line in server.logged] == [200, 503, 503]


def test_a_second_signal_ends_it_at_once() -> None:
    with serving("--host", "0.0.0.0") as server, client_of(server) as client:
        assert "no API key: every client that reaches this machine is served" in "".join(
            server.said
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


def test_while_it_drains_it_is_not_ready_and_takes_nothing() -> None:
    with running() as server:
        assert server.ask("GET", "/ready").json == {"ready": True}
        server.service.admission.draining = True
        assert server.ask("GET", "/ready").status == 503
        assert server.ask("GET", "/health").status == 200
        refused = server.post("completions", prompt="x")
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"


def test_a_probe_holds_up_no_end() -> None:
    """It may keep its connection."""
    with running() as server:
        kept = server.connection()
        kept.request("GET", "/ready")
        kept.getresponse().read()
        server.http.end()
        began = time.monotonic()
        while not refuses_connections(server.port):
            assert time.monotonic() - began < 3
            time.sleep(0.01)
        kept.close()


def test_an_idle_server_ends_at_once_and_closes_its_engine() -> None:
    with running() as server:
        server.post("completions", prompt="x")
        assert any(each.name == "roseinfer" for each in threading.enumerate())
        began = time.monotonic()
    assert time.monotonic() - began < 3
    assert server.service.engine_client.closed
    assert server.served._async_llm.closed


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the line that the command says where it serves nothing."""
    parser = Parser()
    serve.add_options(parser)
    assert serve.run(parser.parse_args(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("roseinfer serve: ")
    return line


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port}: cannot listen" in refused(capsys, "--port", port)


def test_so_is_one_that_another_server_has_which_still_loads_its_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        said = refused(capsys, "--port", port)
        assert f"--port {port}: cannot listen: Address already in use" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "/nowhere"], "there is no such directory"),
        (["--chat-template", "/nowhere"], "--chat-template /nowhere: cannot read the file"),
        (["--max-queue", "0"], "max_queue must be"),
        (["--api-key", ""], "the API key is empty"),
        (["--host", "nowhere.invalid"], "--host nowhere.invalid"),
        (["--block-size", "0"], "block_size must be"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *words)
