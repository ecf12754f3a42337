"""Runs a mix of requests and compares each with the same request served alone."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import process_time
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_roseinfer.adapters.answers.wrong import WrongAnswer
from pytest_roseinfer.engines.answers import refuse_wrong_answers, require_forks
from pytest_roseinfer.engines.asking import settle
from pytest_roseinfer.engines.checks import (
    wrong_choice,
    wrong_logprob,
    wrong_prompt,
    wrong_text,
    wrong_top,
)
from pytest_roseinfer.engines.idle import Idle
from pytest_roseinfer.engines.past import Past
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.running import coverage
from pytest_roseinfer.running.adapter_findings import FoundByAdapter, StoppedAnswering
from pytest_roseinfer.running.watchdog import WATCHED, StepHung

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.adapters.engine import EngineAdapter
    from pytest_roseinfer.adapters.mix import Asked, RequestMix, Sampling

_SLACK = 20
"""An engine may take so many steps beyond one for every token of every request."""
_TOLD = FoundByAdapter, WrongAnswer
"""Their messages say all of what is wrong, whatever the engine was doing."""


class MixDivergence(Difference):
    """A request got something else than it gets alone. The error carries the mix."""

    def __init__(
        self,
        adapter: type[EngineAdapter],
        mix: RequestMix,
        what: str,
        settled: RequestMix | None = None,
    ) -> None:
        """``settled`` is the mix with what it left open, where that is known."""
        super().__init__(what, partial(adapter.in_words, settled or mix))
        self.mix = mix


@dataclass(slots=True)
class Served:
    """A request that was submitted."""

    number: int
    asked: Asked
    request: Any
    sampling: Sampling
    """Its parameters, with what the mix left open."""
    expected: list[int]
    stops: tuple[str, ...]
    cancelled: bool = False
    ended: bool = False
    """It had ended when it was last looked at."""
    tokens: int = 0
    """It had so many tokens then."""
    tied: int | None = None
    """Rounding decided this token; those behind it need not be those it gets alone."""
    pieces: list[str] = field(default_factory=list)
    """It had shown these pieces of text when it was last looked at."""
    past: Past = field(default_factory=Past)


class MixRun:
    """An engine that serves a mix, and what was seen of its requests."""

    def __init__(self, adapter_type: type[EngineAdapter], mix: RequestMix) -> None:
        self.mix = mix
        self.adapter = _made(adapter_type)
        self.adapter.make(mix)
        self.served: list[Served] = []
        self.comparing: Served | None = None
        """The request that is looked at now."""
        self.largest = Counter(rows=0, tokens=0)
        """The most rows of a batch, which are requests that got tokens in one step, and the most
        tokens of a sequence."""
        self._idle = Idle()

    def run(self) -> Counter[str]:
        """Serve all requests; return the paths that the engine took."""
        for _ in self.steps():
            pass
        return self.finish()

    def finish(self) -> Counter[str]:
        """Look at what is left behind all requests; return the paths that the engine took."""
        if left := self.adapter.leftovers():
            self.fail(f"every request has ended, and the engine still holds {left}")
        return _paths(self.adapter, self.mix)

    def steps(self) -> Iterator[int]:
        """Let the engine do one step after the other; yield each number before the step is done."""
        asked = self.mix.requests
        # A request that is preempted is computed again, at worst for each token of the others.
        tokens = sum(each.most_tokens for each in asked) * len(asked)
        late = self.adapter.lag * len(asked)
        most = max(each.arrives for each in asked) + tokens + late + _SLACK
        for step in range(most + 1):
            WATCHED.began = process_time()
            self._arrive(step)
            self._cancel(step)
            self._compare_all()
            self._refuse_idling()
            yield step
            if len(self.served) == len(asked) and all(each.ended for each in self.served):
                break
            if step < most:
                try:
                    self.adapter.step()
                except _TOLD:
                    raise
                except Exception as error:
                    self.fail(f"a step raised {type(error).__name__}: {error}", error)
        else:
            waiting = [each.number for each in self.served if not each.ended]
            self.fail(f"requests {waiting} have not ended after {most} steps")

    def _refuse_idling(self) -> None:
        going = [each for each in self.served if not each.ended]
        decoding = all(each.past.stage == "decoding" for each in going)
        self._idle.note({each.number: each.tokens for each in going if decoding})
        if self.adapter.never_idles and self._idle.steps > self.adapter.lag:
            self.fail(self._idle.words())

    def _arrive(self, step: int) -> None:
        for number, asked in enumerate(self.mix.requests):
            if asked.arrives == step:
                sampling, expected, stops = settle(self.adapter, asked, self.mix)
                try:
                    request = self.adapter.submit(asked.prompt, sampling)
                except _TOLD:
                    raise
                except Exception as error:
                    said = f"request {number} was refused: {type(error).__name__}: {error}"
                    self.fail(said, error)
                self.served.append(Served(number, asked, request, sampling, expected, stops))

    def _cancel(self, step: int) -> None:
        for each in self.served:
            after = each.asked.cancelled_after
            if after is not None and each.asked.arrives + after == step:
                each.cancelled = not self.adapter.ended(each.request)
                self.adapter.cancel(each.request)
                if not self.adapter.ended(each.request):
                    self.fail(f"request {each.number} was cancelled and goes on")

    def _compare_all(self) -> None:
        rows = 0
        for each in self.served:
            before = each.tokens
            self.comparing = each
            self._compare(each)
            rows += each.tokens > before
            self._note_largest("tokens", len(each.asked.prompt) + each.tokens)
        self.comparing = None
        self._note_largest("rows", rows)

    def _note_largest(self, what: str, size: int) -> None:
        self.largest[what] = max(size, self.largest[what])

    def _compare(self, each: Served) -> None:
        found, name = [*self.adapter.tokens(each.request)], f"request {each.number}"
        if not each.ended:
            each.past.note(self.adapter, each.request, len(found))
        if len(found) < each.tokens and not each.cancelled:  # an engine may forget who was
            self._fail_of(each, f"{name} had {each.tokens} tokens and has {len(found)}")
        if each.ended and len(found) > each.tokens:
            late = self.adapter.spelled(found[each.tokens])
            self._fail_of(each, f"{name} had ended and got token {each.tokens}: {late}")
        for at, token in enumerate(found[: each.tied]):
            wanted = each.expected[at] if at < len(each.expected) else None
            if token == wanted:
                continue
            before = [*each.asked.prompt, *found[:at]]
            if not self.adapter.undecided(before, each.sampling, self.mix):
                gets = "" if wanted is None else f"it gets {self.adapter.spelled(wanted)}"
                right = gets or "it has ended by then"
                wrong = f"{name}, token {at}: {self.adapter.spelled(token)}; alone {right}"
                self._fail_of(each, wrong)
            each.tied = at
            break
        self._check_choices(each, found)
        each.tokens, each.ended = len(found), self.adapter.ended(each.request)
        self._check_text(each, found)
        enough = each.cancelled or each.tied is not None or len(found) >= len(each.expected)
        if each.ended and not enough:
            wanted = len(each.expected)
            self._fail_of(each, f"{name} ended after {len(found)} tokens; alone it gets {wanted}")

    def _check_choices(self, each: Served, found: list[int]) -> None:
        """Check the new tokens, and how likely the engine says they were."""
        if not self.adapter.defines("logits"):
            return
        name = f"request {each.number}"
        told = self._told(each, "logprobs", len(found))
        top = self._told(each, "top_logprobs", len(found))
        for at in range(each.tokens, len(found)):
            before = [*each.asked.prompt, *found[:at]]
            new = found[: at + 1]
            wrong = wrong_choice(self.adapter, self.mix, each.asked.prompt, new, each.sampling)
            if told is not None:
                wrong = wrong or wrong_logprob(self.adapter, self.mix, before, found[at], told[at])
            if top is not None:
                most = each.sampling.top_logprobs  # type: ignore[attr-defined]
                wrong = wrong or wrong_top(self.adapter, self.mix, before, top[at], most)
            if wrong:
                self._fail_of(each, f"{name}, token {at}: {wrong}")
        if found and not each.tokens and self._asks(each, "prompt_logprobs"):
            prompt = self.adapter.prompt_logprobs(each.request)
            if wrong := wrong_prompt(self.adapter, self.mix, each.asked.prompt, prompt):
                self._fail_of(each, f"{name}: {wrong}")

    def _asks(self, each: Served, name: str) -> bool:
        return self.adapter.defines(name) and bool(getattr(each.sampling, name, False))

    def _told(self, each: Served, name: str, tokens: int) -> Sequence[Any] | None:
        """Return what is told of a request's tokens under this name, if it asks for that."""
        if not self._asks(each, name):
            return None
        told: Sequence[Any] = getattr(self.adapter, name)(each.request)
        if len(told) != tokens:
            said = name.replace("_", " ").replace("logprobs", "log-probabilities")
            self.fail(f"request {each.number} has {tokens} tokens and {len(told)} {said}")
        return told

    def _check_text(self, each: Served, found: list[int]) -> None:
        if not self.adapter.defines("pieces"):
            return
        whole = each.ended and not each.cancelled
        known = found if each.ended or each.tied is not None else each.expected
        text, pieces = self.adapter.decoded(known), list(self.adapter.pieces(each.request))
        if wrong := wrong_text(each.pieces, pieces, text, each.stops, whole=whole):
            self._fail_of(each, f"request {each.number} {wrong}")
        each.pieces = pieces

    def _fail_of(self, each: Served, what: str) -> NoReturn:
        self.fail(f"{what}{each.past.words()}")

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        raise MixDivergence(type(self.adapter), self.mix, what, self.settled()) from cause

    def settled(self) -> RequestMix:
        """Return the mix with the seeds and stop strings that its requests were submitted with."""
        requests = [*self.mix.requests]
        for each in self.served:
            asked = replace(each.asked, sampling=each.sampling, stops=(), ends_early=False)
            requests[each.number] = asked
        return replace(self.mix, requests=tuple(requests))


