"""A server must give each request the completion that it gives it alone, over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
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
    equal_parts,
    find_mismatch,
)
from pytest_roseinfer.endpoint.server import Choice, CompletionStream, ServerError
from pytest_roseinfer.engines.run import MixDivergence, run_mix
from pytest_roseinfer.search.reproduce import save
from pytest_roseinfer.settings import Endpoint
from tests.endpoint.planted_servers import BUGS, LEAKED
from tests.engine.searched_mixes import search
from tests.server.served import running

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


CLEAN = 12
MOST = 60
"""Mixes within which a planted bug must be found."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """Serve the tiny model, as the server of this run."""
    previous_settings = settings.current()
    monkeypatch.setattr(ServedEngine, "_reference_streams", {})
    monkeypatch.setattr(ServedEngine, "_streams", [])
    monkeypatch.setattr("pytest_roseinfer.endpoint.server._SETTLES", 1.0)
    with running() as server:
        endpoint_made = Endpoint(server.url, rate=1000)
        settings.set_current(replace(previous_settings, endpoint=endpoint_made, step_seconds=3.0))
        try:
            yield endpoint_made
        finally:
            settings.set_current(previous_settings)


@pytest.mark.slow
@pytest.mark.usefixtures("endpoint")
def test_roseinfer_server_passes() -> None:
    search(ServedEngine, CLEAN)


_OTHER_TEXT = "got .*; alone it gets |token \\d+: '.*'; alone|ended after .* alone it gets"
MESSAGES = {
    "miscount_usage": "has the usage .*; alone it has|has a usage that does not add up",
    "end_another_text": "ended|got .*; alone it gets",
    "hang_after_disconnect": "no stream has sent anything for 3 s|nothing received for 3 s",
    "leak_blocks": "the engine still holds vllm:kv_cache_usage_perc",
    # The first to leave is the one that tries how long a text may be.
    "ignore_a_disconnect": "the engine still holds vllm:num_requests_running 1",
    # A server may still go on with it when the next mix is served.
    "ignore_an_early_disconnect": r"was left( before its first token)?, and the server goes on with"
    r" it: after \d+ tokens of other texts it serves vllm:num_requests_running [2-9]",
    "mix_up_choices": "in one HTTP request, choice 0 differs",
    "echo_another_prompt": "in one HTTP request, choice 1 echoes '.*'; its prompt is '.*'",
    "lose_a_top_logprob": "its logprobs have lists of different lengths: ",
    "lose_a_token_with_logprobs": r"has logprobs of the tokens \[.*\]; alone of \[",
    "delay_top_logprobs": r"has the logprobs \{.*\} at token \d+, '.*'; alone \{",
    "give_top_logprobs_of_another_row": r"has the logprobs \{.*\} at token \d+, '.*'; alone \{",
    "count_a_prompt_for_each_choice": "in one HTTP request, has the usage .* with 2 choices; alone",
    "count_the_first_choice_alone": "in one HTTP request, has the usage .* with 2 choices; alone",
    "use_other_parameters": f"{_OTHER_TEXT}|have not ended after",
}
"""Messages about bugs that do not only exchange texts."""


@pytest.mark.sampled_cases
@pytest.mark.parametrize("bug", BUGS)
def test_planted_server_bug_is_found(
    endpoint: Endpoint, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del endpoint
    BUGS[bug](monkeypatch)
    try:
        with pytest.raises((MixDivergence, ServerError, FlakyFailure)) as caught:
            search(ServedEngine, MOST)
    finally:
        monkeypatch.undo()
        while LEAKED:
            kv, blocks = LEAKED.pop()
            kv.free_blocks(0, blocks)
    # A server may fail differently when the same requests are sent again.
    messages = [str(each) for each in (caught.value, *getattr(caught.value, "exceptions", ()))]
    assert re.search(MESSAGES.get(bug, _OTHER_TEXT), "\n".join(messages))


def _ended_stream(text: str, *others: str) -> Any:
    """Return a stand-in for a stream that has ended, with a choice for each text."""
    stream = object.__new__(CompletionStream)
    choices = [Choice(each, finish_reason="length") for each in (text, *others)]
    vars(stream).update(choices=choices, error="", usage={}, has_ended=True, lasting=False)
    return stream


def test_equal_prompt_prefixes_give_equal_text_prefixes() -> None:
    """Every token begins with another word, and some are many words long."""
    tokens = range(ServedEngine.vocabulary)
    assert len({_text([token]).split()[0] for token in tokens}) == len(tokens)
    assert _text([3, 30, 4]).startswith(_text([3, 30]) + " ")
    assert len(_text([30] * ServedEngine.max_tokens).split()) > 150


def test_differing_texts_are_shown_with_their_position() -> None:
    message = find_mismatch(_ended_stream("owl bat"), _ended_stream("owl cat"))
    assert message == (
        "differs at character 4 from what it gets alone: got 'owl bat'; alone it gets 'owl cat'"
    )


def test_lasting_text_completes_the_last_character_of_the_text_alone() -> None:
    """A tokenizer of bytes may split a character between two tokens."""
    lasting, alone = _ended_stream("owl \u02be bat"), _ended_stream("owl \ufffd")
    lasting.lasting = True
    assert equal_parts(lasting, alone) == ("owl ", replace(alone.choices[0], text="owl "))
    lasting.lasting = False
    assert find_mismatch(lasting, alone).startswith("differs at character 4 ")


def test_long_text_is_shown_around_the_difference() -> None:
    long_text = "a" * 5000
    message = find_mismatch(_ended_stream(long_text + "b"), _ended_stream(long_text + "c"))
    assert "differs at character 5000 " in message
    assert f"got '{'a' * 200}b' (from character 4800 on, of 5001); alone" in message


class _FailingResponse:
    """A response that raises an error when it is read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __enter__(self) -> _FailingResponse:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[bytes]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TimeoutError("timed out"), "nothing received for 3 s"),
        (ConnectionResetError("it"), "the stream broke off: ConnectionResetError: it"),
    ],
)
def test_silent_stream_and_broken_stream_have_different_errors(
    error: Exception, message: str
) -> None:
    stream = object.__new__(CompletionStream)
    answer: Any = _FailingResponse(error)
    vars(stream).update(_disconnected=False, _silence=3.0, _arrived=lambda: None, _response=answer)
    stream._read()
    assert stream.error == message


