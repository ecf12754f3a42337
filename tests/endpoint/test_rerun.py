"""Replays of a server's failure, with the printed command line."""

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
from pytest_roseinfer.search.named_checks import repeat
from pytest_roseinfer.search.reproduce import SavedFiles, save
from pytest_roseinfer.search.search import Search
from pytest_roseinfer.settings import RATE, Endpoint
from tests.endpoint.planted_servers import lose_some_texts, report_stop
from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EIGHT_TOKENS = Sampling(max_new_tokens=8)
MIX = RequestMix((RequestSpec((3, 4), EIGHT_TOKENS), RequestSpec((3,), EIGHT_TOKENS)))
FAILURE = "request 0, when all arrived at once, ended by 'stop'; alone by 'length'"
ANY_FAILURE: Any = {"message": "it was so", "summary": "another text", "digest": ""}


@contextmanager
def using_endpoint(endpoint: Endpoint) -> Iterator[None]:
    previous_settings = settings.current()
    settings.set_current(replace(previous_settings, endpoint=endpoint))
    try:
        yield
    finally:
        settings.set_current(previous_settings)


def save_failure(failure: Any, folder: Path) -> tuple[SavedFiles, list[str]]:
    """Save a failure of the mix; return it with the words of the printed command line."""
    files = save(ServedEngine, MIX, "run_mix", failure, f"{folder}/.roseinfer", "")
    line = files.description.partition("\n")[0]
    command, *replay_options = shlex.split(line.removeprefix("replay with: "))
    assert command == "pytest"
    return files, replay_options


@pytest.mark.slow
@pytest.mark.sampled_cases
@pytest.mark.parametrize("model", ["", "tiny"])
def test_printed_command_fails_until_the_bug_is_fixed(
    model: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSEINFER_API_KEY", "secret")
    with running() as server, monkeypatch.context() as bug_patches:
        report_stop(bug_patches)
        with using_endpoint(Endpoint(server.url, model, "secret", rate=1000)):
            with pytest.raises(MixDivergence) as caught:
                run_mix(ServedEngine, MIX)
            assert caught.value.summary == FAILURE
            failure: Any = {"message": str(caught.value), "summary": FAILURE, "digest": ""}
            files, replay_options = save_failure(failure, pytester.path)
        assert ("--roseinfer-model" in replay_options) == bool(model)
        failed = pytester.runpytest_subprocess(*replay_options)
        bug_patches.undo()
        passed = pytester.runpytest_subprocess(*replay_options)
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    failed.stdout.fnmatch_lines([f"FAILED: {FAILURE}", "it differed in 20 of 20"])
    for run in (failed, passed):  # a reader can repeat the request
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
        ["it passed 20 times: nothing differed", f"*recorded with: {FAILURE}"]
    )
    for file in (files.trace, files.script):
        assert "secret" not in (pytester.path / file).read_text()
    for run in (failed, passed):
        assert "secret" not in run.stdout.str() + run.stderr.str()


@pytest.mark.slow
def test_replay_counts_intermittent_failures(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as server:
        lose_some_texts(
            monkeypatch, 23
        )  # a run sends five requests, and two more for the references
        with using_endpoint(Endpoint(server.url, rate=1000)):
            files, replay_options = save_failure(ANY_FAILURE, pytester.path)
        replayed = pytester.runpytest_subprocess(*replay_options)
        script = subprocess.run(
            [sys.executable, pytester.path / files.script], capture_output=True, text=True
        )
    assert replayed.ret == pytest.ExitCode.TESTS_FAILED
    assert script.returncode == 1
    for output in (replayed.stdout.str(), script.stderr):
        match = re.search(r"^it differed in (\d+) of 20$", output, re.MULTILINE)
        assert match
        assert 1 <= int(match[1]) < 15


def test_search_serves_a_failing_mix_again_and_counts_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running() as server, using_endpoint(Endpoint(server.url, rate=1000)):
        lose_some_texts(
            monkeypatch, 5
        )  # of six requests: two alone, and each of two among others twice
        with pytest.raises(MixDivergence) as caught:
            Search(ServedEngine, partial(run_mix, ServedEngine), just(MIX), 1, "run_mix").run()
    assert re.search(r"\n\nServed again, it differed in \d+ of \d+\.\n", f"{caught.value}\n")


def test_intermittently_failing_smaller_mix_is_not_accepted() -> None:
    runs = Counter[str]()

    def check(mix: RequestMix) -> None:
        runs[repr(mix)] += 1
        if mix == MIX or runs[repr(mix)] == 1:
            raise MixDivergence(ServedEngine, mix, "another text", kind="tokens")

    with pytest.raises(MixDivergence) as caught:
        Search(ServedEngine, check, just(MIX), 1, "run_mix").run()
    assert caught.value.mix == MIX


class _Scripted:
    """A check that fails with the given causes, one call after the other."""

    def __init__(self, *causes: BaseException | None) -> None:
        self.causes = list(causes)

    def __call__(self) -> None:
        cause = self.causes.pop(0)
        if cause:
            raise Difference("it differs", str) from cause


def test_case_is_repeated_within_its_time() -> None:
    wrong, gone = ValueError(), TargetGoneError()
    assert repeat(_Scripted(None, wrong, None), 3).describe() == "it differed in 1 of 3"
    assert repeat(_Scripted(wrong, None), 2, seconds=0.0).describe() == "it differed in 1 of 1"
    assert repeat(_Scripted(None, gone), 20).describe() == "it differed in 1 of 2"
    assert repeat(_Scripted(None), 1).describe() == "it passed: nothing differed"


def test_invalid_replay_options_are_refused_in_one_line(pytester: pytest.Pytester) -> None:
    url = "http://127.0.0.1:9"
    with using_endpoint(Endpoint(url, "a model")):
        files, replay_options = save_failure(ANY_FAILURE, pytester.path)
    replayed, server_options = replay_options[:2], replay_options[2:]
    rate = ["--roseinfer-rate", str(RATE)]
    assert server_options == ["--roseinfer-endpoint", url, "--roseinfer-model", "a model", *rate]
    trace = json.loads((pytester.path / files.trace).read_text())
    assert trace["server"] == {"url": url, "model": "a model"}
    cache_trace = {**trace, "adapter": settings.SHIPPED_TARGETS[1]}
    (pytester.path / "cache.json").write_text(json.dumps(cache_trace))
    server_command = f"--roseinfer-endpoint {url} --roseinfer-model 'a model' {' '.join(rate)}"
    hint = f"name the server, as in {server_command}"
    for arguments, message in {
        (*replayed,): hint,
        (*replayed, "--roseinfer-replay-trust"): hint,
        (*replayed, *server_options): f"--roseinfer-endpoint {url}: *ConnectionRefusedError*",
        (
            *replayed,
            *server_options[2:],
        ): "--roseinfer-model: no server to apply it to; add --roseinfer-endpoint*",
        ("--roseinfer-replay=cache.json", *server_options): "*: not a failure of a server*",
    }.items():
        result = pytester.runpytest_inprocess(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stderr.str()
        (line,) = filter(None, result.errlines)
        assert line.startswith("ERROR: ")
        result.stderr.fnmatch_lines([f"*{message}"])


def test_command_includes_the_options_of_the_server() -> None:
    endpoint = Endpoint("https://there", "m", "secret", 3.0, allow_remote=True)
    assert endpoint.options == [
        *("--roseinfer-endpoint", "https://there", "--roseinfer-model", "m"),
        *("--roseinfer-rate", "3.0", "--roseinfer-allow-remote"),
    ]
    assert "secret" not in repr(endpoint)
