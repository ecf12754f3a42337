"""The watchdog: a hanging step is reported as a failure, or ends the process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from time import process_time, sleep
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    MixDivergence,
    conformance,
    run_forks,
    run_mix,
    settings,
)
from pytest_roseinfer.capabilities.cache_data import BadCall
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import run_history
from pytest_roseinfer.run.watchdog import (
    CURRENT_EXAMPLE,
    TIMEOUT_EXIT_STATUS,
    StepHung,
    limit_steps,
)
from pytest_roseinfer.search.trace import ImportPolicy, replay
from tests.capabilities.caches.hanging_caches import HangsOnTheThirdBlock
from tests.capabilities.caches.paged_cache import PagedCache
from tests.engine_capabilities.engines.small_mixes import mix, request_spec
from tests.engine_capabilities.engines.toy_engine import ToyAdapter, ToyForks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from pytest_roseinfer import RequestMix, Sampling
    from tests.project import Project

SECONDS = 0.2
HISTORY = History(CacheSpec(), (Append((0,)), Append((1, 2)), Append((3,))))
HUNG = "did not return within 0.2 s"


def spin() -> None:
    while True:
        pass


def sleep_forever() -> None:
    while True:
        sleep(0.001)


@pytest.fixture
def watchdog() -> Iterator[None]:
    """Begin an example under a watchdog, as in a search."""
    with limit_steps(SECONDS):
        CURRENT_EXAMPLE.step_began_at = process_time()
        yield
        CURRENT_EXAMPLE.step_began_at = None


class HangsInMake(PagedCache):
    def make(self, spec: CacheSpec) -> None:  # noqa: ARG002
        spin()


class HangsWhenRead(PagedCache):
    def peek(self, seq: int, layer: int) -> tuple[object, object]:  # type: ignore[override]
        if seq == 3:
            spin()
        return super().peek(seq, layer)


class Sleeps(PagedCache):
    def append(self, *_: object) -> None:
        sleep_forever()


class HangsInABadCall(PagedCache):
    def bad_calls(self) -> Iterable[BadCall]:
        yield BadCall("free of an unknown sequence", spin, (KeyError,))


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize(
    ("cache", "message", "steps"),
    [
        (HangsOnTheThirdBlock, f"the step {HUNG}", 2),
        (HangsInMake, rf"make\(\) {HUNG}", 0),
        (HangsWhenRead, f"the step {HUNG}", 3),
        (Sleeps, "the step did not return within 2 s, and slept", 1),
        (HangsInABadCall, f"free of an unknown sequence {HUNG}", 3),
    ],
)
def test_history_ends_with_the_hanging_step(
    cache: type[PagedCache], message: str, steps: int
) -> None:
    with pytest.raises(Divergence, match=message) as caught:
        run_history(cache, HISTORY)
    assert caught.value.history.operations == HISTORY.operations[:steps]
    assert isinstance(caught.value.__cause__, StepHung)
    assert "expected contents" in str(caught.value)


class EngineHangs(ToyAdapter):
    def step(self) -> None:
        spin()


class TwinHangs(ToyForks):
    def generate_alone(self, *_: object) -> list[int]:
        spin()
        return []


class ForksHang(ToyForks):
    def fork(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:  # noqa: ARG002
        spin()
        return []


@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize("engine", [EngineHangs, TwinHangs, ForksHang])
def test_hanging_engine_fails_with_its_mix(engine: type[ToyAdapter]) -> None:
    requests: RequestMix = mix(request_spec(1))
    with pytest.raises(MixDivergence, match=f"a step {HUNG}") as caught:
        (run_forks if engine is ForksHang else run_mix)(engine, requests)
    assert caught.value.mix.requests == requests.requests


def test_time_limit_is_per_step() -> None:
    class Slow(PagedCache):
        def ledger(self, layer: int) -> object:  # type: ignore[override]
            begin = process_time()
            while process_time() - begin < SECONDS / 3:
                pass
            return super().ledger(layer)

    begin = process_time()
    with limit_steps(SECONDS):
        CURRENT_EXAMPLE.step_began_at = process_time()
        run_history(Slow, History(CacheSpec(), (Append((0,)),) * 5))
        CURRENT_EXAMPLE.step_began_at = None
    assert process_time() - begin > SECONDS


STOPPED_PROCESS = """
from time import process_time
from pytest_roseinfer.run.watchdog import CURRENT_EXAMPLE, limit_steps

