"""Late transfers: roseinfer's manager and engine wait for copies where they must."""

from __future__ import annotations

import re

import pytest

from pytest_roseinfer import (
    MixDivergence,
    RequestMix,
    RequestSpec,
    Sampling,
    conformance,
    run_mix,
    settings,
)
from pytest_roseinfer.capabilities.simulated_device import Event
from pytest_roseinfer.run import coverage
from tests.late_transfers import LateTransfers
from tests.mutants.hunt import hunt
from tests.mutants.queued_engine import QueuedEngine
from tests.mutants.queued_manager import QueuedManager
from tests.mutants.tally import Tally

MANY_STEPS_AHEAD = RequestMix(
    tuple(
        RequestSpec((1, 2, 3, each), Sampling(max_new_tokens=9), arrival=each) for each in range(3)
    ),
    options={name: values[0] for name, values in QueuedEngine.option_choices.items()},
)
SHORT_SEARCH = settings.Settings(examples=8, steps=12, seed=1, require_paths=False)


class NeverWaits(Event):
    def synchronize(self) -> None: ...


@pytest.mark.slow
@pytest.mark.usefixtures("short_run")
def test_manager_passes_with_copies_in_flight() -> None:
    settings.set_current(SHORT_SEARCH)
    conformance(QueuedManager)().test_histories()
    assert coverage.current().of(QueuedManager).counts["calls_in_flight"] > 10


@pytest.mark.slow
@pytest.mark.usefixtures("short_run")
def test_manager_that_does_not_wait_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateTransfers, "event", lambda _: NeverWaits())
    finding = hunt([QueuedManager], SHORT_SEARCH, Tally())
    assert finding
    assert re.search("expected|raised", finding.message)


@pytest.mark.slow
def test_engine_runs_ahead_with_copies_in_flight() -> None:
    counts = run_mix(QueuedEngine, MANY_STEPS_AHEAD)
    assert counts["engine_run_ahead"]
    assert counts["engine_resident"]


def test_engine_that_does_not_wait_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateTransfers, "event", lambda _: NeverWaits())
    with pytest.raises(MixDivergence):
        run_mix(QueuedEngine, MANY_STEPS_AHEAD)
