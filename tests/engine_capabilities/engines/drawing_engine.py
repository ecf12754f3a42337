"""A right toy engine that draws its tokens from logits, and streams their text.

Its slow twin draws with the same code, as in many engines.
"""

from __future__ import annotations

from codecs import utf_8_decode
from dataclasses import dataclass, field
from math import exp, log
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

from pytest_roseinfer import EngineAdapter, Sampling, SamplingTraits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import RequestMix

BYTES = (b"a", b"b", b"ab", b"\xc3", b"\xa9", b"c", b" ", b"")
END = 7


def logits_after(tokens: Sequence[int]) -> list[float]:
    rng = Random(crc32(bytes(tokens)))
    return [rng.gauss(0.0, 2.0) for _ in BYTES]


@dataclass(eq=False)
class DrawnRequest:
    prompt: list[int]
    sampling: Any
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    rest_bytes: bytes = b""
    pending: str = ""
    ended: bool = False


class DrawingEngine(EngineAdapter):
    vocabulary = len(BYTES)
    sampling: ClassVar[SamplingTraits] = SamplingTraits(min_p=True, presence_and_frequency=True)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"batch": (4, 1)}

    def make(self, mix: RequestMix) -> None:
        self.batch = mix.options["batch"]
        self.requests: list[DrawnRequest] = []

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> DrawnRequest:
        self.requests.append(DrawnRequest(list(prompt), sampling))
        return self.requests[-1]

    def cancel(self, request: DrawnRequest) -> None:
        request.ended = True

    def step(self) -> None:
        for request in [each for each in self.requests if not each.ended][: self.batch]:
            before = [*request.prompt, *request.tokens]
            self.take(request, self.choose(before, request.sampling, len(request.prompt)))

    def take(self, request: DrawnRequest, token: int) -> None:
        before = [*request.prompt, *request.tokens]
        request.tokens.append(token)
        request.logprobs.append(self.logprob(logits_after(before), token, request.sampling))
        text, request.rest_bytes = self.decode_complete(request.rest_bytes + BYTES[token])
        at_stop_string = self.stream(request, text)
        at_end_token = token == END and not request.sampling.ignore_eos
        request.ended = (
            at_stop_string or at_end_token or len(request.tokens) == request.sampling.max_new_tokens
        )
        if request.ended and not at_stop_string:
            self.flush(request)

    def decode_complete(self, data: bytes) -> tuple[str, bytes]:
        text, used = utf_8_decode(data, "replace", False)
        return text, data[used:]

    def stream(self, request: DrawnRequest, text: str) -> bool:
        stops = request.sampling.stop
        for character in text:
            request.pending += character
            complete = [len(stop) for stop in stops if self.ends_with(request, stop)]
            if complete:
                request.pieces.append(request.pending[: len(request.pending) - max(complete)])
                return True
        hold = self.length_to_hold(request.pending, stops)
        request.pieces.append(request.pending[: len(request.pending) - hold])
        request.pending = request.pending[len(request.pending) - hold :]
        return False

    def ends_with(self, request: DrawnRequest, stop: str) -> bool:
        return request.pending.endswith(stop)

    def length_to_hold(self, pending: str, stops: Sequence[str]) -> int:
        lengths = (
            n for n in range(len(pending), 0, -1) if any(s.startswith(pending[-n:]) for s in stops)
        )
        return next(lengths, 0)

    def flush(self, request: DrawnRequest) -> None:
        request.pieces.append(request.pending + request.rest_bytes.decode(errors="replace"))

    def choose(self, tokens: Sequence[int], sampling: Any, prompt_length: int) -> int:
        logits = logits_after(tokens)
        penalty, temperature = sampling.repetition_penalty, sampling.temperature
        for token in {*tokens}:
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        penalised_tokens = self.penalised(tokens, prompt_length)
        for token in {*penalised_tokens}:
            logits[token] -= sampling.presence_penalty
            logits[token] -= penalised_tokens.count(token) * sampling.frequency_penalty
        logits = self.adjust(logits, sampling)
        if not temperature:
            return logits.index(max(logits))
        weights = {at: exp((each - max(logits)) / temperature) for at, each in enumerate(logits)}
        candidates = self.nucleus(weights, sampling)
        (token_drawn,) = Random(sampling.seed * 99 + len(tokens)).choices(
            candidates, [weights[token] for token in candidates]
        )
        return token_drawn

    def penalised(self, tokens: Sequence[int], prompt_length: int) -> list[int]:
        return [*tokens[prompt_length:]]

    def adjust(self, logits: list[float], sampling: Any) -> list[float]:  # noqa: ARG002
        return logits

    def nucleus(self, weights: dict[int, float], sampling: Any) -> list[int]:
        order = sorted(weights, key=lambda token: -weights[token])
        order = order[: self.top_k(sampling) or None]
        total, above, nucleus_tokens = sum(weights[token] for token in order), 0.0, []
        for token in order:
            if above < sampling.top_p * total:
                nucleus_tokens.append(token)
            above += weights[token]
        return [token for token in nucleus_tokens if weights[token] >= sampling.min_p]

    def top_k(self, sampling: Any) -> int:
        return int(sampling.top_k)

    def logprob(self, logits: Sequence[float], token: int, sampling: Any) -> float:  # noqa: ARG002
        return logits[token] - log(sum(map(exp, logits)))

    def tokens(self, request: DrawnRequest) -> list[int]:
        return list(request.tokens)

    def is_finished(self, request: DrawnRequest) -> bool:
        return request.ended

    def find_leaks(self) -> str:
        return ""

    def path_counts(self) -> Mapping[str, int]:
        return {}

    def generate_alone(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        mix: RequestMix,  # noqa: ARG002
    ) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < sampling.max_new_tokens:
            tokens.append(self.choose([*prompt, *tokens], sampling, len(prompt)))
            if tokens[-1] == END and not sampling.ignore_eos:
                break
        return tokens

    def logits(self, tokens: Sequence[int], mix: RequestMix) -> list[float]:  # noqa: ARG002
        return logits_after(tokens)

    def logprobs(self, request: DrawnRequest) -> list[float]:
        return request.logprobs

    def top_logprobs(self, request: DrawnRequest) -> list[list[tuple[int, float]]]:
        text = [*request.prompt, *request.tokens]
        ends = range(len(request.prompt), len(text))
        return [self.top(text[:end], request.sampling) for end in ends]

    def top(self, before: list[int], sampling: Any) -> list[tuple[int, float]]:
        logits = logits_after(before)
        order = sorted(range(len(logits)), key=lambda token: -logits[token])
        logprobs = [(token, self.logprob(logits, token, sampling)) for token in order]
        return logprobs[: sampling.top_logprobs]

    def prompt_logprobs(self, request: DrawnRequest) -> list[float | None]:
        prompt = request.prompt
        logprobs = (
            self.logprob(logits_after(prompt[:at]), prompt[at], request.sampling)
            for at in range(1, len(prompt))
        )
        return [None, *logprobs]

    def pieces(self, request: DrawnRequest) -> list[str]:
        return request.pieces

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(BYTES[token] for token in tokens).decode(errors="replace")


