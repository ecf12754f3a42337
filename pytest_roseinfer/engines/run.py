"""Serving a mix of requests, and comparing each completion with its slow twin."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from time import process_time
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_roseinfer.adapters.engine import WiderSampling
from pytest_roseinfer.capabilities.answers import WrongAnswer
from pytest_roseinfer.engines.answers import (
    refuse_wrong_answers,
    require_forks,
    stop_strings,
    up_to_stop,
)
from pytest_roseinfer.engines.twins import (
    wrong_choice,
    wrong_logprob,
    wrong_prompt,
    wrong_text,
    wrong_top,
)
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.watchdog import WATCHED, FoundByAdapter, StepHung, StoppedAnswering

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.adapters.engine import Asked, EngineAdapter, RequestMix, Sampling
    from pytest_roseinfer.findings.timeline import Line, Timeline

# Settles what a mix leaves open about a request, by what the slow twin gives for it.


_SEEDS = 24
"""So many are tried for one with which a text ends early."""


def settle(
    adapter: EngineAdapter, asked: Asked, mix: RequestMix
) -> tuple[Sampling, list[int], tuple[str, ...]]:
    """Return a request's parameters, the tokens it must get, and its stop strings."""
    sampling = asked.sampling
    expected = [*adapter.alone(asked.prompt, sampling, mix)]
    for _ in range(_SEEDS if asked.ends_early else 0):
        if 1 < len(expected) < sampling.max_new_tokens:
            break
        sampling = replace(sampling, seed=sampling.seed + 1)
        expected = [*adapter.alone(asked.prompt, sampling, mix)]
    if not (asked.stops and adapter.defines("pieces")):
        return sampling, expected, ()
    stops = stop_strings(asked, adapter.decoded(expected))
    sampling = WiderSampling(**{**asdict(sampling), "stop": stops})
    return sampling, up_to_stop(expected, stops, adapter.decoded), stops


# Notices steps in which an engine had nothing to do but decode, and brought no token.


@dataclass(slots=True)
class Idle:
    """How many steps in a row brought no token."""

    steps: int = 0
    _before: Mapping[int, int] = field(default_factory=dict)
    """What was noted behind the last step."""

    def note(self, now: Mapping[int, int]) -> None:
        """Look at how many tokens each request that goes on has, if all are decoding."""
        self.steps = self.steps + 1 if now and now == self._before else 0
        self._before = now

    def words(self) -> str:
        """Return what is wrong with that."""
        many = f"{self.steps} steps in a row" if self.steps > 1 else "a step"
        return f"requests {[*self._before]} were decoding, and {many} brought none of them a token"


# What became of a request before it went wrong, as far as its engine's adapter tells.


_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


@dataclass(slots=True)
class Past:
    """What was seen of a request by now."""

    stage: str = ""
    """What it was at when it was last looked at."""
    tokens: int = 0
    """How many tokens it had then."""
    preempted: int = 0
    """How many times it was preempted."""
    had: int = 0
    """How many tokens it had when it was preempted last."""
    cached: int = 0
    """How many of its first tokens were found in the cache."""

    def note(self, adapter: EngineAdapter, request: Any, tokens: int) -> None:
        """Look at a request that went on and has so many tokens now."""
        self.tokens = tokens
        if adapter.defines("stage") and not adapter.ended(request):
            before, self.stage = self.stage, adapter.stage(request)
            if self.stage == "preempted" and before != "preempted":
                self.preempted, self.had = self.preempted + 1, tokens
        if adapter.defines("cached_tokens"):
            self.cached = adapter.cached_tokens(request)

    def words(self) -> str:
        """Return what a failure of the request says behind what is wrong."""
        said = ""
        if self.cached:
            first = "token was" if self.cached == 1 else f"{self.cached} tokens were"
            said = f"; its first {first} found in the cache"
        if self.preempted:
            last = f" {self.preempted} times, last" if self.preempted > 1 else ""
            when = f"after its {_ordinal(self.had)} token" if self.had else "before its first token"
            said += f"; it was preempted{last} {when}{' and came back' * self._is_back()}"
        return said

    def _is_back(self) -> bool:
        """Return True if it goes on again, or did: it got a token or is at something else."""
        return self.tokens > self.had or self.stage != "preempted"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else _ENDINGS.get(number % 10, "th")
    return f"{number}{ending}"


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


