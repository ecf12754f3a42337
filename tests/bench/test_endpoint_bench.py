"""The benchmark of servers counts the tokens of texts, and passes on what a server says."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from roseinfer import ConfigError
from roseinfer.bench.__main__ import main
from roseinfer.bench.endpoint import Client, StreamTimes
from tests.server.served import MODEL, running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def test_tokens_are_those_of_the_time_that_was_measured() -> None:
    answer = StreamTimes(sent_at=0.0, chunk_times=(1.0, 2.0, 3.0, 4.0), tokens=8)
    assert answer.tokens_within(1.5, 3.5) == 4
    assert answer.gaps == [1.0, 1.0, 1.0]


def test_a_server_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with running() as server:
        words = ["--url", server.url, "--model", MODEL, "--in-flight", "3", "--processes", "2"]
        sizes = ["--max-new-tokens", "20", "--seconds", "1", "--warmup-seconds", "1"]
        assert main(["endpoint", *words, *sizes, "--json", str(report)]) == 0
        counted = server.metric("vllm:generation_tokens_total")
    tables = json.loads(report.read_text())["tables"]
    (streamed,) = tables["streamed"]
    assert 0 < streamed["texts"] * 20 < counted  # texts of the time before the measured one, too
    assert 0 < streamed["tok_per_s"] <= (streamed["texts"] + 0.1) * 20
    assert streamed["chunks_per_s"] * streamed["tokens_per_chunk"] == pytest.approx(
        streamed["tok_per_s"]
    )
    by_what = {row["metric"]: row for row in tables["latencies"]}
    assert 0 < by_what["TTFT"]["p50_ms"] < by_what["latency"]["p50_ms"]


@contextmanager
def saying(events: Sequence[str]) -> Iterator[str]:
    """Serve a server that answers everything with these events."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {each}\n\n" for each in events).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_tokens_without_a_text_are_parts() -> None:
    """Some servers send an event for each token, and half of a character is no text."""
    chunk_times = [json.dumps({"choices": [{"text": ""}]})] * 3
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
    with saying([*chunk_times, usage, "[DONE]"]) as url:
        answer = Client(url, "any", None, 3).ask([1, 2])
    assert (len(answer.chunk_times), answer.tokens) == (3, 3)


def test_a_server_that_counts_no_tokens_is_refused() -> None:
    part = json.dumps({"choices": [{"text": "a"}]})
    with saying([part, "[DONE]"]) as url, pytest.raises(ConfigError, match="report their number"):
        Client(url, "any", None, 3).ask([1, 2])


def test_a_refusal_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as server:
        words = ["endpoint", "--url", server.url, "--model", "other", "--seconds", "1"]
        with pytest.raises(SystemExit) as ended:
            main([*words, "--in-flight", "1", "--warmup-seconds", "1"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "status 404" in said
    assert "this server has tiny" in said
