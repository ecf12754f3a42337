"""The endpoint benchmark: counts of tokens, and errors of a server."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from roseinfer import ConfigError
from roseinfer.bench import endpoint
from roseinfer.bench.__main__ import main
from roseinfer.bench.endpoint import Client, Load, LoadWindow, StreamTimes
from tests.server.served import MODEL, running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def test_tokens_within_counts_a_part_of_the_stream() -> None:
    response = StreamTimes(sent_at=0.0, chunk_times=(1.0, 2.0, 3.0, 4.0), tokens=8)
    assert response.tokens_within(1.5, 3.5) == 4
    assert response.gaps == [1.0, 1.0, 1.0]


class FakeClock:
    """A clock that sleeps at once, and a client whose completions take as long as they are told."""

    def __init__(self, *durations: float) -> None:
        self.now, self.sent = 0.0, list[float]()
        self._durations = iter(durations)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ask(self, prompt: list[int]) -> StreamTimes:  # noqa: ARG002
        self.sent.append(self.now)
        self.now += next(self._durations)
        return StreamTimes(self.sent[-1], (self.now,), tokens=1)


@pytest.mark.parametrize(
    ("rate", "durations", "sent"),
    [
        (None, [0.5, 1.5, 3.0], [0.0, 0.5, 2.0]),
        (2, [0.5, 0.5, 0.5, 0.5], [0.5, 1.5, 2.5, 3.5]),
        (2, [1.75, 0.5, 0.5, 0.5], [0.5, 2.25, 2.75, 3.5]),
    ],
    ids=["one after the other", "at a rate", "late"],
)
def test_requests_of_a_client(
    monkeypatch: pytest.MonkeyPatch,
    rate: int | None,
    durations: list[float],
    sent: list[float],
) -> None:
    """With a rate, two clients take turns, and one that is late sends at once."""
    clock = FakeClock(*durations)
    monkeypatch.setattr(endpoint, "time", clock)
    load = Load(clock, clients=2, prompt_tokens=3, seconds=4.0, rate=rate)  # type: ignore[arg-type]
    answers = load.answers(number=1, window=LoadWindow(0.0, 4.0))
    assert clock.sent == sent
    assert [answer.sent_at for answer in answers] == sent


@pytest.mark.slow
def test_server_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with running() as server:
        arguments = ["--url", server.url, "--model", MODEL, "--in-flight", "3", "--processes", "2"]
        sizes = ["--max-new-tokens", "20", "--seconds", "1", "--warmup-seconds", "1"]
        assert main(["endpoint", *arguments, *sizes, "--json", str(report)]) == 0
        counted = server.metric("vllm:generation_tokens_total")
    tables = json.loads(report.read_text())["tables"]
    (streamed,) = tables["streamed"]
    assert 0 < streamed["texts"] * 20 < counted  # warm-up included
    assert 0 < streamed["tok_per_s"] <= (streamed["texts"] + 0.1) * 20
    assert streamed["chunks_per_s"] * streamed["tokens_per_chunk"] == pytest.approx(
        streamed["tok_per_s"]
    )
    by_metric = {row["metric"]: row for row in tables["latencies"]}
    assert 0 < by_metric["TTFT"]["p50_ms"] < by_metric["latency"]["p50_ms"]


@contextmanager
def serving_events(events: Sequence[str]) -> Iterator[str]:
    """Run a server that answers every request with these events."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {each}\n\n" for each in events).encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_chunks_without_text_count() -> None:
    """Some servers send an event for each token, also for one that ends within a character."""
    chunks = [json.dumps({"choices": [{"text": ""}]})] * 3
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
    with serving_events([*chunks, usage, "[DONE]"]) as url:
        response = Client(url, "any", None, 3).ask([1, 2])
    assert (len(response.chunk_times), response.tokens) == (3, 3)


def test_server_without_token_usage_is_refused() -> None:
    chunk = json.dumps({"choices": [{"text": "a"}]})
    with (
        serving_events([chunk, "[DONE]"]) as url,
        pytest.raises(ConfigError, match="report their number"),
    ):
        Client(url, "any", None, 3).ask([1, 2])


@pytest.mark.slow
def test_error_of_the_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as server:
        arguments = ["endpoint", "--url", server.url, "--model", "other", "--seconds", "1"]
        with pytest.raises(SystemExit) as error:
            main([*arguments, "--in-flight", "1", "--warmup-seconds", "1"])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert "status 404" in message
    assert "this server has tiny" in message
