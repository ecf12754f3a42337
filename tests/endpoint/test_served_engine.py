"""A server is held to what it gives a request alone, over HTTP: ours, clean and with bugs."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis.errors import FlakyFailure

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec, Sampling
from pytest_roseinfer.endpoint.served_engine import (
    CompletionMismatch,
    ServedEngine,
    _text,
    find_mismatch,
)
from pytest_roseinfer.endpoint.server import CompletionStream, ServerError
from pytest_roseinfer.engines.run import MixDivergence, run_mix
from pytest_roseinfer.search.reproduce import save
from pytest_roseinfer.settings import Endpoint
from tests.endpoint.planted_servers import BUGS, LEAKED
from tests.engine.searched_mixes import search
from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


CLEAN = 12
MOST = 60
"""Mixes within which a planted bug is found."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """Serve the tiny model, and make it the server of this run."""
    before = settings.current()
    monkeypatch.setattr(ServedEngine, "_reference_streams", {})
    monkeypatch.setattr("pytest_roseinfer.endpoint.server._SETTLES", 1.0)
    with running() as server:
        made = Endpoint(server.url, rate=1000)
        settings.set_current(replace(before, endpoint=made, step_seconds=3.0))
        try:
            yield made
        finally:
            settings.set_current(before)


@pytest.mark.usefixtures("endpoint")
def test_our_server_keeps_its_promise() -> None:
    search(ServedEngine, CLEAN)


_OTHER_TEXT = "got '.*'; alone it gets '.*'|token \\d+: '.*'; alone|ended after .* alone it gets"
WORDS = {
    "miscounted": "has the usage .*; alone it has|has a usage that does not add up",
    "ended_together": "ended|got '.*'; alone it gets",
    "hangs": "no stream has sent anything for 3 s|nothing received for 3 s",
    "leaks": "the engine still holds vllm:kv_cache_usage_perc",
}
"""What is said of bugs that do not make one text another."""


@pytest.mark.many_alike
@pytest.mark.parametrize("bug", BUGS)
def test_a_server_with_a_bug_is_found(
    endpoint: Endpoint, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del endpoint
    BUGS[bug](monkeypatch)
    try:
        with pytest.raises((MixDivergence, ServerError, FlakyFailure)) as found:
            search(ServedEngine, MOST)
    finally:
        monkeypatch.undo()
        while LEAKED:
            kv, blocks = LEAKED.pop()
            kv.free_blocks(0, blocks)
    # A server may fail in one way now and in another when the same is sent again.
    said = [str(each) for each in (found.value, *getattr(found.value, "exceptions", ()))]
    assert re.search(WORDS.get(bug, _OTHER_TEXT), "\n".join(said))


def _ended_stream(text: str) -> Any:
    return SimpleNamespace(
        text=text,
        error="",
        finish_reason="length",
        usage={},
        tokens=(),
        top2_gaps=(),
        has_ended=True,
    )


def test_texts_begin_alike_as_far_as_their_prompts_do() -> None:
    """Every token begins with another word, and some stand for many."""
    tokens = range(ServedEngine.vocabulary)
    assert len({_text([token]).split()[0] for token in tokens}) == len(tokens)
    assert _text([3, 30, 4]).startswith(_text([3, 30]) + " ")
    assert len(_text([30] * ServedEngine.most_tokens).split()) > 150


def test_texts_that_part_are_shown_with_the_place() -> None:
    said = find_mismatch(_ended_stream("owl bat"), _ended_stream("owl cat"))
    assert said == (
        "differs at character 4 from what it gets alone: got 'owl bat'; alone it gets 'owl cat'"
    )


def test_of_a_long_text_so_much_is_shown_as_one_can_read() -> None:
    long = "a" * 5000
    said = find_mismatch(_ended_stream(long + "b"), _ended_stream(long + "c"))
    assert "differs at character 5000 " in said
    assert f"got '{'a' * 200}b' (from character 4800 on, of 5001); alone" in said


class _Breaking:
    """An answer that raises an error when it is read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __enter__(self) -> _Breaking:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[bytes]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError("timed out"), "nothing received for 3 s"),
        (ConnectionResetError("it"), "the stream broke off: ConnectionResetError: it"),
    ],
)
def test_a_stream_that_brings_nothing_is_not_said_to_break_off(error: Exception, said: str) -> None:
    stream = object.__new__(CompletionStream)
    answer: Any = _Breaking(error)
    vars(stream).update(_left=False, _silence=3.0, _arrived=lambda: None, _answer=answer)
    stream._read()
    assert stream.error == said


