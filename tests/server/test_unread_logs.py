"""Servers whose output is not read or cannot be written: they serve and exit."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError

import openai
import pytest

from tests.python_process import ROOT
from tests.server.serve_process import CODE, PATIENCE
from tests.server.test_shutdown import LONG, await_status, status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = 1200
"""Requests; far fewer lines fill a queue and a pipe."""
TIMEOUT_S = 20.0
"""Seconds; a failure would block forever."""


def full_pipe(stack: ExitStack) -> int:
    """Return the write end of a pipe that is full and is not read."""
    reading, writing = os.pipe()
    stack.callback(os.close, reading)
    stack.callback(os.close, writing)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    return writing


def redirections(kind: str, stack: ExitStack) -> dict[str, Any]:
    if kind == "unread":
        return {"stdout": full_pipe(stack), "stderr": full_pipe(stack)}
    if kind == "full":
        full = os.open("/dev/full", os.O_WRONLY)
        stack.callback(os.close, full)
        return {"stdout": full, "stderr": full}
    return {}  # closed by the shell


@contextmanager
def quiet_server(kind: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server that cannot print its URL, and wait until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", CODE, "--port", str(port), "--device", "cpu"]
    closed = ">&- 2>&-" if kind == "closed" else ""
    with ExitStack() as stack:
        process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *words],
            cwd=ROOT,
            **redirections(kind, stack),
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + PATIENCE
        while not is_ready(url):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
        yield process, url


def is_ready(url: str) -> bool:
    try:
        return status_of(f"{url}/ready") == 200
    except URLError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unread", "full", "closed"])
def test_server_with_unread_output_serves_drains_and_reports_engine_exit(kind: str) -> None:
    with (
        quiet_server(kind) as (process, url),
        openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as client,
    ):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (engine,) = map(int, children)
        if kind == "closed":
            for pid in (process.pid, engine):
                targets = [os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)]
                assert targets == [os.devnull] * 2
        connection = HTTPConnection(url.partition("//")[2], timeout=TIMEOUT_S)
        for _ in range(REQUESTS):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
        connection.close()
        long = client.completions.create(**LONG, n=8, max_tokens=900, stream=True)
        next(long)
        short = client.completions.create(**LONG, max_tokens=50, stream=True)
        next(short)
        process.send_signal(signal.SIGTERM)
        await_status(f"{url}/ready", 503)
        assert [*short][-1].choices[0].finish_reason == "length"
        os.kill(engine, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the engine's process ended by SIGKILL"):
            list(long)
        assert process.wait(TIMEOUT_S) == 0
