"""An engine that is reached over HTTP, and the promises that its streams keep."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.endpoint.server import Server, ServerError, ServerGone, Streamed
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.run.watchdog import FoundByAdapter
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec, Sampling

# What a text must have in common with the one that its request gets alone.


_NEAR = 0.25
"""Where the log-probabilities of the two likeliest tokens lie nearer, rounding may choose the
other: between two logits of a dozen, in bfloat16, another batch moved the distance by 0.19."""
_MOST = 400
"""A longer text is not shown whole, but so many characters of it around where it parts."""
_COUNTED = ("prompt_tokens", "completion_tokens")
"""How much of a prompt was known before may differ."""


def broken_promise(stream: Streamed, alone: Streamed) -> str:
    """Say what is wrong with a stream that has ended; nothing is right."""
    if stream.error:
        return f"failed: {stream.error}, behind {_around(stream.text, len(stream.text))}"
    at = _parted(stream.text, alone.text)
    if at is not None:
        if near_tie(alone, at):
            return ""
        got, right = _around(stream.text, at), _around(alone.text, at)
        return f"parts at character {at} from what it gets alone: got {got}; alone it gets {right}"
    if stream.finish_reason != alone.finish_reason:
        return f"ended by {stream.finish_reason!r}; alone by {alone.finish_reason!r}"
    counts = [(stream.usage.get(name), alone.usage.get(name)) for name in _COUNTED]
    if any(found != right for found, right in counts):
        return f"has the usage {stream.usage}; alone it has {alone.usage}"
    if stream.usage and stream.usage["total_tokens"] != sum(found or 0 for found, _ in counts):
        return f"has a usage that does not add up: {stream.usage}"
    return ""


def goes_wrong(begun: str, alone: Streamed) -> bool:
    """Return True if a text that goes on is no longer what its request gets alone."""
    at = _parted(begun, alone.text[: len(begun)])
    return at is not None and not near_tie(alone, at)


def _around(text: str, at: int) -> str:
    if len(text) <= _MOST:
        return repr(text)
    begin = max(0, at - _MOST // 2)
    shown = text[begin : begin + _MOST]
    return f"{shown!r} (from character {begin} on, of {len(text)})"


def _parted(found: str, right: str) -> int | None:
    """Return the first character in which two texts differ; None if they are the same."""
    if found == right:
        return None
    pairs = enumerate(zip(found, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(found), len(right)))


def near_tie(alone: Streamed, at: int) -> bool:
    """Return True if the token that has a character was nearly another one.

    So it is with the token in front: two tokens may begin with the same characters.
    """
    begins, before = 0, float("inf")
    for token, gap in zip(alone.tokens, alone.gaps, strict=True):
        begins += len(token)
        if begins > at:
            return min(gap, before) < _NEAR
        before = gap
    return before < _NEAR


_ANIMALS = """
ant bee cat dog elk fox gnu hen ibex jay kid lark mole newt owl pig quail rat seal toad urial vole
wren yak zebu ape bat cod doe eel fly goat
"""
_WORDS = _ANIMALS.split()
_FIRST_LONG = 26
"""Tokens from here on stand for several words, so that some texts fill many blocks."""
_WORDS_OF_LONG = 8
_APART = 5
"""In the list of words, those of one token are so far apart."""
_server = lru_cache(maxsize=1)(Server)


def _text(prompt: Sequence[int]) -> str:
    """Write words for each token: texts begin alike as far as their prompts do."""
    words: list[str] = []
    for token in prompt:
        count = 1 if token < _FIRST_LONG else _WORDS_OF_LONG
        words += [_WORDS[(token + at * _APART) % len(_WORDS)] for at in range(count)]
    return " ".join(words)


_END = -1
"""Stands behind the characters of a text that has ended by itself: that may be a near tie too."""


def _characters(text: str, finish_reason: str | None) -> list[int]:
    return [*map(ord, text), *[_END] * (finish_reason == "stop")]


class BrokenPromise(FoundByAdapter):
    """A request got something else than alone."""


class ServedEngine(EngineAdapter):
    """Sends prompts of words; the characters of the texts that come stand for tokens.

    A mix is served twice: first at once, when the server may know none of its prompts, then as it
    was drawn. In between each of its requests is served alone, if it was not before.
    """

    vocabulary = len(_WORDS)
    most_tokens = 24
    sampling = SamplingTraits(greedy_only=True)
    replays = 20
    block_sizes: ClassVar[Sequence[int]] = (1,)
    _right: ClassVar[dict[tuple[Any, ...], Streamed]] = {}

    @classmethod
    def describe(cls, example: RequestMix) -> str:
        lines = [f"the greedy completions of {settings.current().endpoint}, for the prompts"]
        lines += [f"{at}. {cls.describe_request(each)}" for at, each in enumerate(example.requests)]
        return "\n  ".join(lines)

    @classmethod
    def describe_request(cls, spec: RequestSpec) -> str:
        words = f"at step {spec.arrival}: {_text(spec.prompt)!r}"
        words += f", max_tokens {spec.sampling.max_new_tokens}"
        if spec.cancel_after is not None:
            words += f", left {some(spec.cancel_after, 'step')} later"
        return words

    def make(self, mix: RequestMix) -> None:
        endpoint = settings.current().endpoint
        if endpoint is None:
            raise ServerError("which server? --roseinfer-endpoint http://127.0.0.1:8000 names it")
        self.server = _server(endpoint)
        self._news = threading.Condition()
        self._seen = self._arrived = 0
        self._submitted = 0
        self._open: dict[Streamed, tuple[int, Streamed]] = {}
        """The number of each request, and what it gets alone."""
        self._seen_of: dict[Streamed, tuple[str, bool]] = {}
        """The text of each when it was last looked at, and whether it had ended."""
        first = [self._ask(each.prompt, each.sampling) for each in mix.requests]
        for cold in first:
            cold.wait()
        self.server.held()  # until it is idle, for a mix that failed may have left some
        alone = [self._alone(each.prompt, each.sampling) for each in mix.requests]
        self._cold = list(zip(range(len(first)), first, alone, strict=True))

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        stream = self._ask(prompt, sampling)
        self._open[stream] = self._submitted, self._alone(prompt, sampling)
        self._submitted += 1
        return stream

    def step(self) -> None:
        """Wait until some stream brings something, if one is open."""
        self._check()
        silence = settings.current().step_seconds
        with self._news:
            if not self._news.wait_for(self._has_news, silence or None):
                raise BrokenPromise(f"no stream has brought anything for {silence:g} s")
            self._seen = self._arrived
        self._check()

    def _check(self) -> None:
        """Raise if a stream is not what its request gets alone; all of it is shown then."""
        for number, cold, right in self._cold:
            if wrong := broken_promise(cold, right):
                self._fail(f"request {number}, when all came at once, {wrong}")
        self._cold = []
        for stream, (number, right) in self._open.items():
            over, text = stream.over, stream.text
            if not over and goes_wrong(text, right):
                stream.wait()
            if stream.over and (wrong := broken_promise(stream, right)):
                self._fail(f"request {number} {wrong}")

            self._seen_of[stream] = text, over

    def _fail(self, what: str, cause: ServerError | None = None) -> NoReturn:
        """Say what is wrong, unless it is so because the server is gone."""
        self.server.require_there()
        raise BrokenPromise(what) from cause

    def _has_news(self) -> bool:
        return self._arrived > self._seen or all(stream.over for stream in self._open)

    def _ask(self, prompt: Sequence[int], sampling: Sampling) -> Streamed:
        text = _text(prompt)
        silence = settings.current().step_seconds or 600.0
        try:
            return Streamed(self.server, text, sampling.max_new_tokens, silence, self._arrive)
        except ServerGone:
            raise
        except ServerError as error:
            self._fail(f"the prompt {text!r} was refused: {error}", error)

    def _arrive(self) -> None:
        with self._news:
            self._arrived += 1
            self._news.notify_all()

    def _alone(self, prompt: Sequence[int], sampling: Sampling) -> Streamed:
        key = self._key(prompt, sampling)
        if key not in self._right:
            self._right[key] = self._ask(prompt, sampling)
            self._right[key].wait()
        if self._right[key].error:
            self._fail(f"{_text(prompt)!r}, asked for alone, failed: {self._right.pop(key).error}")
        return self._right[key]

    def tokens(self, request: Any) -> list[int]:
        text, over = self._seen_of.get(request, ("", False))
        return _characters(text, request.finish_reason if over else None)

    def spell(self, token: int) -> str:
        return "the end of the text" if token == _END else repr(chr(token))

    def is_finished(self, request: Any) -> bool:
        return self._seen_of.get(request, ("", False))[1]

    def cancel(self, request: Any) -> None:
        self._open.pop(request)
        request.leave()
        self._seen_of[request] = self._seen_of.get(request, ("", False))[0], True

    def find_leaks(self) -> str:
        """Say what the server still holds; what ended behind the last step is checked first."""
        for stream in self._open:
            stream.wait()
        self._check()
        return self.server.held()

    def path_counts(self) -> Mapping[str, int]:
        return {}

    def generate_alone(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        mix: RequestMix,  # noqa: ARG002
    ) -> list[int]:
        right = self._alone(prompt, sampling)
        return _characters(right.text, right.finish_reason)

    def is_near_tie(self, tokens: Sequence[int], sampling: Sampling, mix: RequestMix) -> bool:
        """Return True where the prompt and what came behind it were a near tie alone."""
        prompts = {each.prompt for each in mix.requests}
        own = [prompt for prompt in prompts if tuple(tokens[: len(prompt)]) == prompt]
        known = [(len(p), self._right.get(self._key(p, sampling))) for p in own]
        return any(right and near_tie(right, len(tokens) - length) for length, right in known)

    def _key(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Any, ...]:
        return self.server, tuple(prompt), sampling.max_new_tokens
