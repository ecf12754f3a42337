"""A failure of a server is run again by the line that was printed for it, and by no less."""

from __future__ import annotations

import json
import shlex
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.mix import Asked, RequestMix, Sampling
from pytest_roseinfer.endpoint.served_engine import ServedEngine
from pytest_roseinfer.engines.run import MixDivergence, run_mix
from pytest_roseinfer.search.reproduce import Saved, save
from pytest_roseinfer.settings import RATE, Endpoint
from tests.endpoint.planted_servers import stops_in_a_crowd
from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WANTED = Sampling(max_new_tokens=24)
MIX = RequestMix((Asked((3, 4), WANTED), Asked((3,), WANTED)))
FOUND = "request 0, when all came at once, ended by 'stop'; alone by 'length'"
NOTHING: Any = {"message": "it was so", "what": "another text"}


@contextmanager
def asking(endpoint: Endpoint) -> Iterator[None]:
    before = settings.current()
    settings.set_current(replace(before, endpoint=endpoint))
    try:
        yield
    finally:
        settings.set_current(before)


def saved(found: Any, folder: Path) -> tuple[Saved, list[str]]:
    """Save a failure of the mix; return it with the words of the line that runs it again."""
    files = save(ServedEngine, MIX, "run_mix", found, f"{folder}/.roseinfer", "")
    line = files.words.partition("\n")[0]
    command, *words = shlex.split(line.removeprefix("replay with: "))
    assert command == "pytest"
    return files, words


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
    failed.stdout.fnmatch_lines([f"FAILED: {FOUND}"])
    assert "another failure" not in failed.stdout.str()
    assert passed.ret == pytest.ExitCode.OK
    passed.stdout.fnmatch_lines(["it ran through: nothing differed", f"*recorded with: {FOUND}"])
    for file in (files.trace, files.script):
        assert "secret" not in (pytester.path / file).read_text()
    for run in (failed, passed):
        assert "secret" not in run.stdout.str() + run.stderr.str()


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
    which = f"say which, as --roseinfer-endpoint {url} --roseinfer-model 'a model' {' '.join(rate)}"
    for asked, said in {
        (*replayed,): which,
        (*replayed, "--roseinfer-replay-trust"): which,
        (*replayed, *named): f"--roseinfer-endpoint {url}: *ConnectionRefusedError*",
        (*replayed, *named[2:]): "--roseinfer-model is about a server: add --roseinfer-endpoint*",
        ("--roseinfer-replay=cache.json", *named): "*is no failure of a server*",
    }.items():
        result = pytester.runpytest_inprocess(*asked)
        assert result.ret == pytest.ExitCode.USAGE_ERROR, result.stderr.str()
        (line,) = filter(None, result.errlines)
        assert line.startswith("ERROR: ")
        result.stderr.fnmatch_lines([f"*{said}"])


def test_the_line_says_what_else_was_told() -> None:
    told = Endpoint("https://there", "m", "secret", 3.0, anywhere=True)
    assert told.options == [
        *("--roseinfer-endpoint", "https://there", "--roseinfer-model", "m"),
        *("--roseinfer-rate", "3.0", "--roseinfer-endpoint-anywhere"),
    ]
    assert "secret" not in repr(told)
