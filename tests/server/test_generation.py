"""How prompts are read, and tokens become chunks: each for a few, several together for many."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, current_thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.server.generation import Generation
from roseinfer.server.prompts import Prompt, Prompts
from tests.server.served import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.server.served import Server

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("apart", "texts", "token", "seconds"),
    [
        (False, 1, 0.03, 0),
        (False, 3, 0.03, 0),
        (False, 100, 0.03, 0.05),
        (False, 1000, 0.03, 0.1),
        (False, 100, 0.001, 0.016),
        (False, 100, 0.0, 0),
        (True, 15, 0.03, 0),
        (True, 100, 0.03, 0.0125),
        (True, 1000, 0.03, 0.1),
        (True, 100, 0.0005, 0.008),
    ],
)
def test_more_texts_wait_longer_for_a_chunk_but_not_for_many_tokens(
    apart: bool, texts: int, token: float, seconds: float
) -> None:
    nothing: Any = None
    engine: Any = SimpleNamespace(apart=apart)
    generation = Generation(engine, nothing, [], 1, nothing, lambda: texts, began=0.0)
    generation._token_s = token
    assert generation._pause() == pytest.approx(seconds)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_end_of_a_stream_waits_for_nothing(
    path: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last events come together with the last of its text."""
    monkeypatch.setattr(Generation, "_pause", lambda _: 10 * PATIENCE)  # no client waits so long
    asked = {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
    usage = {"stream_options": {"include_usage": True}}
    answer = server.post(path, **asked, max_tokens=1, stream=True, **usage)
    assert answer.events[-1]["usage"]["completion_tokens"] == 1
    assert answer.data.endswith(b"data: [DONE]\n\n")


def test_short_prompts_are_read_at_once_and_long_ones_in_a_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    real = Prompts._read

    def read(prompts: Prompts, texts: Sequence[str | list[int]], field: str) -> list[Prompt]:
        threads.append(current_thread().name.partition("_")[0])
        return real(prompts, texts, field)

    monkeypatch.setattr(Prompts, "_read", read)
    for prompt in ("x" * 600, [[5] * 400, [6] * 600], ["x" * 600] * 2, [5] * 1001):
        server.post("completions", prompt=prompt, max_tokens=1)
    assert [name == "roseinfer-prompts" for name in threads] == [False, False, True, True]


def test_a_tokenizer_reads_one_prompt_at_a_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short prompt waits for a long one that is read in the thread."""
    reading, may_go_on, together = Event(), Event(), []
    real = Prompts._read

    def read(prompts: Prompts, texts: Sequence[str | list[int]], field: str) -> list[Prompt]:
        together.append(reading.is_set() and not may_go_on.is_set())
        if len(texts[0]) > 1000:
            reading.set()
            assert may_go_on.wait(PATIENCE)
        return real(prompts, texts, field)

    monkeypatch.setattr(Prompts, "_read", read)
    with ThreadPoolExecutor(2) as clients:
        long = clients.submit(server.post, "completions", prompt=[5] * 1001, max_tokens=1)
        assert reading.wait(PATIENCE)
        short = clients.submit(server.post, "completions", prompt="x", max_tokens=1)
        end = time.monotonic() + PATIENCE
        while server.service.admission.open < 2 and time.monotonic() < end:
            time.sleep(0.002)
        may_go_on.set()
        assert (short.result().status, long.result().status) == (200, 200)
    assert together == [False, False]
