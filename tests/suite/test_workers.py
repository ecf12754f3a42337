"""``roseinfer verify`` starts two workers by itself, where there are cores for two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from textwrap import dedent
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer.settings import SHIPPED_TARGETS
from pytest_roseinfer.suite import workers
from pytest_roseinfer.suite.workers import Workers, usable_cores, workers_for
from tests.python_process import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.project import Project


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
    assert asked == [(1, 1), (2, 2), (2, 4), (2, 10)]


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


STUBBORN = """
    import os, pathlib, time

    def test_that_nothing_interrupts():
        pathlib.Path(f"{os.getpid()}.begun").touch()
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                pass

    def test_beside_it():
        test_that_nothing_interrupts()
"""
SHARED_OUT = """
import signal, sys, pytest
from pytest_roseinfer.suite.workers import Workers
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in the background
sys.exit(pytest.main(["-p", "no:cacheprovider", "test_stubborn.py"], plugins=[Workers(2)]))
"""


def test_ctrl_c_ends_all_processes_at_once(tmp_path: Path) -> None:
    """A step in native code, as this test pretends to be, is not interrupted by an exception."""
    (tmp_path / "test_stubborn.py").write_text(dedent(STUBBORN))
    run = subprocess.Popen(
        [sys.executable, "-c", SHARED_OUT],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while len(list(tmp_path.glob("*.begun"))) < 2:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGINT)
        pressed = time.monotonic()
        said, _ = run.communicate(timeout=60)
        assert time.monotonic() - pressed < 8  # pytest-xdist waits 10 s before it kills
        assert run.returncode == pytest.ExitCode.INTERRUPTED
        assert "KeyboardInterrupt" in said
        assert "Traceback" not in said
        with pytest.raises(ProcessLookupError):
            os.killpg(run.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


STOPS = """
    import pytest

    @pytest.hookimpl(wrapper=True)
    def pytest_report_header():
        said = yield
        print(said)
        pytest.exit("enough")
"""


def test_with_workers_the_header_names_the_targets(project: Project) -> None:
    """They collect the tests, and whoever started them sees none."""
    project.write(stops=STOPS)
    asked = ["--pyargs", "pytest_roseinfer.suite", "--roseinfer-examples=1", "-pstops"]
    said = project.pytest(*asked, "-n2").stdout.str()
    for name in SHIPPED_TARGETS:
        assert f"roseinfer: target {name}" in said
