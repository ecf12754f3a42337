"""Probes and clients while the engine restarts or stalls."""

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


def probe(server: Server, path: str) -> tuple[int, Any]:
    answer = server.request("GET", path)
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
def test_probes_report_the_reason(
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
        assert probe(server, "/health") == expected("alive", stopped_reason)
        assert probe(server, "/ready") == expected("ready", not_ready_reason)
        samples = metrics_of(server.request("GET", "/metrics").data.decode())
        name = 'roseinfer:engine_restarts_total{engine="0",model_name="tiny"}'
        assert samples[name] == state.get("restarts", 0)


def test_rejection_during_a_restart_has_retry_after() -> None:
    error = to_api_error(EngineRestarting("it is started again", retry_after=7))
    assert (error.status, error.code) == (503, "engine_restarting")
    assert error.response().headers["retry-after"] == "7"
