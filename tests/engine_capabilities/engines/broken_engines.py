"""Toy engines that are wrong in one way each."""

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
        chosen = super().choose(batch)
        return chosen[:1] * 2 if len(batch) == 2 else chosen


class ANeighboursTokenLeaksIn(ToyAdapter):
    engine_type = LeakyEngine


class WrongPrefixEngine(ToyEngine):
    def known_prefix(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        last = [known for known in self.prefixes or () if len(known) == 2 <= len(prompt)]
        return last[0] if last else super().known_prefix(prompt)


class TakesAnothersPrefix(ToyAdapter):
    engine_type = WrongPrefixEngine


class ForgetfulEngine(ToyEngine):
    def take(self, request: ToyRequest, token: int) -> None:
        super().take(request, token)
        if len(request.tokens) == request.sampling.max_new_tokens:
            request.tokens.pop()


class LosesTheLastToken(ToyAdapter):
    engine_type = ForgetfulEngine


class TakesATokenBack(ToyAdapter):
    """Who has to wait is computed again, and shows what it has by then."""

    def tokens(self, request: ToyRequest) -> list[int]:
        waits = request in self.engine.running[self.engine.batch_size :]
        return request.tokens[:-2] if waits else request.tokens


class TalkativeEngine(ToyEngine):
    def limit(self, request: ToyRequest) -> int:
        return request.sampling.max_new_tokens + 1


class GeneratesOneTokenMore(ToyAdapter):
    engine_type = TalkativeEngine


class StubbornEngine(ToyEngine):
    def cancel(self, request: ToyRequest) -> None:
        pass


class IgnoresCancel(ToyAdapter):
    engine_type = StubbornEngine


class PanickyEngine(ToyEngine):
    def cancel(self, request: ToyRequest) -> None:
        super().cancel(request)
        for other in list(self.running):
            self.end(other)


class EndsOthersWithTheCancelled(ToyAdapter):
    engine_type = PanickyEngine


class CautiousEngine(ToyEngine):
    def fits(self, request: ToyRequest) -> bool:
        return self.needs(request) < self.room


class LetsSomebodyWaitForever(ToyAdapter):
    engine_type = CautiousEngine


class NarrowEngine(ToyEngine):
    def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
        if len(batch) == 3:
            raise IndexError("no row 2")
        return super().choose(batch)


class RaisesInAStep(ToyAdapter):
    engine_type = NarrowEngine


class PickyEngine(ToyEngine):
    def submit(self, prompt: Sequence[int], sampling: Sampling) -> ToyRequest:
        request = super().submit(prompt, sampling)
        if request.most == self.room:
            raise ValueError("too long")
        return request


class RefusesWhatFits(ToyAdapter):
    engine_type = PickyEngine


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


class NeverGuesses(ToyAdapter):
    """Nothing it does is wrong, and what it claims never happens."""

    paths: ClassVar[Mapping[str, FastPath]] = {
        **ToyAdapter.paths,
        "guessed": FastPath(equals="by itself"),
    }


class OneDieEngine(ToyEngine):
    def draws_of(self, sampling: Sampling) -> Random:
        if not hasattr(self, "die"):
            self.die = Random(sampling.seed)
        return self.die


class ForksShareTheirDraws(ToyForks):
    """Only forks do: requests are served by another engine."""

    def fork(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        engine, self.engine = self.engine, OneDieEngine(room=0, batch_size=1, prefixes=False)
        found = super().fork(prompt, samplings)
        self.engine = engine
        return found


class ForksKeepALease(ToyForks):
    def fork(self, prompt: Sequence[int], samplings: Sequence[Sampling]) -> list[list[int]]:
        self.engine.leases += len(samplings) > 1
        return super().fork(prompt, samplings)


class MisroundingEngine(ToyEngine):
    """The second token of every request comes out as the one beside the right one."""

    def choose(self, batch: Sequence[ToyRequest]) -> list[int]:
        chosen = super().choose(batch)
        return [token ^ (len(each.tokens) == 1) for each, token in zip(batch, chosen, strict=True)]


class Misrounds(ToyForks):
    engine_type: ClassVar[type[ToyEngine]] = MisroundingEngine
