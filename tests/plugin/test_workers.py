"""``roseinfer verify`` starts two workers by itself, where there are cores for two."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_roseinfer.settings import SHIPPED_TARGETS
from pytest_roseinfer.suite import workers
from pytest_roseinfer.suite.workers import Workers, usable_cores, workers_for


def told(
    number: int,
    *,
    plugins: tuple[str, ...] = ("xdist",),
    said: int | None = None,
    **worker: object,
) -> Any:
    """Return how many pytest-xdist is told to start where the command line says ``said``."""
    config = SimpleNamespace(
        **worker,
        pluginmanager=SimpleNamespace(hasplugin=lambda name: name in plugins),
        option=SimpleNamespace(numprocesses=said, dist="no"),
    )
    hook = Workers(number).pytest_cmdline_main(config)  # type: ignore[arg-type]
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(None)
    return config.option.numprocesses


def test_two_are_asked_for_unless_one_is_enough_or_somebody_said_otherwise() -> None:
    assert told(2) == 2
    assert told(1) is None
    assert told(2, said=0) == 0
    assert told(2, said=4) == 4
    assert told(2, plugins=()) is None


def test_a_gpu_has_more_of_them_as_far_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for cores in (1, 2, 4, 16):
        monkeypatch.setattr(workers, "usable_cores", lambda cores=cores: cores)
        asked.append((workers_for(gpu=False), workers_for(gpu=True)))
    assert asked == [(1, 1), (2, 2), (2, 4), (2, 8)]


def test_a_worker_asks_for_none() -> None:
    assert told(2, workerinput={}) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_cores_that_this_process_may_not_use_do_not_count() -> None:
    allowed = os.sched_getaffinity(0)
    assert usable_cores() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_what_takes_longest_comes_first() -> None:
    assert SHIPPED_TARGETS[0].endswith(":RoseinferEngine")
