"""A server that disappears during a run gets no more requests, and the last mix is saved."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import RequestMix
from pytest_roseinfer.endpoint.served_engine import ServedEngine
from pytest_roseinfer.endpoint.server import _has_stopped
from pytest_roseinfer.engines.run import MixDivergence, run_mix
from pytest_roseinfer.engines.strategies import request_mixes
from pytest_roseinfer.run.watchdog import TargetGoneError, limit_steps
from pytest_roseinfer.search.search import Search
from pytest_roseinfer.settings import Endpoint
from roseinfer.engine.engine import Engine
from tests.endpoint.failing_relay import relaying
from tests.endpoint.planted_servers import report_stop
from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Iterator

GONE_MESSAGE = "the server stopped answering while this mix was served: "
NUM_CONNECTIONS = 3


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Save failures in a folder of the test's own."""
    previous_settings = settings.current()
    monkeypatch.setattr(ServedEngine, "_reference_streams", {})
    monkeypatch.chdir(tmp_path)
    yield tmp_path / ".roseinfer"
    settings.set_current(previous_settings)


def search_server(url: str, folder: Path) -> tuple[MixDivergence, list[RequestMix], RequestMix]:
    """Search a server; return the failure, the mixes that ran, and the saved one."""
    current_settings = settings.current()
    endpoint = Endpoint(url, rate=1000)
    settings.set_current(
        replace(
            current_settings, endpoint=endpoint, step_seconds=5.0, seed=1, failures_dir=str(folder)
        )
    )
    mixes_run: list[RequestMix] = []
    gone_after: list[int] = []
    """Number of mixes that had run when the server disappeared."""

    def check(mix: RequestMix) -> None:
        mixes_run.append(mix)
        assert not gone_after
        try:
            run_mix(ServedEngine, mix)
        except MixDivergence as failure:
            if isinstance(failure.__cause__, TargetGoneError):
                gone_after.append(len(mixes_run))
            raise

    search = Search(ServedEngine, check, request_mixes(ServedEngine), 40, "run_mix")
    with limit_steps(60.0), pytest.raises(MixDivergence) as failure:
        search.run()
    assert gone_after == [len(mixes_run)]
    (line,) = [each for each in str(failure.value).splitlines() if each.startswith("replay with")]
    assert f"--roseinfer-endpoint {url}" in line
    file = shlex.split(line)[shlex.split(line).index("--roseinfer-replay") + 1]
    return (
        failure.value,
        mixes_run,
        RequestMix.from_json(json.loads(Path(file).read_text())["example"]),
    )


def test_mix_served_when_the_server_disappeared_is_saved(folder: Path) -> None:
    def at_several_connections(num_open: int, _: int) -> bool:
        return num_open == NUM_CONNECTIONS

    with running() as server, relaying(server.port, at_several_connections) as relay:
        failure, mixes_run, saved_mix = search_server(relay.url, folder)
    assert failure.summary.startswith(GONE_MESSAGE)
    assert "ConnectionRefusedError" in failure.summary
    assert saved_mix == mixes_run[-1] == failure.mix
    assert "Nothing else was tried" in str(failure)


def test_server_that_disappears_after_the_last_text_fails_that_mix(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as server, relaying(server.port, lambda *_: False) as relay:
        check = ServedEngine._check

        def fail(self: ServedEngine) -> None:
            check(self)
            if self._open and all(each.has_ended for each in self._open):
                relay.fail()

        monkeypatch.setattr(ServedEngine, "_check", fail)
        failure, mixes_run, saved_mix = search_server(relay.url, folder)
    assert failure.summary.startswith(GONE_MESSAGE)
    assert mixes_run == [saved_mix]


def test_stopped_engine_gets_no_more_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """An error that ends the engine's thread."""

    step: Any = Engine.step

    def failing_step(self: Any) -> Any:
        if self.num_running > 1:
            raise Panic
        return step(self)

    monkeypatch.setattr(Engine, "step", failing_step)
    with running() as server:
        failure, mixes_run, saved_mix = search_server(server.url, folder)
    assert failure.summary.startswith(GONE_MESSAGE)
    assert "engine_stopped" in failure.summary
    assert saved_mix == mixes_run[-1]
    assert saved_mix.size > 1


@pytest.mark.parametrize(
    ("status", "code", "stopped"),
    [
        (503, "engine_stopped", True),
        (503, "engine_restarting", True),
        (503, "draining", False),
        (500, "engine_stopped", False),
    ],
)
def test_stopped_engine_is_known_by_its_error_code(
    status: int, code: str, *, stopped: bool
) -> None:
    assert _has_stopped(status, json.dumps({"error": {"code": code}})) is stopped


@pytest.mark.slow
def test_server_that_disappears_during_shrinking_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_stop(monkeypatch)
    failed_at: list[int] = []

    with running() as server:

        def some_time_after_the_failure(_: int, num_accepted: int) -> bool:
            return bool(failed_at) and num_accepted > failed_at[0] + 60

        with relaying(server.port, some_time_after_the_failure) as relay:
            fail = ServedEngine._fail

            def record_failure(self: ServedEngine, *details: Any) -> None:
                failed_at.append(relay.num_accepted)
                fail(self, *details)

            monkeypatch.setattr(ServedEngine, "_fail", record_failure)
            failure, mixes_run, saved_mix = search_server(relay.url, folder)
    assert failure.summary.startswith(GONE_MESSAGE)
    assert saved_mix == mixes_run[-1] != mixes_run[0]