def _made(kind: type[EngineAdapter]) -> EngineAdapter:
    adapter = kind()
    refuse_wrong_answers(adapter)
    coverage.current().count_calls(adapter)
    return adapter


def _paths(engine: EngineAdapter, mix: RequestMix) -> Counter[str]:
    counts = Counter({str(name): n for name, n in engine.path_counts().items() if n})
    twins = (path.equals for path in engine.paths.values())
    declared = {*engine.paths, *twins, *engine.conditions}
    for name in sorted(counts.keys() - declared):
        what = f"{name!r} was counted, and is in neither paths nor conditions"
        raise MixDivergence(type(engine), mix, what)
    for name, path in engine.paths.items():
        for switches in path.never_with:
            if counts[name] and switches.items() <= mix.options.items():
                what = f"path {name!r} was counted, which {switches} rules out"
                raise MixDivergence(type(engine), mix, what)
    return counts


def run_mix(adapter: type[EngineAdapter], mix: RequestMix) -> Counter[str]:
    """Serve a mix and return the paths it took; raise where a request is served wrongly."""
    with failing_on(adapter, mix):
        return MixRun(adapter, mix).run()


@contextmanager
def failing_on(adapter: type[EngineAdapter], mix: RequestMix) -> Iterator[None]:
    """Say on which mix a step hangs, or what is tested is gone or found wrong by its adapter."""
    try:
        yield
    except StoppedAnswering as gone:
        said = f"{gone.who} stopped answering while this mix was served: {gone}"
        raise MixDivergence(adapter, mix, said) from gone
    except FoundByAdapter as found:
        raise MixDivergence(adapter, mix, str(found)) from found
    except WrongAnswer as wrong:
        raise MixDivergence(adapter, mix, str(wrong)) from None
    except StepHung as hung:
        raise MixDivergence(adapter, mix, f"a step {hung}") from hung