with limit_steps(0.1):
    CURRENT_EXAMPLE.step_began_at = process_time()
    print("in a step", flush=True)
    input()
print("came back", flush=True)
"""


@pytest.mark.slow
def test_stopped_process_is_not_reported_as_hanging() -> None:
    """It is stopped for four times as long as a step may sleep, and then continued."""
    command = [sys.executable, "-c", STOPPED_PROCESS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "in a step\n"
        sleep(0.3)  # the watchdog saw the step begin
        os.kill(process.pid, signal.SIGSTOP)
        sleep(4)
        os.kill(process.pid, signal.SIGCONT)
        sleep(0.3)  # the watchdog looks again before the step ends
        out, err = process.communicate("\n", timeout=60)
    assert (out, process.returncode) == ("came back\n", 0), err


def test_alarms_of_other_code_reach_their_handler() -> None:
    """The latest step may have begun long ago, without a watchdog."""
    signals: list[int] = []
    CURRENT_EXAMPLE.step_began_at = process_time() - 60
    previous_handler = signal.signal(signal.SIGALRM, lambda number, _: signals.append(number))
    try:
        with limit_steps(SECONDS):
            signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, previous_handler)
    assert signals == [signal.SIGALRM] * 2


def test_watchdog_is_off_in_other_threads() -> None:
    seconds: list[float] = []

    def record_seconds() -> None:
        with limit_steps(SECONDS):
            seconds.append(CURRENT_EXAMPLE.seconds)

    thread = threading.Thread(target=record_seconds)
    thread.start()
    thread.join()
    assert seconds == [0.0]


@pytest.fixture
def restored_settings() -> Iterator[None]:
    previous_settings, previous_coverage = settings.current(), coverage.current()
    coverage.set_current(coverage.Coverage())
    yield
    settings.set_current(previous_settings)
    coverage.set_current(previous_coverage)


@pytest.mark.sampled_cases
@pytest.mark.usefixtures("restored_settings")
@pytest.mark.parametrize("seed", range(3))
def test_search_ends_with_the_hanging_history(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.set_current(settings.Settings(seed=seed, failures_dir=str(tmp_path)))
    begin = process_time()
    with limit_steps(SECONDS), pytest.raises(Divergence, match=f"the step {HUNG}") as caught:
        conformance(HangsOnTheThirdBlock)().test_histories()
    assert process_time() - begin < 20 * SECONDS  # no shrinking
    assert "It was not shrunk" in str(caught.value)
    (trace,) = tmp_path.glob("*.json")  # the trace of the interrupted step is deleted
    with limit_steps(SECONDS):
        assert replay(str(trace), ImportPolicy((), tmp_path, trusted=True)) == 1
    assert f"FAILED: the step {HUNG}" in capsys.readouterr().out


TEST_OF_A_CACHE = """
    from caches.hanging_caches import {name}
    from pytest_roseinfer import conformance

    TestIt = conformance({name})
"""


def run(project: Project, name: str) -> pytest.RunResult:
    project.copy_caches()
    project.write(test_it=TEST_OF_A_CACHE.format(name=name))
    limit = f"--roseinfer-step-seconds={SECONDS}"
    return project.pytest("-k", "histories", "--roseinfer-seed=1", limit)


@pytest.mark.slow
def test_uninterruptible_process_ends_with_its_history(
    project: Project,
) -> None:
    result = run(project, "CatchesEverything")
    assert result.ret == TIMEOUT_EXIT_STATUS
    result.stderr.fnmatch_lines(
        [
            f"a step {HUNG}, nor could it be interrupted: *",
            "a cache with num_layers=*",
            "  1. append one token to *",
            f"replay with: pytest --roseinfer-replay {project.failure_name('.json')} "
            "*:CatchesEverything",
            "*hanging_caches.py*in spin",
        ]
    )


@pytest.mark.slow
def test_native_code_that_holds_the_lock_leaves_a_trace(project: Project) -> None:
    result = run(project, "HoldsTheInterpreterLock")
    assert result.ret == -signal.SIGPROF
    result.stderr.fnmatch_lines(["*most recent call first*", "*hanging_caches.py*in spin"])
    trace = json.loads(project.failure_file(".json").read_text())
    assert trace["check"] == "run_history"
    assert History.from_json(trace["example"]).size
