"""A server that goes away in the middle of a run is asked no more, and its last mix is kept."""

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
from tests.endpoint.planted_servers import stops_in_a_crowd
from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Iterator

GONE = "the server stopped answering while this mix was served: "
CROWD = 3


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Save what fails there."""
    before = settings.current()
    monkeypatch.setattr(ServedEngine, "_reference_streams", {})
    monkeypatch.chdir(tmp_path)
    yield tmp_path / ".roseinfer"
    settings.set_current(before)


def found_at(url: str, folder: Path) -> tuple[MixDivergence, list[RequestMix], RequestMix]:
    """Search a server; return the failure, the mixes that were tried, and the one that was kept."""
    asked = settings.current()
    endpoint = Endpoint(url, rate=1000)
    settings.set_current(
        replace(asked, endpoint=endpoint, step_seconds=5.0, seed=1, failures_dir=str(folder))
    )
    tried: list[RequestMix] = []
    gone: list[int] = []
    """How many had been tried when it was gone."""

    def check(mix: RequestMix) -> None:
        tried.append(mix)
        assert not gone
        try:
            run_mix(ServedEngine, mix)
        except MixDivergence as failure:
            if isinstance(failure.__cause__, TargetGoneError):
                gone.append(len(tried))
            raise

    search = Search(ServedEngine, check, request_mixes(ServedEngine), 40, "run_mix")
    with limit_steps(60.0), pytest.raises(MixDivergence) as found:
        search.run()
    assert gone == [len(tried)]
    (line,) = [each for each in str(found.value).splitlines() if each.startswith("replay with")]
    assert f"--roseinfer-endpoint {url}" in line
    file = shlex.split(line)[shlex.split(line).index("--roseinfer-replay") + 1]
    return found.value, tried, RequestMix.from_json(json.loads(Path(file).read_text())["example"])


def test_the_mix_that_was_served_when_nobody_listened_any_more_is_kept(folder: Path) -> None:
    def in_a_crowd(now: int, _: int) -> bool:
        return now == CROWD

    with running() as server, relaying(server.port, in_a_crowd) as relay:
        failure, tried, kept = found_at(relay.url, folder)
    assert failure.what.startswith(GONE)
    assert "ConnectionRefusedError" in failure.what
    assert kept == tried[-1] == failure.mix
    assert "Nothing else was tried" in str(failure)


def test_a_server_that_goes_behind_the_last_text_is_missed_by_its_mix(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as server, relaying(server.port, lambda *_: False) as relay:
        check = ServedEngine._check

        def fall(self: ServedEngine) -> None:
            check(self)
            if self._open and all(each.has_ended for each in self._open):
                relay.fall()

        monkeypatch.setattr(ServedEngine, "_check", fall)
        failure, tried, kept = found_at(relay.url, folder)
    assert failure.what.startswith(GONE)
    assert tried == [kept]


def test_an_engine_that_has_stopped_is_asked_no_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """It ends the engine's thread."""

    step: Any = Engine.step

    def breaks(self: Any) -> Any:
        if self.num_running > 1:
            raise Panic
        return step(self)

    monkeypatch.setattr(Engine, "step", breaks)
    with running() as server:
        failure, tried, kept = found_at(server.url, folder)
    assert failure.what.startswith(GONE)
    assert "engine_stopped" in failure.what
    assert kept == tried[-1]
    assert kept.size > 1


@pytest.mark.parametrize(
    ("status", "code", "gone"),
    [
        (503, "engine_stopped", True),
        (503, "engine_restarting", True),
        (503, "draining", False),
        (500, "engine_stopped", False),
    ],
)
def test_an_engine_that_is_started_again_has_stopped(status: int, code: str, *, gone: bool) -> None:
    assert _has_stopped(status, json.dumps({"error": {"code": code}})) is gone


def test_a_server_that_goes_while_a_mix_is_made_smaller_is_said_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops_in_a_crowd(monkeypatch)
    failed_at: list[int] = []

    with running() as server:

        def later(_: int, made: int) -> bool:
            return bool(failed_at) and made > failed_at[0] + 60

        with relaying(server.port, later) as relay:
            fail = ServedEngine._fail

            def noted(self: ServedEngine, *said: Any) -> None:
                failed_at.append(relay.made)
                fail(self, *said)

            monkeypatch.setattr(ServedEngine, "_fail", noted)
            failure, tried, kept = found_at(relay.url, folder)
    assert failure.what.startswith(GONE)
    assert kept == tried[-1] != tried[0]