def test_a_text_that_parts_in_the_middle_is_waited_for_and_shown_whole() -> None:
    right, begun = _stream(_ended_stream("owl cat")), _stream(_ended_stream("owl b"))
    begun.has_ended = False
    begun.wait = lambda: vars(begun).update(has_ended=True, text="owl bat")
    engine = ServedEngine()
    engine.server = SimpleNamespace(require_reachable=lambda: None)  # type: ignore[assignment]
    engine._cold, engine._open, engine._seen_of = [], {begun: (2, right)}, {}
    with pytest.raises(CompletionMismatch, match=r"^request 2 differs at .* got 'owl bat'; alone"):
        engine.step()


def _stream(like: Any) -> Any:
    stream = object.__new__(CompletionStream)
    vars(stream).update(vars(like), wait=lambda: None)
    return stream


class _Counted:
    """Stands for a text that is served until it is waited for, as all others are."""

    served: ClassVar[list[_Counted]] = []
    beside: ClassVar[list[int]] = []
    """How many others were served when each text was asked for."""
    error = ""

    def __init__(self, *_: object) -> None:
        self.beside.append(len(self.served))
        self.served.append(self)

    def wait(self) -> None:
        self.served.remove(self)


def test_what_is_asked_alone_is_alone(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not: while the first text of a mix was asked for alone, the others were served."""
    del endpoint
    monkeypatch.setattr("pytest_roseinfer.endpoint.served_engine.CompletionStream", _Counted)
    monkeypatch.setattr(_Counted, "beside", [])
    mix = RequestMix(tuple(RequestSpec((word,), Sampling(max_new_tokens=2)) for word in (3, 4, 5)))
    ServedEngine().make(mix)
    assert _Counted.beside == [0, 1, 2, 0, 0, 0]


@pytest.mark.parametrize("cold", [True, False])
def test_what_ended_behind_the_last_step_is_checked_too(cold: bool) -> None:
    """A run is over when all texts are there, which may be before their last words are read."""
    right: Any = SimpleNamespace(text="a", error="", finish_reason="stop", usage={}, has_ended=True)
    ended: Any = SimpleNamespace(**vars(right) | {"finish_reason": "length"})
    engine = ServedEngine()
    engine.server = SimpleNamespace(require_reachable=lambda: None)  # type: ignore[assignment]
    engine._cold = [(0, ended, right)] if cold else []
    engine._open = {} if cold else {_stream(ended): (0, right)}
    engine._seen_of = {}
    with pytest.raises(CompletionMismatch, match=r"request 0.* ended by 'length'; alone by 'stop'"):
        engine.find_leaks()


def test_a_saved_script_asks_the_same_server(endpoint: Endpoint, tmp_path: Path) -> None:
    settings.set_current(replace(settings.current(), endpoint=replace(endpoint, key="secret")))
    wanted = Sampling(max_new_tokens=2)
    mix = RequestMix((RequestSpec((3, 4), wanted), RequestSpec((3,), wanted)))
    found: Any = {"message": "it was so", "what": "another text"}
    saved = save(ServedEngine, mix, "run_mix", found, f"{tmp_path}/failures", "")
    script = tmp_path / saved.script
    assert "secret" not in script.read_text()
    assert replayed(script).stdout == "it passed 20 times: nothing differed\n"
    script.write_text(script.read_text().replace(endpoint.url, "http://127.0.0.1:9"))
    assert "ServerError: GET /v1/models: ConnectionRefusedError" in replayed(script).stderr


def replayed(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )


@dataclass(eq=False)
class Told:
    """A stream whose end has come."""

    text: str
    finish_reason: str
    tokens: tuple[str, ...] = ("a", "b", "c")
    top2_gaps: tuple[float, ...] = (9.0, 9.0, 0.1)
    error: str = ""
    has_ended: bool = True
    usage: Any = field(default_factory=dict)

    def wait(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("served", "alone", "wrong"),
    [
        (Told("ab", "stop"), Told("abc", "length"), ""),
        (Told("a", "stop"), Told("abc", "length"), "differs at character 1"),
        (Told("abc", "length"), Told("ab", "stop"), ""),
        (Told("abc", "length"), Told("a", "stop", ("a", ""), (9.0, 9.0)), "differs at character 1"),
        (Told("ab", "stop"), Told("ab", "length", ("a", "b"), (9.0, 0.1)), "ended by 'stop'"),
    ],
)
@pytest.mark.usefixtures("endpoint")
def test_the_end_of_a_text_may_be_a_near_tie(
    served: Told, alone: Told, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedEngine, "_ask", lambda *_: served)
    monkeypatch.setattr(ServedEngine, "_reference_stream", lambda *_: alone)
    only = RequestMix(requests=(RequestSpec((1, 2), Sampling(3)),))
    monkeypatch.setattr(ServedEngine, "_key", lambda *_: "only")
    monkeypatch.setattr(ServedEngine, "_reference_streams", {"only": alone})
    with pytest.raises(MixDivergence, match=wrong) if wrong else nullcontext():
        run_mix(ServedEngine, only)