# Serves a mix of requests once more, and notes what becomes of each.


def timeline_of(adapter: type[EngineAdapter], mix: RequestMix) -> Timeline:
    """Return the timeline of a mix, up to where a request is served wrongly."""
    run = MixRun(adapter, mix)
    lines: list[Line] = [_line(at) for at in range(mix.size)]
    step, ended = -1, False
    with suppress(Exception):  # what is wrong was said by the run that found it
        for step in run.steps():
            _note(run, lines, step)
        ended = True
    if not ended:
        step += 1
        _note(run, lines, step)
        if run.comparing:
            lines[run.comparing.number]["wrong"] = True
    for line, asked in zip(lines, run.settled().requests, strict=True):
        line["words"] = adapter.request_in_words(asked)
    return {"steps": step + 1, "requests": lines}


def timeline_of_forks(adapter: type[EngineAdapter], mix: RequestMix) -> Timeline:
    """Return how the forks of a mix's first prompt ended; its engine serves them in one call."""
    lines: list[Line] = [
        _line(at, f"fork {at} of request 0's prompt") for at in range(len(mix.requests))
    ]
    for line, fork in zip(lines, served_forks(adapter(), room_for_forks(mix)), strict=True):
        line["stages"], line["tokens"] = ["arrived", "ended"], [0, len(fork.found)]
        line["expected"], line["found"] = list(fork.expected), list(fork.found)
        if fork.parted is not None:
            line["parted"], line["parted_step"], line["wrong"] = fork.parted, 1, True
    return {"steps": 2, "requests": lines}


def _line(number: int, words: str = "") -> Line:
    return {
        "number": number,
        "words": words,
        "stages": [],
        "tokens": [],
        "expected": [],
        "found": [],
        "parted": None,
        "parted_step": None,
        "wrong": False,
    }


def _note(run: MixRun, lines: list[Line], step: int) -> None:
    for line in lines:
        line["stages"].append("")
        line["tokens"].append(0)
    for each in run.served:
        line = lines[each.number]
        found = list(run.adapter.tokens(each.request))
        over = line["stages"][-2:-1]
        line["stages"][-1] = _stage(run, each, first=not any(line["stages"]), had=len(found))
        if over and over[0] in ("ended", "cancelled", "") and any(line["stages"][:-1]):
            line["stages"][-1] = ""
        line["tokens"][-1] = len(found)
        line["expected"], line["found"] = list(each.expected), found
        parted = _parted(each, found, ended=run.adapter.ended(each.request))
        if parted is not None and line["parted"] is None:
            line["parted"], line["parted_step"], line["wrong"] = parted, step, True


def _stage(run: MixRun, each: Served, *, first: bool, had: int) -> str:
    if run.adapter.ended(each.request):
        return "cancelled" if each.cancelled else "ended"
    if first:
        return "arrived"
    if run.adapter.defines("stage"):
        return run.adapter.stage(each.request)
    return "decoding" if had else "arrived"


def _parted(each: Served, found: list[int], *, ended: bool) -> int | None:
    """Return the first token that is not as alone; None while all are."""
    if each.tied is not None:
        return None
    pairs = enumerate(zip(each.expected, found, strict=False))
    if (at := next((at for at, (right, got) in pairs if right != got), None)) is not None:
        return at
    short = ended and not each.cancelled and len(found) < len(each.expected)
    return min(len(found), len(each.expected)) if short or len(found) > len(each.expected) else None