class IgnoresTopK(DrawingEngine):
    def top_k(self, sampling: Any) -> int:
        return 2 * int(sampling.top_k)


class AppliesMinPWithoutTemperature(DrawingEngine):
    def penalised(self, tokens: Sequence[int], prompt_length: int) -> list[int]:
        return [*tokens[prompt_length:]]

    def nucleus(self, weights: dict[int, float], sampling: Any) -> list[int]:
        return super().nucleus({token: weight**0.2 for token, weight in weights.items()}, sampling)


class ReturnsLogprobsOfScaledLogits(DrawingEngine):
    def logprob(self, logits: Sequence[float], token: int, sampling: Any) -> float:
        temperature = sampling.temperature or 1.0
        return super().logprob([each / temperature for each in logits], token, sampling)


class CountsThePrompt(DrawingEngine):
    def penalised(self, tokens: Sequence[int], prompt_length: int) -> list[int]:  # noqa: ARG002
        return [*tokens]


class RepeatsATopToken(DrawingEngine):
    def top(self, before: list[int], sampling: Any) -> list[tuple[int, float]]:
        logprobs = super().top(before, sampling)
        return [*logprobs[:1], *logprobs[:-1]]


class OmitsTheSecondTopToken(DrawingEngine):
    def top(self, before: list[int], sampling: Any) -> list[tuple[int, float]]:
        num_top = sampling.top_logprobs
        logprobs = super().top(before, Sampling(top_logprobs=num_top + 1))
        return [*logprobs[:1], *logprobs[2 : num_top + 1]] if num_top < len(BYTES) else logprobs


class ShiftsTopLogprobsOfDraws(DrawingEngine):
    def top(self, before: list[int], sampling: Any) -> list[tuple[int, float]]:
        shifted = 0.1 * (sampling.temperature > 0)
        return [(token, value - shifted) for token, value in super().top(before, sampling)]


class ShiftsPromptLogprobsByAToken(DrawingEngine):
    def prompt_logprobs(self, request: DrawnRequest) -> list[float | None]:
        logprobs = super().prompt_logprobs(request)
        return [*logprobs[:1], *logprobs[2:], *logprobs[1:2]]


class LosesPendingText(DrawingEngine):
    def flush(self, request: DrawnRequest) -> None:
        request.pieces.append(request.rest_bytes.decode(errors="replace"))


class StreamsTheStartOfAStopString(DrawingEngine):
    def length_to_hold(self, pending: str, stops: Sequence[str]) -> int:
        return max(0, super().length_to_hold(pending, stops) - 1)


class StreamsPartsOfCharacters(DrawingEngine):
    def decode_complete(self, data: bytes) -> tuple[str, bytes]:
        return data.decode(errors="replace"), b""


class IgnoresLongStopStrings(DrawingEngine):
    """Ends at stop strings of one character only."""

    def ends_with(self, request: DrawnRequest, stop: str) -> bool:
        return len(stop) == 1 and super().ends_with(request, stop)


class ReplacesStreamedText(DrawingEngine):
    def flush(self, request: DrawnRequest) -> None:
        super().flush(request)
        text = "".join(request.pieces)
        request.pieces[:] = [text[:1], text[1:]]
