"""Toy engines with one bug each."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer import FastPath

from .toy_engine import ToyAdapter, ToyEngine, ToyForks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer import Sampling

    from .toy_engine import ToyRequest


class LeakyEngine(ToyEngine):
    def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
        tokens = super().choose(batch)
        return tokens[:1] * 2 if len(batch) == 2 else tokens


class ReturnsANeighboursToken(ToyAdapter):
    engine_type = LeakyEngine


class WrongPrefixEngine(ToyEngine):
    def cached_prefix(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        matching = [prefix for prefix in self.prefixes or () if len(prefix) == 2 <= len(prompt)]
        return matching[0] if matching else super().cached_prefix(prompt)


class UsesAnotherPrefix(ToyAdapter):
    engine_type = WrongPrefixEngine


class ForgetfulEngine(ToyEngine):
    def take(self, request: ToyRequest, token: int) -> None:
        super().take(request, token)
        if len(request.tokens) == request.sampling.max_new_tokens:
            request.tokens.pop()


class LosesTheLastToken(ToyAdapter):
    engine_type = ForgetfulEngine


class RemovesATokenShown(ToyAdapter):
    """Shows fewer tokens of a request that waits to be recomputed."""

    def tokens(self, request: ToyRequest) -> list[int]:
        waits = request in self.engine.running[self.engine.batch_size :]
        return request.tokens[:-2] if waits else request.tokens


class LongerEngine(ToyEngine):
    def limit(self, request: ToyRequest) -> int:
        return request.sampling.max_new_tokens + 1


class GeneratesOneTokenMore(ToyAdapter):
    engine_type = LongerEngine


class IgnoresCancelEngine(ToyEngine):
    def cancel(self, request: ToyRequest) -> None:
        pass


class IgnoresCancel(ToyAdapter):
    engine_type = IgnoresCancelEngine


class EndsAllOnCancelEngine(ToyEngine):
    def cancel(self, request: ToyRequest) -> None:
        super().cancel(request)
        for other in list(self.running):
            self.end(other)


class EndsOthersOnCancel(ToyAdapter):
    engine_type = EndsAllOnCancelEngine


class StrictRoomEngine(ToyEngine):
    def fits(self, request: ToyRequest) -> bool:
        return self.needs(request) < self.room


class StarvesARequest(ToyAdapter):
    engine_type = StrictRoomEngine


class NarrowEngine(ToyEngine):
    def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
        if len(batch) == 3:
            raise IndexError("no row 2")
        return super().choose(batch)


class RaisesInAStep(ToyAdapter):
    engine_type = NarrowEngine


class StrictLengthEngine(ToyEngine):
    def submit(self, prompt: Sequence[int], sampling: Sampling) -> ToyRequest:
        request = super().submit(prompt, sampling)
        if request.max_tokens == self.room:
            raise ValueError("too long")
        return request


class RefusesAFittingRequest(ToyAdapter):
    engine_type = StrictLengthEngine


class LeasingEngine(ToyEngine):
    def cancel(self, request: ToyRequest) -> None:
        leases = self.leases
        super().cancel(request)
        self.leases = leases


class KeepsALease(ToyAdapter):
    engine_type = LeasingEngine


class ShortcutEngine(ToyEngine):
    def step(self) -> None:
        super().step()
        self.counts["shortcut"] += len(self.running) > 1


class CountsAnUndeclaredPath(ToyAdapter):
    engine_type = ShortcutEngine


class NeverTakesADeclaredPath(ToyAdapter):
    """Does nothing wrong, and declares a path that it never takes."""

    paths: ClassVar[Mapping[str, FastPath]] = {
        **ToyAdapter.paths,
        "guessed": FastPath(equals="by itself"),
    }


class SharedDrawsEngine(ToyEngine):
    def draws_of(self, sampling: Sampling) -> Random:
        if not hasattr(self, "shared_draws"):
            self.shared_draws = Random(sampling.seed)
        return self.shared_draws


class ForksShareTheirDraws(ToyForks):
    """Shares draws among forks only; another engine serves the requests."""

    def fork(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        engine, self.engine = self.engine, SharedDrawsEngine(room=0, batch_size=1, prefixes=False)
        tokens = super().fork(prompt, samplings)
        self.engine = engine
        return tokens


class ForksKeepALease(ToyForks):
    def fork(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        self.engine.leases += len(samplings) > 1
        return super().fork(prompt, samplings)


class MisroundingEngine(ToyEngine):
    """Changes the second token of every request to its neighbour."""

    def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
        tokens = super().choose(batch)
        return [token ^ (len(each.tokens) == 1) for each, token in zip(batch, tokens, strict=True)]


class Misrounds(ToyForks):
    engine_type: ClassVar[type[ToyEngine]] = MisroundingEngine
