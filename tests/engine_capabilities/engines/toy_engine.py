"""A right toy engine, whose model is a checksum of the whole text and whose cache stores checksums.

It serves some requests in a step, admits those that fit its room, caches the prefixes of
prompts and counts its paths.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

from pytest_roseinfer import EngineAdapter, FastPath

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import RequestMix, Sampling

VOCABULARY = 32
END = 5


@dataclass(eq=False)
class ToyRequest:
    prompt: tuple[int, ...]
    sampling: Sampling
    draws: Random
    checksum: int = 0
    """Checksum of the tokens read so far."""
    tokens: list[int] = field(default_factory=list)
    has_prefix: bool = False
    ended: bool = False

    @property
    def max_tokens(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens


def choose(checksum: int, sampling: Sampling, draws: Random) -> int:
    random_bits = draws.getrandbits(5) if sampling.temperature else 0
    return (checksum ^ random_bits) % VOCABULARY


class ToyEngine:
    def __init__(self, *, room: int, batch_size: int, prefixes: bool) -> None:
        self.room = room
        self.batch_size = batch_size
        self.prefixes: dict[tuple[int, ...], int] | None = {} if prefixes else None
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self.leases = 0
        """Leases of prefixes, by requests that began with one."""
        self.counts: Counter[str] = Counter()

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> ToyRequest:
        request = ToyRequest(tuple(prompt), sampling, self.draws_of(sampling))
        self.waiting.append(request)
        return request

    def draws_of(self, sampling: Sampling) -> Random:
        return Random(sampling.seed)

    def cancel(self, request: ToyRequest) -> None:
        if not request.ended:
            self.end(request)

    def end(self, request: ToyRequest) -> None:
        request.ended = True
        queue = self.running if request in self.running else self.waiting
        queue.remove(request)
        self.leases -= request.has_prefix

    def step(self) -> None:
        while self.waiting and self.fits(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
            self.read_prompt(self.running[-1])
        self.counts["crowded"] += bool(self.waiting)
        batch = self.running[: self.batch_size]
        if batch:
            self.counts["together" if len(batch) > 1 else "by itself"] += 1
        for request, token in zip(batch, self.choose(batch), strict=True):
            self.take(request, token)
        # Requests of this batch are last in the next step.
        self.running = self.running[len(batch) :] + [each for each in batch if not each.ended]

    def fits(self, request: ToyRequest) -> bool:
        return self.needs(request) <= self.room

    def needs(self, request: ToyRequest) -> int:
        return sum(each.max_tokens for each in self.running) + request.max_tokens

    def read_prompt(self, request: ToyRequest) -> None:
        prefix = self.cached_prefix(request.prompt)
        request.has_prefix = bool(prefix)
        self.leases += request.has_prefix
        self.counts["from a prefix" if prefix else "from the start"] += 1
        request.checksum = 0 if self.prefixes is None else self.prefixes.get(prefix, 0)
        for at in range(len(prefix), len(request.prompt)):
            request.checksum = crc32(bytes([request.prompt[at]]), request.checksum)
            if self.prefixes is not None:
                self.prefixes[request.prompt[: at + 1]] = request.checksum

    def cached_prefix(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        prefixes = (prompt[:stop] for stop in range(len(prompt), 0, -1))
        return next((prefix for prefix in prefixes if prefix in (self.prefixes or ())), ())

    def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
        return [choose(each.checksum, each.sampling, each.draws) for each in batch]

    def take(self, request: ToyRequest, token: int) -> None:
        request.tokens.append(token)
        request.checksum = crc32(bytes([token]), request.checksum)
        if len(request.tokens) == self.limit(request) or (
            token == END and not request.sampling.ignore_eos
        ):
            # The request stays in the running list until the step ends.
            request.ended = True
            self.leases -= request.has_prefix

    def limit(self, request: ToyRequest) -> int:
        return request.sampling.max_new_tokens


class ToyAdapter(EngineAdapter):
    engine_type: ClassVar[type[ToyEngine]] = ToyEngine
    vocabulary = VOCABULARY
    paths: ClassVar[Mapping[str, FastPath]] = {
        "together": FastPath(equals="by itself"),
        "from a prefix": FastPath(equals="from the start", runs_with=[{"prefixes": True}]),
    }
    conditions: ClassVar[Sequence[str]] = ("crowded",)
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        "batch_size": (2, 1, 3),
        "prefixes": (False, True),
    }

    def make(self, mix: RequestMix) -> None:
        self.engine = self.engine_type(room=mix.cache_tokens, **mix.options)

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> ToyRequest:
        return self.engine.submit(prompt, sampling)

    def cancel(self, request: ToyRequest) -> None:
        self.engine.cancel(request)

    def step(self) -> None:
        self.engine.step()

    def tokens(self, request: ToyRequest) -> list[int]:
        return request.tokens

    def is_finished(self, request: ToyRequest) -> bool:
        return request.ended

    def find_leaks(self) -> str:
        return f"{self.engine.leases} leases" if self.engine.leases else ""

    def path_counts(self) -> Mapping[str, int]:
        return self.engine.counts

    def generate_alone(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        mix: RequestMix,  # noqa: ARG002
    ) -> list[int]:
        """Read the whole text again for every token."""
        draws, tokens = Random(sampling.seed), list(prompt)
        for _ in range(sampling.max_new_tokens):
            tokens.append(choose(crc32(bytes(tokens)), sampling, draws))
            if tokens[-1] == END and not sampling.ignore_eos:
                break
        return tokens[len(prompt) :]


class ToyForks(ToyAdapter):
    """The same adapter with forks."""

    def fork(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        first = ToyRequest(tuple(prompt), samplings[0], Random(0))
        self.engine.read_prompt(first)
        tokens = []
        for sampling in samplings:
            fork = ToyRequest(
                first.prompt, sampling, self.engine.draws_of(sampling), first.checksum
            )
            while not fork.ended:
                (token,) = self.engine.choose([fork])
                self.engine.take(fork, token)
            tokens.append(fork.tokens)
        return tokens
