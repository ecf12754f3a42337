"""Engine adapter for a server that is reached over HTTP, and the checks of its streams."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.endpoint.server import CompletionStream, Server, ServerError, ServerGone
from pytest_roseinfer.engine_capabilities.capability import mix_conditions
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.run.watchdog import AdapterFinding
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec, Sampling

# Comparison of a stream with the reference: the completion of the same request alone.


_NEAR_TIE_GAP = 0.25
"""Gap of the top two logprobs below which rounding may change the argmax.

In bfloat16, between two logits of about 12, another batch changed the gap by 0.19.
"""
_MOST = 400
"""Maximum characters of a text in a message; a longer one is cut around the difference."""
_COUNTED = ("prompt_tokens", "completion_tokens")
"""Usage fields that must match; the number of cached prompt tokens may differ."""


def find_mismatch(stream: CompletionStream, alone: CompletionStream) -> str:
    """Describe the mismatch of a stream that has ended; "" for a expected one."""
    if stream.error:
        return f"failed: {stream.error}, after {_around(stream.text, len(stream.text))}"
    at = _first_difference(stream.text, alone.text)
    if at is not None:
        if near_tie(alone, at):
            return ""
        actual_text, right = _around(stream.text, at), _around(alone.text, at)
        difference = f"differs at character {at} from what it gets alone"
        return f"{difference}: got {actual_text}; alone it gets {right}"
    if stream.finish_reason != alone.finish_reason:
        return f"ended by {stream.finish_reason!r}; alone by {alone.finish_reason!r}"
    counts = [(stream.usage.get(name), alone.usage.get(name)) for name in _COUNTED]
    if any(actual != expected for actual, expected in counts):
        return f"has the usage {stream.usage}; alone it has {alone.usage}"
    if stream.usage and stream.usage["total_tokens"] != sum(actual or 0 for actual, _ in counts):
        return f"has a usage that does not add up: {stream.usage}"
    return ""


def diverges(partial_text: str, expected: CompletionStream) -> bool:
    """Return True if an unfinished text already differs from its request's text alone."""
    at = _first_difference(partial_text, expected.text[: len(partial_text)])
    return at is not None and not near_tie(expected, at)


