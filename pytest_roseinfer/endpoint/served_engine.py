"""Engine adapter for a server that is reached over HTTP, and the checks of its streams."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, takewhile
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.endpoint.server import (
    CHOICES,
    Choice,
    CompletionStream,
    Server,
    ServerError,
    ServerGone,
)
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixCondition,
    MixObserver,
    mix_conditions,
)
from pytest_roseinfer.engine_capabilities.sampling import SamplingTraits
from pytest_roseinfer.run.watchdog import AdapterFinding
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pytest_roseinfer.adapters.engine import RequestMix, RequestSpec, Sampling
    from pytest_roseinfer.engine_capabilities.capability import EngineRun, ServedRequest

# Comparison of a stream with the reference: the completion of the same request alone.


_ROUNDING = 0.5
"""Difference of two logprobs that rounding may change by another batch.

In bfloat16 logits from 16 to 32 are multiples of 0.125, and one led another by at least two of them
in one batch and not in the next (SmolLM2; in float32 by 0.06).
"""
_INCOMPLETE_CHARACTER = "\ufffd"
_MOST = 400
"""Maximum characters of a text in a message; a longer one is cut around the difference."""


def find_mismatch(stream: CompletionStream, *alone: CompletionStream) -> str:
    """Describe the mismatch of a stream that has ended; "" for an expected one.

    Each choice of a prompt is compared with the stream of this prompt alone. Its usage must count
    each prompt once, and the tokens of all choices.
    """
    if stream.error:
        text = stream.choices[-1].text
        return f"failed: {stream.error}, after {_around(text, len(text))}"
    alone_of_choices = [each for each in alone for _ in range(len(stream.choices) // len(alone))]
    expected = [each.choices[0] for each in alone_of_choices]
    for number, (choice, right) in enumerate(zip(stream.choices, expected, strict=True)):
        if mismatch := _choice_mismatch(choice, right):
            return f"choice {number} {mismatch}" if len(expected) > 1 else mismatch
    pairs = zip(stream.choices, expected, strict=True)
    if any(choice.text != right.text for choice, right in pairs):
        return ""  # a near tie, after which counts may differ too
    counted = {"prompt_tokens": alone, "completion_tokens": alone_of_choices}
    counts = [(_count(name, [stream]), _count(name, each)) for name, each in counted.items()]
    if any(actual != right for actual, right in counts):
        usages = ", ".join(str(each.usage) for each in alone)
        of_choices = f" with {len(expected)} choices" if len(expected) > len(alone) else ""
        return f"has the usage {stream.usage}{of_choices}; alone it has {usages}"
    if stream.usage and stream.usage["total_tokens"] != sum(actual or 0 for actual, _ in counts):
        return f"has a usage that does not add up: {stream.usage}"
    return ""


def _count(name: str, streams: Sequence[CompletionStream]) -> int | None:
    """Return a token count of streams together; None if one of them has none."""
    counts: list[Any] = [each.usage.get(name) for each in streams]
    return None if None in counts else sum(counts)


def _choice_mismatch(actual: Choice, expected: Choice) -> str:
    """Describe how a text differs from that of its prompt alone; "" if equal, or a near tie."""
    at = _first_difference(actual.text, expected.text)
    if at is not None:
        if near_tie(expected, at):
            return ""
        actual_text, right = _around(actual.text, at), _around(expected.text, at)
        difference = f"differs at character {at} from what it gets alone"
        lead = f", which led by {gap:.3g} there" if (gap := _lead(expected, at)) < inf else ""
        return f"{difference}: got {actual_text}; alone it gets {right}{lead}"
    if actual.finish_reason != expected.finish_reason:
        return f"ended by {actual.finish_reason!r}; alone by {expected.finish_reason!r}"
    if actual.tokens and actual.tokens != expected.tokens:
        pairs = zip(actual.tokens, expected.tokens, strict=False)
        equal = [*takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if not near_tie(expected, sum(len(token) for token, _ in equal)):
            return f"has logprobs of the tokens {actual.tokens}; alone of {expected.tokens}"
        return ""
    return _logprobs_mismatch(actual, expected)


def _logprobs_mismatch(actual: Choice, expected: Choice) -> str:
    """Describe logprobs that differ from those alone; "" if rounding explains all differences."""
    pairs = zip(actual.tokens, actual.logprobs, expected.logprobs, strict=False)
    for at, (token, here, alone) in enumerate(pairs):
        if here and alone and (_differ(here, alone) or _differ(alone, here)):
            return f"has the logprobs {here} at token {at}, {token!r}; alone {alone}"
    return ""


def _differ(shown: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Return True if a logprob is not that of ``others``, which have their highest ones."""
    lowest = min(others.values())
    return any(
        abs(logprob - others[token]) > _ROUNDING
        if token in others
        else logprob > lowest + _ROUNDING
        for token, logprob in shown.items()
    )


