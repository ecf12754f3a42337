"""Runs a mix of requests and holds each against the same request served alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_roseinfer.findings.divergence import Difference

if TYPE_CHECKING:
    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.engines.mix import Asked, RequestMix

_SLACK = 20
"""Steps an engine may take beyond one for every token of every request."""


class MixDivergence(Difference):
    """An engine whose requests got something else than they get alone. Carries the mix."""

    def __init__(self, mix: RequestMix, what: str) -> None:
        super().__init__(what, mix.words)
        self.mix = mix


@dataclass(slots=True)
class _Served:
    """A request that was submitted."""

    number: int
    asked: Asked
    request: Any
    expected: list[int]
    cancelled: bool = False
    found: int = 0
    """Tokens it had when it was last looked at."""
    over: bool = False
    """Whether it had ended by then."""
    tied: int | None = None
    """The token that rounding decided; what follows says nothing."""


class _MixRun:
    def __init__(self, adapter_type: type[EngineAdapter], mix: RequestMix) -> None:
        self.mix = mix
        self.adapter = adapter_type()
        self.adapter.make(mix)
        self.served: list[_Served] = []

    def run(self) -> Counter[str]:
        asked = self.mix.requests
        tokens = sum(len(each.prompt) + each.sampling.max_new_tokens for each in asked)
        # Whoever is preempted is computed again, at worst for each of the others' tokens.
        late = self.adapter.lag * len(asked)
        most = max(each.arrives for each in asked) + tokens * len(asked) + late + _SLACK
        for step in range(most + 1):
            self._arrive(step)
            self._cancel(step)
            for each in self.served:
                self._compare(each)
            if len(self.served) == len(asked) and all(map(self._ended, self.served)):
                break
            if step < most:
                self._step()
        else:
            waiting = [each.number for each in self.served if not self._ended(each)]
            self.fail(f"requests {waiting} have not ended after {most} steps")
        if left := self.adapter.leftovers():
            self.fail(f"every request has ended, and the engine still holds {left}")
        return _paths(self.adapter, self.mix)

    def _ended(self, each: _Served) -> bool:
        return self.adapter.ended(each.request)

    def _arrive(self, step: int) -> None:
        for number, asked in enumerate(self.mix.requests):
            if asked.arrives == step:
                expected = self.adapter.alone(asked.prompt, asked.sampling, self.mix)
                try:
                    request = self.adapter.submit(asked.prompt, asked.sampling)
                except Exception as error:
                    said = f"request {number} was refused: {type(error).__name__}: {error}"
                    self.fail(said, error)
                self.served.append(_Served(number, asked, request, expected))

    def _cancel(self, step: int) -> None:
        for each in self.served:
            after = each.asked.cancelled_after
            if after is not None and each.asked.arrives + after == step:
                each.cancelled = each.cancelled or not self._ended(each)
                self.adapter.cancel(each.request)
                if not self._ended(each):
                    self.fail(f"request {each.number} was cancelled and goes on")

    def _step(self) -> None:
        try:
            self.adapter.step()
        except Exception as error:
            self.fail(f"a step raised {type(error).__name__}: {error}", error)

    def _compare(self, each: _Served) -> None:
        found = self.adapter.tokens(each.request)
        if each.over and len(found) > each.found:
            self.fail(
                f"request {each.number} had ended and got token {each.found}: {found[each.found]}"
            )
        for at, token in enumerate(found[: each.tied]):
            wanted = each.expected[at] if at < len(each.expected) else None
            if token != wanted:
                before = [*each.asked.prompt, *found[:at]]
                if not self.adapter.undecided(before, each.asked.sampling, self.mix):
                    self._fail_token(each, at, wanted, token)
                each.tied = at
                break
        each.found, each.over = len(found), self._ended(each)
        short = len(found) < len(each.expected) and each.tied is None
        if each.over and not each.cancelled and short:
            self.fail(
                f"request {each.number} ended after {len(found)} tokens; alone it gets "
                f"{len(each.expected)}"
            )

    def _fail_token(self, each: _Served, at: int, wanted: int | None, found: int) -> NoReturn:
        right = f"it gets {wanted}" if wanted is not None else "it has ended by then"
        self.fail(f"request {each.number}, token {at}: {found}; alone {right}")

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        raise MixDivergence(self.mix, what) from cause


def _paths(engine: EngineAdapter, mix: RequestMix) -> Counter[str]:
    counts = Counter({str(name): n for name, n in engine.path_counts().items() if n})
    twins = (path.equals for path in engine.paths.values())
    declared = {*engine.paths, *twins, *engine.conditions}
    wrong = [f"path {name!r} ran and is not declared" for name in sorted(set(counts) - declared)]
    wrong += [
        f"path {name!r} was counted, which {switches} rules out"
        for name, path in engine.paths.items()
        for switches in path.never_with
        if counts[name] and switches.items() <= mix.options.items()
    ]
    if wrong:
        raise MixDivergence(mix, wrong[0])
    return counts


def run_mix(adapter: type[EngineAdapter], mix: RequestMix) -> Counter[str]:
    """Serve a mix; returns the paths it took and raises where a request is served wrongly."""
    return _MixRun(adapter, mix).run()


def run_forks(adapter: type[EngineAdapter], mix: RequestMix) -> Counter[str]:
    """The mix's ways of sampling as forks of its first prompt equal as many requests.

    The cache is made large enough for all: forks that run out of blocks are nobody's promise.
    """
    prompt = mix.requests[0].prompt
    samplings = [asked.sampling for asked in mix.requests]
    each = len(prompt) + max(sampling.max_new_tokens for sampling in samplings) + mix.block_size
    mix = replace(mix, cache_tokens=each * len(samplings))
    engine = adapter()
    engine.make(mix)
    for number, (found, sampling) in enumerate(
        zip(engine.forked(prompt, samplings), samplings, strict=True)
    ):
        wanted = engine.alone(prompt, sampling, mix)
        pairs = zip(wanted, found, strict=False)
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if at is None and len(found) == len(wanted):
            continue
        if at is not None and engine.undecided([*prompt, *found[:at]], sampling, mix):
            continue
        raise MixDivergence(
            mix, f"fork {number} of request 0's prompt got {found}; alone it gets {wanted}"
        )
    if left := engine.leftovers():
        raise MixDivergence(mix, f"every fork was released, and left are {left}")
    return _paths(engine, mix)
