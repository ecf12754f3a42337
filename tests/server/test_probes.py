"""What probes and clients are told while an engine is started again, or does nothing."""

from __future__ import annotations

from typing import Any

import pytest

from roseinfer.errors import EngineRestarting
from roseinfer.server.api_errors import to_api_error
from tests.server.load import metrics_of
from tests.server.served import Server, running

RESTARTING = {"restarting": True, "restarts": 3}
STALLED = {"stalled_s": 121.0}
WORKING = {"stalled_s": 119.0}


def told(server: Server, path: str) -> tuple[int, Any]:
    answer = server.ask("GET", path)
    return answer.status, answer.json


@pytest.mark.parametrize(
    ("state", "stopped_reason", "not_ready_reason"),
    [
        (RESTARTING, None, "the engine is restarting"),
        (STALLED, *["the engine is stalled: it has work, but no step for 121 s"] * 2),
        (WORKING, None, None),
    ],
    ids=["restarting", "stalled", "working"],
)
def test_probes_say_why(
    state: dict[str, Any],
    stopped_reason: str | None,
    not_ready_reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def expected(name: str, reason: str | None) -> tuple[int, Any]:
        return (503, {name: False, "reason": reason}) if reason else (200, {name: True})

    with running() as server:
        for name, value in state.items():
            monkeypatch.setattr(server.served, name, value)
        assert told(server, "/health") == expected("alive", stopped_reason)
        assert told(server, "/ready") == expected("ready", not_ready_reason)
        found = metrics_of(server.ask("GET", "/metrics").data.decode())
        name = 'roseinfer:engine_restarts_total{engine="0",model_name="tiny"}'
        assert found[name] == state.get("restarts", 0)


def test_what_is_refused_meanwhile_says_when_to_come_again() -> None:
    refused = to_api_error(EngineRestarting("it is started again", retry_after=7))
    assert (refused.status, refused.code) == (503, "engine_restarting")
    assert refused.response().headers["retry-after"] == "7"