def equal_parts(stream: CompletionStream, alone: CompletionStream) -> tuple[str, Choice]:
    """Return the text of a stream and that of its request alone, as far as they must be equal.

    A lasting text is longer, and completes a last character that the other may have in part.
    """
    right = alone.choices[0]
    if not stream.lasting:
        return stream.text, right
    right = replace(right, text=right.text.rstrip(_INCOMPLETE_CHARACTER))
    return stream.text[: len(right.text)], right


def _mismatch_at_end(stream: CompletionStream, alone: CompletionStream) -> str:
    """Describe the mismatch of a stream that has ended."""
    if not stream.lasting or stream.error:
        return find_mismatch(stream, alone)
    text, right = equal_parts(stream, alone)
    return _choice_mismatch(replace(right, text=text), right)


def remove_echoes(stream: CompletionStream) -> str:
    """Remove each prompt from the start of its text; describe a text that begins otherwise.

    The logprobs go too: an echoed token need not be spelled as in the prompt.
    """
    for number, (choice, prompt) in enumerate(zip(stream.choices, stream.prompts, strict=True)):
        begin, choice.text = choice.text[: len(prompt)], choice.text[len(prompt) :]
        choice.tokens, choice.logprobs = [], []
        if begin != prompt:
            return f"choice {number} echoes {begin!r}; its prompt is {prompt!r}"
    return ""


def diverges(partial_text: str, expected: Choice) -> bool:
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


def near_tie(expected: Choice, at: int) -> bool:
    """Return True if rounding may have decided on a character's token or on the one before it."""
    return _lead(expected, at) < _ROUNDING


def _lead(expected: Choice, at: int) -> float:
    """Return the gap of the top two logprobs at a character; infinite without logprobs.

    The token before counts too: two tokens may start with the same characters.
    """
    begins, before = 0, inf
    for token, gap in zip(expected.tokens, expected.top2_gaps, strict=True):
        begins += len(token)
        if begins > at:
            return min(gap, before)
        before = gap
    return before


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


_MOST_PROMPTS = 8
"""Most prompts of one HTTP request."""
_PROBE_DIVISOR = 8
"""A long text has this many times the tokens of the probe: a text that is served after a client
left. Each step of a server gives both a token, so the long one has not ended with the probes."""
_PROBES = 4
"""Number of probes. A server must have dropped a text that was left when the last one begins: on a
busy machine it may notice late. The first probe only gives it time."""
_EARLY_LEAVES = (0.0, 0.01)
"""Seconds after which clients leave without having read anything."""


_SERVED_FROM_CACHE = "prompt_served_from_cache"


def _looks_up_prompts(_: type[Any]) -> bool:
    endpoint = settings.current().endpoint
    with suppress(ServerError):
        return endpoint is not None and _server(endpoint).looks_up_prompts
    return False


class _ServedCacheMethods:
    """Mixin without methods, for what a server's metrics show of its prefix cache."""


class _ServedFromCache(MixObserver):
    """Counter of the prompt tokens that the server found in its prefix cache during a mix."""

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._ended: set[int] = set()
        """Numbers of the requests that have ended; each reads the metrics once."""

    def judge(self, served: ServedRequest) -> str:
        if served.finished and served.number not in self._ended:
            self._ended.add(served.number)
            adapter = self.run.adapter
            found = adapter.server.count_cached_tokens() - adapter.cached_before
            self.counts[_SERVED_FROM_CACHE] = found
        return ""


_SERVED_CACHE = EngineCapability(
    methods=_ServedCacheMethods,
    observers=(_ServedFromCache,),
    conditions=(
        MixCondition(
            _SERVED_FROM_CACHE,
            "The server found tokens of a prompt in its prefix cache, by its metrics.",
            _looks_up_prompts,
            conclusive_examples=20,
        ),
    ),
)


