"""A toy engine that is right: it draws its tokens from logits, and shows their text as it comes.

Its slow twin draws with the same code, as that of many an engine does.
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
    rest: bytes = b""
    held: str = ""
    over: bool = False


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
        request.over = True

    def step(self) -> None:
        for request in [each for each in self.requests if not each.over][: self.batch]:
            before = [*request.prompt, *request.tokens]
            self.take(request, self.choose(before, request.sampling, len(request.prompt)))

    def take(self, request: DrawnRequest, token: int) -> None:
        before = [*request.prompt, *request.tokens]
        request.tokens.append(token)
        request.logprobs.append(self.logprob(logits_after(before), token, request.sampling))
        text, request.rest = self.certain(request.rest + BYTES[token])
        stopped = self.show(request, text)
        ended = token == END and not request.sampling.ignore_eos
        request.over = stopped or ended or len(request.tokens) == request.sampling.max_new_tokens
        if request.over and not stopped:
            self.flush(request)

    def certain(self, data: bytes) -> tuple[str, bytes]:
        text, used = utf_8_decode(data, "replace", False)
        return text, data[used:]

    def show(self, request: DrawnRequest, text: str) -> bool:
        stops = request.sampling.stop
        for character in text:
            request.held += character
            complete = [len(stop) for stop in stops if self.ends_with(request, stop)]
            if complete:
                request.pieces.append(request.held[: len(request.held) - max(complete)])
                return True
        hold = self.to_hold(request.held, stops)
        request.pieces.append(request.held[: len(request.held) - hold])
        request.held = request.held[len(request.held) - hold :]
        return False

    def ends_with(self, request: DrawnRequest, stop: str) -> bool:
        return request.held.endswith(stop)

    def to_hold(self, held: str, stops: Sequence[str]) -> int:
        begun = (n for n in range(len(held), 0, -1) if any(s.startswith(held[-n:]) for s in stops))
        return next(begun, 0)

    def flush(self, request: DrawnRequest) -> None:
        request.pieces.append(request.held + request.rest.decode(errors="replace"))

    def choose(self, tokens: Sequence[int], sampling: Any, prompted: int) -> int:
        logits = logits_after(tokens)
        penalty, temperature = sampling.repetition_penalty, sampling.temperature
        for token in {*tokens}:
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        text = self.penalised(tokens, prompted)
        for token in {*text}:
            logits[token] -= sampling.presence_penalty
            logits[token] -= text.count(token) * sampling.frequency_penalty
        logits = self.adjusted(logits, sampling)
        if not temperature:
            return logits.index(max(logits))
        weights = {at: exp((each - max(logits)) / temperature) for at, each in enumerate(logits)}
        kept = self.kept(weights, sampling)
        (drawn,) = Random(sampling.seed * 99 + len(tokens)).choices(
            kept, [weights[token] for token in kept]
        )
        return drawn

    def penalised(self, tokens: Sequence[int], prompted: int) -> list[int]:
        return [*tokens[prompted:]]

    def adjusted(self, logits: list[float], sampling: Any) -> list[float]:  # noqa: ARG002
        return logits

    def kept(self, weights: dict[int, float], sampling: Any) -> list[int]:
        order = sorted(weights, key=lambda token: -weights[token])
        order = order[: self.top_k(sampling) or None]
        total, above, kept = sum(weights[token] for token in order), 0.0, []
        for token in order:
            if above < sampling.top_p * total:
                kept.append(token)
            above += weights[token]
        return [token for token in kept if weights[token] >= sampling.min_p]

    def top_k(self, sampling: Any) -> int:
        return int(sampling.top_k)

    def logprob(self, logits: Sequence[float], token: int, sampling: Any) -> float:  # noqa: ARG002
        return logits[token] - log(sum(map(exp, logits)))

    def tokens(self, request: DrawnRequest) -> list[int]:
        return list(request.tokens)

    def is_finished(self, request: DrawnRequest) -> bool:
        return request.over

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
        found: list[int] = []
        while len(found) < sampling.max_new_tokens:
            found.append(self.choose([*prompt, *found], sampling, len(prompt)))
            if found[-1] == END and not sampling.ignore_eos:
                break
        return found

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
        told = [(token, self.logprob(logits, token, sampling)) for token in order]
        return told[: sampling.top_logprobs]

    def prompt_logprobs(self, request: DrawnRequest) -> list[float | None]:
        prompt = request.prompt
        told = (
            self.logprob(logits_after(prompt[:at]), prompt[at], request.sampling)
            for at in range(1, len(prompt))
        )
        return [None, *told]

    def pieces(self, request: DrawnRequest) -> list[str]:
        return request.pieces

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(BYTES[token] for token in tokens).decode(errors="replace")


class IgnoresTopK(DrawingEngine):
    def top_k(self, sampling: Any) -> int:
        return 2 * int(sampling.top_k)


class TakesMinPOfAll(DrawingEngine):
    def penalised(self, tokens: Sequence[int], prompted: int) -> list[int]:
        return [*tokens[prompted:]]

    def kept(self, weights: dict[int, float], sampling: Any) -> list[int]:
        return super().kept({token: weight**0.2 for token, weight in weights.items()}, sampling)


class TellsLogprobsOfItsDraws(DrawingEngine):
    def logprob(self, logits: Sequence[float], token: int, sampling: Any) -> float:
        heat = sampling.temperature or 1.0
        return super().logprob([each / heat for each in logits], token, sampling)


class CountsThePrompt(DrawingEngine):
    def penalised(self, tokens: Sequence[int], prompted: int) -> list[int]:  # noqa: ARG002
        return [*tokens]


class TellsOneOfTheLikeliestTwice(DrawingEngine):
    def top(self, before: list[int], sampling: Any) -> list[tuple[int, float]]:
        told = super().top(before, sampling)
        return [*told[:1], *told[:-1]]


class LeavesTheSecondLikeliestOut(DrawingEngine):
    def top(self, before: list[int], sampling: Any) -> list[tuple[int, float]]:
        asked = sampling.top_logprobs
        told = super().top(before, Sampling(top_logprobs=asked + 1))
        return [*told[:1], *told[2 : asked + 1]] if asked < len(BYTES) else told


class TellsOfTheLikeliestInItsDraws(DrawingEngine):
    def top(self, before: list[int], sampling: Any) -> list[tuple[int, float]]:
        shifted = 0.1 * (sampling.temperature > 0)
        return [(token, value - shifted) for token, value in super().top(before, sampling)]


class TellsOfPromptsATokenLate(DrawingEngine):
    def prompt_logprobs(self, request: DrawnRequest) -> list[float | None]:
        told = super().prompt_logprobs(request)
        return [*told[:1], *told[2:], *told[1:2]]


class LosesWhatItHeldBack(DrawingEngine):
    def flush(self, request: DrawnRequest) -> None:
        request.pieces.append(request.rest.decode(errors="replace"))


class ShowsHowAStopStringBegins(DrawingEngine):
    def to_hold(self, held: str, stops: Sequence[str]) -> int:
        return max(0, super().to_hold(held, stops) - 1)


class ShowsPartsOfCharacters(DrawingEngine):
    def certain(self, data: bytes) -> tuple[str, bytes]:
        return data.decode(errors="replace"), b""


class GoesOnBehindItsStopString(DrawingEngine):
    """Unless the string is a single character."""

    def ends_with(self, request: DrawnRequest, stop: str) -> bool:
        return len(stop) == 1 and super().ends_with(request, stop)


class TakesTextBack(DrawingEngine):
    def flush(self, request: DrawnRequest) -> None:
        super().flush(request)
        shown = "".join(request.pieces)
        request.pieces[:] = [shown[:1], shown[1:]]