def _around(text: str, at: int) -> str:
    if len(text) <= _MOST:
        return repr(text)
    begin = max(0, at - _MOST // 2)
    shown = text[begin : begin + _MOST]
    return f"{shown!r} (from character {begin} on, of {len(text)})"


def _first_difference(actual: str, expected: str) -> int | None:
    """Return the index of the first different character; None for equal texts."""
    if actual == expected:
        return None
    pairs = enumerate(zip(actual, expected, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(actual), len(expected)))


def near_tie(expected: CompletionStream, at: int) -> bool:
    """Return True if the token of a character, or the token before it, was a near tie.

    The token before counts too: two candidate tokens may start with the same characters.
    """
    begins, before = 0, float("inf")
    for token, gap in zip(expected.tokens, expected.top2_gaps, strict=True):
        begins += len(token)
        if begins > at:
            return min(gap, before) < _NEAR_TIE_GAP
        before = gap
    return before < _NEAR_TIE_GAP


_ANIMALS = """
ant bee cat dog elk fox gnu hen ibex jay kid lark mole newt owl pig quail rat seal toad urial vole
wren yak zebu ape bat cod doe eel fly goat
"""
_WORDS = _ANIMALS.split()
_FIRST_LONG = 26
"""First token that stands for several words, so that some texts fill many blocks."""
_WORDS_OF_LONG = 8
_APART = 5
"""Distance in the word list between consecutive words of one token."""
_server = lru_cache(maxsize=1)(Server)


def _text(prompt: Sequence[int]) -> str:
    """Spell a prompt as words; prompts with a common prefix give texts with a common prefix."""
    parts: list[str] = []
    for token in prompt:
        count = 1 if token < _FIRST_LONG else _WORDS_OF_LONG
        parts += [_WORDS[(token + at * _APART) % len(_WORDS)] for at in range(count)]
    return " ".join(parts)


_END = -1
"""Token after the characters of a text that stopped by itself, which may be a near tie too."""


def _characters(text: str, finish_reason: str | None) -> list[int]:
    return [*map(ord, text), *[_END] * (finish_reason == "stop")]


class CompletionMismatch(AdapterFinding):
    """Error for a request whose completion differs from the one it gets alone."""


class ServedEngine(EngineAdapter):
    """Adapter of a server: prompts are words, and characters of completions stand for tokens.

    A mix is served twice: first all requests at once, while the server may have none of their
    prompts cached, then as drawn. In between, each request that has no reference yet is served
    alone.
    """

    vocabulary = len(_WORDS)
    max_tokens = 24
    sampling = SamplingTraits(greedy_only=True)
    replays = 20
    # Characters stand for tokens, so that nobody knows which of them was the first one.
    unreachable: ClassVar[Collection[str]] = tuple(mix_conditions(EngineAdapter))
    block_sizes: ClassVar[Sequence[int]] = (1,)
    _reference_streams: ClassVar[dict[tuple[Any, ...], CompletionStream]] = {}

    @classmethod
    def describe(cls, example: RequestMix) -> str:
        lines = [f"the greedy completions of {settings.current().endpoint}, for the prompts"]
        lines += [f"{at}. {cls.describe_request(each)}" for at, each in enumerate(example.requests)]
        return "\n  ".join(lines)

    @classmethod
    def describe_request(cls, spec: RequestSpec) -> str:
        description = f"at step {spec.arrival}: {_text(spec.prompt)!r}"
        description += f", max_tokens {spec.sampling.max_new_tokens}"
        if spec.cancel_after is not None:
            description += f", left {format_count(spec.cancel_after, 'step')} later"
        return description

    def make(self, mix: RequestMix) -> None:
        endpoint = settings.current().endpoint
        if endpoint is None:
            raise ServerError(
                "no server to test; name it with --roseinfer-endpoint http://127.0.0.1:8000"
            )
        self.server = _server(endpoint)
        self._news = threading.Condition()
        self._num_seen = self._num_arrived = 0
        self._submitted = 0
        self._open: dict[CompletionStream, tuple[int, CompletionStream]] = {}
        """Open streams, each with its request's number and its reference."""
        self._seen_of: dict[CompletionStream, tuple[str, bool]] = {}
        """Text of each stream at the last check, and True if it had ended."""
        first = [self._send_request(each.prompt, each.sampling) for each in mix.requests]
        for cold in first:
            cold.wait()
        self.server.describe_leaks()  # waits until idle: a failed mix may have left requests
        text_alone = [self._reference_stream(each.prompt, each.sampling) for each in mix.requests]
        self._cold = list(zip(range(len(first)), first, text_alone, strict=True))

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        stream = self._send_request(prompt, sampling)
        self._open[stream] = self._submitted, self._reference_stream(prompt, sampling)
        self._submitted += 1
        return stream

    def step(self) -> None:
        """Wait until an open stream sends something or all have ended."""
        self._check()
        silence = settings.current().step_seconds
        with self._news:
            if not self._news.wait_for(self._has_news, silence or None):
                raise CompletionMismatch(f"no stream has sent anything for {silence:g} s")
            self._num_seen = self._num_arrived
        self._check()

    def _check(self) -> None:
        """Raise if a stream differs from its reference, once all of it has arrived."""
        for number, cold, reference in self._cold:
            if mismatch := find_mismatch(cold, reference):
                self._fail(f"request {number}, when all arrived at once, {mismatch}")
        self._cold = []
        for stream, (number, reference) in self._open.items():
            has_ended, text = stream.has_ended, stream.text
            if not has_ended and diverges(text, reference):
                stream.wait()
            if stream.has_ended and (mismatch := find_mismatch(stream, reference)):
                self._fail(f"request {number} {mismatch}")
            self._seen_of[stream] = text, has_ended

    def _fail(self, summary: str, cause: ServerError | None = None) -> NoReturn:
        """Raise the mismatch, or ``ServerGone`` if the server has stopped."""
        self.server.require_reachable()
        raise CompletionMismatch(summary) from cause

    def _has_news(self) -> bool:
        return self._num_arrived > self._num_seen or all(stream.has_ended for stream in self._open)

    def _send_request(self, prompt: Sequence[int], sampling: Sampling) -> CompletionStream:
        text = _text(prompt)
        silence = settings.current().step_seconds or 600.0
        try:
            return CompletionStream(
                self.server, text, sampling.max_new_tokens, silence, self._arrive
            )
        except ServerGone:
            raise
        except ServerError as error:
            self._fail(f"the prompt {text!r} was refused: {error}", error)

    def _arrive(self) -> None:
        with self._news:
            self._num_arrived += 1
            self._news.notify_all()

    def _reference_stream(self, prompt: Sequence[int], sampling: Sampling) -> CompletionStream:
        key = self._key(prompt, sampling)
        if key not in self._reference_streams:
            self._reference_streams[key] = self._send_request(prompt, sampling)
            self._reference_streams[key].wait()
        if self._reference_streams[key].error:
            self._fail(
                f"{_text(prompt)!r}, requested alone, failed: "
                f"{self._reference_streams.pop(key).error}"
            )
        return self._reference_streams[key]

    def tokens(self, request: Any) -> list[int]:
        text, has_ended = self._seen_of.get(request, ("", False))
        return _characters(text, request.finish_reason if has_ended else None)

    def spell(self, token: int) -> str:
        return "the end of the text" if token == _END else repr(chr(token))

    def is_finished(self, request: Any) -> bool:
        return self._seen_of.get(request, ("", False))[1]

    def cancel(self, request: Any) -> None:
        self._open.pop(request)
        request.disconnect()
        self._seen_of[request] = self._seen_of.get(request, ("", False))[0], True

    def find_leaks(self) -> str:
        """Describe the server's leaks, after checking the streams that have ended since."""
        for stream in self._open:
            stream.wait()
        self._check()
        return self.server.describe_leaks()

    def path_counts(self) -> Mapping[str, int]:
        return {}

    def generate_alone(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        mix: RequestMix,  # noqa: ARG002
    ) -> list[int]:
        reference = self._reference_stream(prompt, sampling)
        return _characters(reference.text, reference.finish_reason)

    def is_near_tie(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
        """Return True if the next token after a prompt and its output was a near tie alone."""
        prompts = {each.prompt for each in mix.requests}
        matching = [prompt for prompt in prompts if tuple(tokens[: len(prompt)]) == prompt]
        candidates = [
            (len(p), self._reference_streams.get(self._key(p, sampling))) for p in matching
        ]
        return any(
            stream and near_tie(stream, len(tokens) - length) for length, stream in candidates
        )

    def _key(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Any, ...]:
        return self.server, tuple(prompt), sampling.max_new_tokens
