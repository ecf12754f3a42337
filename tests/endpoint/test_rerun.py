"""A failure of a server is run again by the line that was printed for it, and by no less."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis.strategies import just

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec, Sampling
from pytest_roseinfer.endpoint.served_engine import ServedEngine
from pytest_roseinfer.engines.run import MixDivergence, run_mix
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run.watchdog import TargetGoneError
from pytest_roseinfer.search.checks import repeat
from pytest_roseinfer.search.reproduce import SavedFiles, save
from pytest_roseinfer.search.search import Search
from pytest_roseinfer.settings import RATE, Endpoint
from tests.endpoint.planted_servers import now_and_then, stops_in_a_crowd
from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WANTED = Sampling(max_new_tokens=8)
MIX = RequestMix((RequestSpec((3, 4), WANTED), RequestSpec((3,), WANTED)))
FOUND = "request 0, when all arrived at once, ended by 'stop'; alone by 'length'"
NOTHING: Any = {"message": "it was so", "what": "another text"}


@contextmanager
def asking(endpoint: Endpoint) -> Iterator[None]:
    before = settings.current()
    settings.set_current(replace(before, endpoint=endpoint))
    try:
        yield
    finally:
        settings.set_current(before)


def saved(found: Any, folder: Path) -> tuple[SavedFiles, list[str]]:
    """Save a failure of the mix; return it with the words of the line that runs it again."""
    files = save(ServedEngine, MIX, "run_mix", found, f"{folder}/.roseinfer", "")
    line = files.description.partition("\n")[0]
    command, *words = shlex.split(line.removeprefix("replay with: "))
    assert command == "pytest"
    return files, words


@pytest.mark.many_alike
@pytest.mark.parametrize("model", ["", "tiny"])
def test_the_printed_line_fails_until_the_bug_is_gone(
    model: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSEINFER_API_KEY", "secret")
    with running() as server, monkeypatch.context() as planted:
        stops_in_a_crowd(planted)
        with asking(Endpoint(server.url, model, "secret", rate=1000)):
            with pytest.raises(MixDivergence) as found:
                run_mix(ServedEngine, MIX)
            assert found.value.what == FOUND
            what: Any = {"message": str(found.value), "what": FOUND}
            files, words = saved(what, pytester.path)
        assert ("--roseinfer-model" in words) == bool(model)
        failed = pytester.runpytest_subprocess(*words)
        planted.undo()
        passed = pytester.runpytest_subprocess(*words)
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    failed.stdout.fnmatch_lines([f"FAILED: {FOUND}", "it differed in 20 of 20"])
    for run in (failed, passed):  # a reader can type what was asked
        run.stdout.fnmatch_lines(
            [
                f"*the greedy completions of {server.url}, model tiny, for the prompts",
                "  0. at step 0: 'dog elk', max_tokens 8",
                "  1. at step 0: 'dog', max_tokens 8",
            ]
        )
        assert "a cache of" not in run.stdout.str()
    assert "another failure" not in failed.stdout.str()
    assert passed.ret == pytest.ExitCode.OK
    passed.stdout.fnmatch_lines(
        ["it passed 20 times: nothing differed", f"*recorded with: {FOUND}"]
    )
    for file in (files.trace, files.script):
        assert "secret" not in (pytester.path / file).read_text()
    for run in (failed, passed):
        assert "secret" not in run.stdout.str() + run.stderr.str()


def test_what_happens_now_and_then_is_met_by_a_replay_and_counted(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as server:
        now_and_then(monkeypatch, 20)  # six are asked for each time
        with asking(Endpoint(server.url, rate=1000)):
            files, words = saved(NOTHING, pytester.path)
        replayed = pytester.runpytest_subprocess(*words)
        script = subprocess.run(
            [sys.executable, pytester.path / files.script], capture_output=True, text=True
        )
    assert replayed.ret == pytest.ExitCode.TESTS_FAILED
    assert script.returncode == 1
    for said in (replayed.stdout.str(), script.stderr):
        differed = re.search(r"^it differed in (\d+) of 20$", said, re.MULTILINE)
        assert differed
        assert 1 <= int(differed[1]) < 15


def test_what_a_search_finds_is_served_again_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running() as server, asking(Endpoint(server.url, rate=1000)):
        now_and_then(monkeypatch, 5)  # of six: two alone, and those among others twice
        with pytest.raises(MixDivergence) as found:
            Search(ServedEngine, partial(run_mix, ServedEngine), just(MIX), 1, "run_mix").run()
    assert re.search(r"\n\nServed again, it differed in \d+ of \d+\.\n", f"{found.value}\n")


def test_a_smaller_mix_that_fails_only_now_and_then_is_not_taken() -> None:
    times = Counter[str]()

    def check(mix: RequestMix) -> None:
        times[repr(mix)] += 1
        if mix == MIX or times[repr(mix)] == 1:
            raise MixDivergence(ServedEngine, mix, "another text")

    with pytest.raises(MixDivergence) as found:
        Search(ServedEngine, check, just(MIX), 1, "run_mix").run()
    assert found.value.mix == MIX


class _Scripted:
    """A check that fails as it is told, one time after the other."""

    def __init__(self, *causes: BaseException | None) -> None:
        self.causes = list(causes)

    def __call__(self) -> None:
        cause = self.causes.pop(0)
        if cause:
            raise Difference("it differs", str) from cause


def test_a_case_is_run_again_as_often_as_there_is_time_for() -> None:
    wrong, gone = ValueError(), TargetGoneError()
    assert repeat(_Scripted(None, wrong, None), 3).describe() == "it differed in 1 of 3"
    assert repeat(_Scripted(wrong, None), 2, seconds=0.0).describe() == "it differed in 1 of 1"
    assert repeat(_Scripted(None, gone), 20).describe() == "it differed in 1 of 2"
    assert repeat(_Scripted(None), 1).describe() == "it passed: nothing differed"


def test_what_makes_no_sense_is_refused_in_one_line(pytester: pytest.Pytester) -> None:
    url = "http://127.0.0.1:9"
    with asking(Endpoint(url, "a model")):
        files, words = saved(NOTHING, pytester.path)
    replayed, named = words[:2], words[2:]
    rate = ["--roseinfer-rate", str(RATE)]
    assert named == ["--roseinfer-endpoint", url, "--roseinfer-model", "a model", *rate]
    trace = json.loads((pytester.path / files.trace).read_text())
    assert trace["server"] == {"url": url, "model": "a model"}
    other = {**trace, "adapter": settings.SHIPPED_TARGETS[1]}
    (pytester.path / "cache.json").write_text(json.dumps(other))
    named_server = f"--roseinfer-endpoint {url} --roseinfer-model 'a model' {' '.join(rate)}"
    which = f"name the server, as in {named_server}"
    for asked, said in {
        (*replayed,): which,
        (*replayed, "--roseinfer-replay-trust"): which,
        (*replayed, *named): f"--roseinfer-endpoint {url}: *ConnectionRefusedError*",
        (
            *replayed,
            *named[2:],
        ): "--roseinfer-model: no server to apply it to; add --roseinfer-endpoint*",
        ("--roseinfer-replay=cache.json", *named): "*: not a failure of a server*",
    }.items():
        result = pytester.runpytest_inprocess(*asked)
        assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stderr.str()
        (line,) = filter(None, result.errlines)
        assert line.startswith("ERROR: ")
        result.stderr.fnmatch_lines([f"*{said}"])


def test_the_line_says_what_else_was_told() -> None:
    told = Endpoint("https://there", "m", "secret", 3.0, allow_remote=True)
    assert told.options == [
        *("--roseinfer-endpoint", "https://there", "--roseinfer-model", "m"),
        *("--roseinfer-rate", "3.0", "--roseinfer-allow-remote"),
    ]
    assert "secret" not in repr(told)
