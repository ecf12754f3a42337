"""Coalescing of tokens into chunks: none for few requests, several tokens for many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from roseinfer.server.generation import Generation
from tests.server.served import PATIENCE

if TYPE_CHECKING:
    from tests.server.served import Server

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("separate_process", "num_requests", "token", "seconds"),
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
def test_coalescing_delay_grows_with_requests_up_to_a_token_limit(
    separate_process: bool, num_requests: int, token: float, seconds: float
) -> None:
    nothing: Any = None
    engine: Any = SimpleNamespace(separate_process=separate_process)
    generation = Generation(engine, nothing, [], 1, nothing, lambda: num_requests, received_at=0.0)
    generation._seconds_per_token = token
    assert generation._coalescing_delay_s() == pytest.approx(seconds)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_end_of_a_stream_is_not_delayed(
    path: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last events are sent together with its last text."""
    monkeypatch.setattr(
        Generation, "_coalescing_delay_s", lambda _: 10 * PATIENCE
    )  # no client waits that long
    prompt = {"prompt": "x"} if path == "completions" else {"messages": MESSAGES}
    usage = {"stream_options": {"include_usage": True}}
    answer = server.post(path, **prompt, max_tokens=1, stream=True, **usage)
    assert answer.events[-1]["usage"]["completion_tokens"] == 1
    assert answer.data.endswith(b"data: [DONE]\n\n")