def test_differing_text_is_completed_before_it_is_shown() -> None:
    reference, begun_stream = _ended_stream("owl cat"), _ended_stream("owl b")
    begun_stream.has_ended = False

    def wait() -> None:
        begun_stream.has_ended, begun_stream.choices[0].text = True, "owl bat"

    begun_stream.wait = wait
    engine = ServedEngine()
    engine.server = SimpleNamespace(require_reachable=lambda: None)  # type: ignore[assignment]
    engine._cold, engine._open, engine._seen_of = [], {begun_stream: (2, reference)}, {}
    with pytest.raises(CompletionMismatch, match=r"^request 2 differs at .* got 'owl bat'; alone"):
        engine.step()


class _CountedStream:
    """A stand-in for a text that is served until it is waited for."""

    streams: ClassVar[list[_CountedStream]] = []
    num_others: ClassVar[list[int]] = []
    """Number of other texts in service when each text was requested."""
    error = ""

    def __init__(self, *_: object, **_named: object) -> None:
        self.num_others.append(len(self.streams))
        self.streams.append(self)

    def wait(self) -> None:
        self.streams.remove(self)


def test_reference_completions_are_requested_alone(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once was not: the other texts of a mix were served during the first reference request."""
    del endpoint
    monkeypatch.setattr("pytest_roseinfer.endpoint.served_engine.CompletionStream", _CountedStream)
    monkeypatch.setattr(_CountedStream, "num_others", [])
    mix = RequestMix(tuple(RequestSpec((word,), Sampling(max_new_tokens=2)) for word in (3, 4, 5)))
    ServedEngine().make(mix)
    assert _CountedStream.num_others == [0, 1, 2, 3, 4, 0, 0, 0]


@pytest.mark.parametrize("cold", [True, False])
def test_completion_that_ends_after_the_last_step_is_checked(cold: bool) -> None:
    """A run is over when all texts are complete, which may be before their last words are read."""
    reference, ended = _ended_stream("a"), _ended_stream("a")
    reference.choices[0].finish_reason = "stop"
    ended.wait = lambda: None
    engine = ServedEngine()
    engine.server = SimpleNamespace(require_reachable=lambda: None)  # type: ignore[assignment]
    engine._cold = [([0], ended, [reference])] if cold else []
    engine._open = {} if cold else {ended: (0, reference)}
    engine._seen_of = {}
    with pytest.raises(CompletionMismatch, match=r"request 0.* ended by 'length'; alone by 'stop'"):
        engine.find_leaks()


@pytest.mark.usefixtures("endpoint")
def test_next_mix_begins_without_streams_of_one_that_failed() -> None:
    leaves = RequestSpec((1, 2), Sampling(3), cancel_after=2)
    failed, following = ServedEngine(), ServedEngine()
    failed.make(RequestMix(requests=(leaves,)))
    stream = failed.submit(leaves.prompt, leaves.sampling)
    following.make(RequestMix(requests=(replace(leaves, cancel_after=None),)))
    assert stream.has_ended
    assert stream.finish_reason is None
    assert following.find_leaks() == ""


@pytest.mark.slow
def test_saved_script_uses_the_same_server(endpoint: Endpoint, tmp_path: Path) -> None:
    settings.set_current(replace(settings.current(), endpoint=replace(endpoint, key="secret")))
    two_tokens = Sampling(max_new_tokens=2)
    mix = RequestMix((RequestSpec((3, 4), two_tokens), RequestSpec((3,), two_tokens)))
    failure: Any = {"message": "it was so", "summary": "another text", "digest": ""}
    files = save(ServedEngine, mix, "run_mix", failure, f"{tmp_path}/failures", "")
    script = tmp_path / files.script
    assert "secret" not in script.read_text()
    assert run_script(script).stdout == "it passed 20 times: nothing differed\n"
    script.write_text(script.read_text().replace(endpoint.url, "http://127.0.0.1:9"))
    assert "ServerError: GET /v1/models: ConnectionRefusedError" in run_script(script).stderr


def run_script(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )


def ended_by(
    text: str,
    finish_reason: str,
    tokens: Sequence[str] = ("a", "b", "c"),
    top2_gaps: Sequence[float] = (9.0, 9.0, 0.1),
) -> Any:
    """Return a stand-in for a stream that has ended."""
    stream = _ended_stream(text)
    stream.choices = [Choice(text, [*tokens], [*top2_gaps], finish_reason)]
    stream.wait = lambda: None
    return stream


@pytest.mark.parametrize(
    ("streams", "alone", "message"),
    [
        (ended_by("ab", "stop"), ended_by("abc", "length"), ""),
        (
            ended_by("a", "stop"),
            ended_by("abc", "length"),
            "got 'a'; alone it gets 'abc', which led by 9 there",
        ),
        (ended_by("a", "stop"), ended_by("abc", "length", top2_gaps=(9.0, 0.3, 9.0)), ""),
        (ended_by("abc", "length"), ended_by("ab", "stop"), ""),
        (
            ended_by("abc", "length"),
            ended_by("a", "stop", ("a", ""), (9.0, 9.0)),
            "differs at character 1",
        ),
        (
            ended_by("ab", "stop"),
            ended_by("ab", "length", ("a", "b"), (9.0, 0.1)),
            "ended by 'stop'",
        ),
    ],
)
@pytest.mark.usefixtures("endpoint")
def test_end_of_a_text_may_be_a_near_tie(
    streams: Any, alone: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedEngine, "_send_request", lambda *_, **_named: streams)
    monkeypatch.setattr(ServedEngine, "_reference_stream", lambda *_: alone)
    single_mix = RequestMix(requests=(RequestSpec((1, 2), Sampling(3)),))
    monkeypatch.setattr(ServedEngine, "_key", lambda *_: "only")
    monkeypatch.setattr(ServedEngine, "_reference_streams", {"only": alone})
    with pytest.raises(MixDivergence, match=message) if message else nullcontext():
        run_mix(ServedEngine, single_mix)
