"""``roseinfer verify`` starts two workers by itself, where there are two cores or more."""

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


def num_workers_of(
    number: int,
    *,
    plugins: tuple[str, ...] = ("xdist",),
    option: int | None = None,
    **worker: object,
) -> Any:
    """Return the worker count passed to pytest-xdist where the command line has ``option``."""
    config = SimpleNamespace(
        **worker,
        pluginmanager=SimpleNamespace(hasplugin=lambda name: name in plugins),
        option=SimpleNamespace(numprocesses=option, dist="no"),
    )
    hook = Workers(number).pytest_cmdline_main(config)  # type: ignore[arg-type]
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(None)
    return config.option.numprocesses


def test_two_workers_start_unless_the_command_line_sets_another_number() -> None:
    assert num_workers_of(2) == 2
    assert num_workers_of(1) is None
    assert num_workers_of(2, option=0) == 0
    assert num_workers_of(2, option=4) == 4
    assert num_workers_of(2, plugins=()) is None


def test_gpu_has_more_workers_up_to_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for cores in (1, 2, 4, 16):
        monkeypatch.setattr(workers, "usable_cores", lambda cores=cores: cores)
        counts.append((workers_for(gpu=False), workers_for(gpu=True)))
    assert counts == [(1, 1), (2, 2), (2, 4), (2, 10)]


def test_worker_starts_no_workers() -> None:
    assert num_workers_of(2, workerinput={}) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_cores_outside_the_affinity_are_not_counted() -> None:
    usable = os.sched_getaffinity(0)
    assert usable_cores() == len(usable)
    os.sched_setaffinity(0, {min(usable)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, usable)


def test_slowest_target_comes_first() -> None:
    assert SHIPPED_TARGETS[0].endswith(":RoseinferEngine")


STUBBORN = """
    import os, pathlib, time

    def test_uninterruptible():
        pathlib.Path(f"{os.getpid()}.begun").touch()
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                pathlib.Path(f"{os.getpid()}.survived").touch()

    def test_uninterruptible_too():
        test_uninterruptible()
"""
SHARED_OUT = """
import signal, sys, pytest
from pytest_roseinfer.suite.workers import Workers
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background processes
sys.exit(pytest.main(["-p", "no:cacheprovider", "test_stubborn.py"], plugins=[Workers(2)]))
"""


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_at_once(tmp_path: Path) -> None:
    """The test stands in for a step in native code, which no exception interrupts."""
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
        output, _ = run.communicate(timeout=300)
        assert run.returncode == pytest.ExitCode.INTERRUPTED
        assert not list(tmp_path.glob("*.survived"))  # else pytest-xdist would wait, then kill
        assert "KeyboardInterrupt" in output
        assert "Traceback" not in output
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


def test_header_names_the_targets_with_workers(project: Project) -> None:
    """The workers collect the tests, and the controller collects none."""
    project.write(stops=STOPS)
    arguments = ["--pyargs", "pytest_roseinfer.suite", "--roseinfer-examples=1", "-pstops"]
    output = project.pytest(*arguments, "-n2").stdout.str()
    for name in SHIPPED_TARGETS:
        assert f"roseinfer: target {name}" in output