def run_forks(adapter: type[EngineAdapter], mix: RequestMix) -> Counter[str]:
    """Fork the mix's first prompt for each of its samplings; compare the forks with requests."""
    mix = room_for_forks(mix)
    with failing_on(adapter, mix):
        engine = _made(adapter)
        for number, fork in enumerate(served_forks(engine, mix)):
            if fork.parted is not None:
                got = f"got {fork.found}; alone it gets {fork.expected}"
                raise MixDivergence(adapter, mix, f"fork {number} of request 0's prompt {got}")
        if left := engine.leftovers():
            raise MixDivergence(adapter, mix, f"every fork was released, and left are {left}")
        return _paths(engine, mix)


def room_for_forks(mix: RequestMix) -> RequestMix:
    """Return the mix with a cache that is large enough for all forks.

    No engine promises anything for forks that run out of blocks.
    """
    most = max(asked.sampling.max_new_tokens for asked in mix.requests)
    each = len(mix.requests[0].prompt) + most + mix.block_size
    return replace(mix, cache_tokens=each * len(mix.requests))


@dataclass(frozen=True, slots=True)
class ServedFork:
    expected: list[int]
    found: list[int]
    parted: int | None
    """The first token that is not as alone and that rounding did not decide."""


def served_forks(engine: EngineAdapter, mix: RequestMix) -> Iterator[ServedFork]:
    """Serve the forks of the mix's first prompt, and each as a request alone."""
    engine.make(mix)
    prompt = mix.requests[0].prompt
    samplings = [asked.sampling for asked in mix.requests]
    forks = engine.forked(prompt, samplings)
    require_forks(forks, len(samplings))
    for found, sampling in zip(map(list, forks), samplings, strict=True):
        WATCHED.began = process_time()
        expected = [*engine.alone(prompt, sampling, mix)]
        same = enumerate(zip(expected, found, strict=False))
        at = next((at for at, (a, b) in same if a != b), None)
        if at is not None and engine.undecided([*prompt, *found[:at]], sampling, mix):
            at = None
        elif at is None and len(found) != len(expected):
            at = min(len(found), len(expected))
        yield ServedFork(expected, found, at)