class ServedEngine(_ServedCacheMethods, EngineAdapter):
    """Adapter of a server: prompts are words, and characters of completions stand for tokens.

    A mix is served twice. First all requests are sent at once, while the server may have none of
    their prompts cached. Several of the prompts are then also sent in one HTTP request, and one
    prompt with several choices. Then each request that has no reference yet is served alone, and at
    last all are served as drawn. A request that will be left asks for a long text, so that the
    server cannot have ended it by itself.
    """

    vocabulary = len(_WORDS)
    max_tokens = 24
    sampling = SamplingTraits(greedy_only=True)
    replays = 20
    # Characters stand for tokens, so that nobody knows which of them was the first one.
    unreachable: ClassVar[Collection[str]] = tuple(mix_conditions(EngineAdapter))
    block_sizes: ClassVar[Sequence[int]] = (1,)
    _reference_streams: ClassVar[dict[tuple[Any, ...], CompletionStream]] = {}
    _streams: ClassVar[list[CompletionStream]] = []
    """All streams since the latest mix began: a mix that failed may have left some open."""

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
        while self._streams:
            if not (stream := self._streams.pop()).has_ended:
                stream.disconnect()
        self.cached_before = self.server.count_cached_tokens()
        """Tokens that the server had found in its prefix cache before this mix."""
        self._news = threading.Condition()
        self._num_seen = self._num_arrived = 0
        numbers = range(mix.size)
        self._to_submit = iter(sorted(numbers, key=lambda number: mix.requests[number].arrival))
        self._specs = mix.requests
        self._open: dict[CompletionStream, tuple[int, CompletionStream]] = {}
        """Open streams, each with its request's number and its reference."""
        self._left: dict[CompletionStream, int] = {}
        """Streams of long texts that were left before their end, with their requests' numbers."""
        self._seen_of: dict[CompletionStream, tuple[list[int], bool]] = {}
        """Tokens of each stream at the last check, and True if it had ended."""
        streams = [
            ([number], self._send_request([each.prompt], each.sampling))
            for number, each in enumerate(mix.requests)
        ]
        together = self._numbers_of_one_request()
        if together:
            prompts = [mix.requests[number].prompt for number in together]
            sampling = mix.requests[together[0]].sampling
            streams.append((together, self._send_request(prompts, sampling)))
        if self.server.dialect.several_choices:
            first = mix.requests[0]
            stream = self._send_request([first.prompt], first.sampling, choices=CHOICES)
            streams.append(([0], stream))
        for _, cold in streams:
            cold.wait()
        self.server.describe_leaks()  # waits until idle: the server may still drop requests
        alone = [self._reference_stream(each.prompt, each.sampling) for each in mix.requests]
        self._cold = [(sent, cold, [alone[number] for number in sent]) for sent, cold in streams]

    def _numbers_of_one_request(self) -> list[int]:
        """Return the requests whose prompts also go into one HTTP request; empty if none do."""
        if not self.server.dialect.several_prompts:
            return []

        def max_tokens(number: int) -> int:
            return self._specs[number].sampling.max_new_tokens

        by_tokens = groupby(sorted(range(len(self._specs)), key=max_tokens), max_tokens)
        largest = max((list(group) for _, group in by_tokens), key=len)[:_MOST_PROMPTS]
        return largest if len(largest) > 1 else []

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Any:
        number = next(self._to_submit)
        is_left = self._specs[number].cancel_after is not None
        stream = self._send_request([prompt], sampling, lasting=is_left)
        self._open[stream] = number, self._reference_stream(prompt, sampling)
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
        for numbers, cold, alone in self._cold:
            mismatch = ""
            if len(numbers) > 1 and self.server.dialect.echo and not cold.error:
                mismatch = remove_echoes(cold)
            if mismatch := mismatch or find_mismatch(cold, *alone):
                requests = f"request{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
                once = (
                    "in one HTTP request" if len(cold.choices) > 1 else "when all arrived at once"
                )
                self._fail(f"{requests}, {once}, {mismatch}")
        self._cold = []
        for stream, (number, reference) in self._open.items():
            has_ended, (text, right) = stream.has_ended, equal_parts(stream, reference)
            if not has_ended and diverges(text, right):
                stream.wait()
            if stream.has_ended and (mismatch := _mismatch_at_end(stream, reference)):
                self._fail(f"request {number} {mismatch}")
            reason = stream.finish_reason if has_ended else None
            if stream.lasting and text == right.text:
                reason = right.finish_reason
            self._seen_of[stream] = _characters(text, reason), has_ended

    def _fail(self, summary: str, cause: ServerError | None = None) -> NoReturn:
        """Raise the mismatch, or ``ServerGone`` if the server has stopped."""
        self.server.require_reachable()
        raise CompletionMismatch(summary) from cause

    def _fail_if_served_on(self) -> None:
        """Raise if the server goes on with a text that was left, later or before its first token.

        The second is tried here: a server may send no headers before a token, so that a stream of a
        mix is not open until then.
        """
        if not (self._left and self.server.shows_usage):
            return
        numbers = ", ".join(map(str, self._left.values()))
        self._fail_if_requests_are_held(f"request {numbers} was left")
        prompt = _text(self._specs[next(iter(self._left.values()))].prompt)
        for seconds in _EARLY_LEAVES:
            self.server.leave_early(prompt, seconds)
        self._fail_if_requests_are_held(f"{prompt!r} was left before its first token")

    def _fail_if_requests_are_held(self, event: str) -> None:
        """Raise if the server goes on with a request while it makes several texts of others.

        The metrics are read at the first token of such a text, when it is being served for certain:
        at its end a server may count it or not.
        """
        tokens = self.server.dialect.long_tokens // _PROBE_DIVISOR
        for before in range(_PROBES):
            probe = self._send([_text([0])], tokens, lasting=True)
            with self._news:
                while not (probe.text or probe.has_ended):
                    self._news.wait()
            held = self.server.describe_requests(expected=1)
            probe.wait()
            if before and not held:
                return
        self._fail(
            f"{event}, and the server goes on with it: after {before * tokens} tokens of other "
            f"texts it serves {held} where one request is expected"
        )

    def _has_news(self) -> bool:
        return self._num_arrived > self._num_seen or all(stream.has_ended for stream in self._open)

    def _send_request(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        choices: int = 1,
        lasting: bool = False,
    ) -> CompletionStream:
        """Open a stream; one that is ``lasting`` has a long text if the server makes any."""
        long_tokens = self.server.dialect.long_tokens if lasting else 0
        max_tokens = long_tokens or sampling.max_new_tokens
        texts = [*map(_text, prompts)]
        return self._send(texts, max_tokens, choices=choices, lasting=long_tokens > 0)

    def _send(
        self, texts: Sequence[str], max_tokens: int, *, choices: int = 1, lasting: bool
    ) -> CompletionStream:
        silence = settings.current().step_seconds or 600.0
        try:
            stream = CompletionStream(
                self.server,
                texts,
                max_tokens,
                silence,
                self._arrive,
                choices=choices,
                lasting=lasting,
            )
            self._streams.append(stream)
            return stream
        except ServerGone:
            raise
        except ServerError as error:
            prompts = ", ".join(map(repr, texts))
            subject = (
                f"the prompts {prompts} were" if len(texts) > 1 else f"the prompt {prompts} was"
            )
            self._fail(f"{subject} refused: {error}", error)

    def _arrive(self) -> None:
        with self._news:
            self._num_arrived += 1
            self._news.notify_all()

    def _reference_stream(self, prompt: Sequence[int], sampling: Sampling) -> CompletionStream:
        key = self._key(prompt, sampling)
        if key not in self._reference_streams:
            self._reference_streams[key] = self._send_request([prompt], sampling)
            self._reference_streams[key].wait()
        if self._reference_streams[key].error:
            self._fail(
                f"{_text(prompt)!r}, requested alone, failed: "
                f"{self._reference_streams.pop(key).error}"
            )
        return self._reference_streams[key]

    def tokens(self, request: Any) -> list[int]:
        return self._seen_of.get(request, ([], False))[0]

    def spell(self, token: int) -> str:
        return "the end of the text" if token == _END else repr(chr(token))

    def is_finished(self, request: Any) -> bool:
        return self._seen_of.get(request, ([], False))[1]

    def cancel(self, request: Any) -> None:
        number, _ = self._open.pop(request)
        if request.lasting and not request.has_ended:
            self._left[request] = number
        request.disconnect()
        self._seen_of[request] = self.tokens(request), True

    def find_leaks(self) -> str:
        """Describe the server's leaks, after checking the streams that have ended since."""
        for stream in self._open:
            stream.wait()
        self._check()
        self._fail_if_served_on()
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
            stream and near_tie(stream.choices[0], len(tokens) - length)
            for length, stream in candidates
        )

    def _key(self, prompt: Sequence[int], sampling: Sampling) -> tuple[Any, ...]:
        return self.server, tuple(prompt), sampling.max_new_tokens
