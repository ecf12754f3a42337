"""Runs of a mix of requests, which compare each completion with its slow twin."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from time import process_time
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_roseinfer.capabilities.capability import select_parts
from pytest_roseinfer.capabilities.return_values import (
    InvalidReturnValue,
    call_of,
    checks_of,
    raise_invalid,
)
from pytest_roseinfer.engine_capabilities.capability import (
    ServedRequest,
    for_adapter,
    offered_capabilities,
)
from pytest_roseinfer.findings.divergence import Difference
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.watchdog import CURRENT_EXAMPLE, AdapterFinding, StepHung, TargetGoneError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from pytest_roseinfer.adapters.engine import EngineAdapter, RequestMix, RequestSpec
    from pytest_roseinfer.engine_capabilities.capability import EngineRun, MixObserver
    from pytest_roseinfer.findings.timeline import RequestTimeline, Timeline

_SLACK = 20
"""Steps that an engine may take beyond one per token of every request."""
_COMPLETE = AdapterFinding, InvalidReturnValue
"""Errors whose messages are complete without the engine's state."""


class MixDivergence(Difference):
    """Error for a request whose output differs from its output alone; carries the mix."""

    def __init__(
        self,
        adapter: type[EngineAdapter],
        mix: RequestMix,
        summary: str,
        settled: RequestMix | None = None,
        *,
        kind: str,
    ) -> None:
        """``settled`` is the mix with open fields filled in, if they are known."""
        super().__init__(summary, partial(adapter.describe, settled or mix))
        self.mix = mix
        self.kind = kind


def settle(
    adapter: EngineAdapter, spec: RequestSpec, mix: RequestMix
) -> tuple[RequestSpec, list[int]]:
    """Return a request spec with all open fields filled in, and the tokens that it gets alone."""
    spec = for_adapter(type(adapter), spec)
    expected = [*adapter.generate_alone(spec.prompt, spec.sampling, mix)]
    for capability in offered_capabilities(type(adapter)):
        if capability.settle:
            spec, expected = capability.settle(adapter, spec, expected, mix)
    return spec, expected


class MixRun:
    """Run of an engine on a mix, with the state of each request."""

    def __init__(self, adapter_type: type[EngineAdapter], mix: RequestMix) -> None:
        self.mix = mix
        self.adapter = _make_adapter(adapter_type)
        self.adapter.make(mix)
        self.served: list[ServedRequest] = []
        self.current_request: ServedRequest | None = None
        """Request that is being compared; None between comparisons."""
        self.largest = Counter(rows=0, tokens=0)
        """Maximum rows of a batch (requests that got tokens in one step), and maximum tokens of a
        sequence."""
        kinds = chain.from_iterable(each.observers for each in adapter_type.capabilities)
        run: EngineRun = weakref.proxy(self)  # avoids a cycle that keeps the engine alive
        self.observers = [kind(run) for kind in select_parts(kinds, adapter_type.abilities)]

    def run(self) -> Counter[str]:
        """Serve all requests; return the counts of paths that the engine took."""
        for _ in self.steps():
            pass
        return self.finish()

    def finish(self) -> Counter[str]:
        """Check for leaks after all requests; return the counts of paths that the engine took."""
        if leaks := self.adapter.find_leaks():
            problem = f"every request has ended, and the engine still holds {leaks}"
            self.fail(problem, kind="leaks")
        counts = _paths(self.adapter, self.mix)
        for observer in self.observers:
            counts.update(+observer.counts)
        return counts

    def steps(self) -> Iterator[int]:
        """Run the engine step by step; yield each step's number before it runs."""
        specs = self.mix.requests
        # A preempted request is recomputed, at worst once for each token of the others.
        tokens = sum(each.max_tokens for each in specs) * len(specs)
        late = self.adapter.extra_steps * len(specs)
        late += sum(observer.added_steps() for observer in self.observers)
        max_steps = max(each.arrival for each in specs) + tokens + late + _SLACK
        for step in range(max_steps + 1):
            CURRENT_EXAMPLE.step_began_at = process_time()
            self._submit(step)
            for observer in self.observers:
                self._judge(observer.act(step), kind=_kind(observer))
            self._compare_all()
            for observer in self.observers:
                self._judge(observer.judge_step(), kind=_kind(observer))
            yield step
            if len(self.served) == len(specs) and all(each.finished for each in self.served):
                break
            if step < max_steps:
                try:
                    self.adapter.step()
                except _COMPLETE:
                    raise
                except Exception as error:
                    name = type(error).__name__
                    self.fail(f"a step raised {name}: {error}", error, kind=f"raised {name}")
        else:
            waiting = [each.number for each in self.served if not each.finished]
            problem = f"requests {waiting} have not ended after {max_steps} steps"
            self.fail(problem, kind="not ended")

    def _submit(self, step: int) -> None:
        for number, spec in enumerate(self.mix.requests):
            if spec.arrival == step:
                settled, expected = settle(self.adapter, spec, self.mix)
                try:
                    request = self.adapter.submit(settled.prompt, settled.sampling)
                except _COMPLETE:
                    raise
                except Exception as error:
                    name = type(error).__name__
                    problem = f"request {number} was refused: {name}: {error}"
                    self.fail(problem, error, kind=f"refused {name}")
                self.served.append(ServedRequest(number, settled, request, expected))

    def _compare_all(self) -> None:
        rows = 0
        for each in self.served:
            self.current_request = each
            self._compare(each)
            rows += len(each.new_tokens) > 0
            self._note_largest("tokens", len(each.spec.prompt) + len(each.tokens))
        self.current_request = None
        self._note_largest("rows", rows)

    def _note_largest(self, quantity: str, size: int) -> None:
        self.largest[quantity] = max(size, self.largest[quantity])

    def _compare(self, each: ServedRequest) -> None:
        was_finished, each.num_tokens_before = each.finished, len(each.tokens)
        each.tokens = [*self.adapter.tokens(each.request)]
        for observer in self.observers:
            observer.note(each)
        num_tokens = len(each.tokens)
        # An engine may drop cancelled requests.
        if num_tokens < each.num_tokens_before and not each.cancelled:
            self._judge(
                f"{each.name} had {each.num_tokens_before} tokens and has {num_tokens}",
                each,
                kind="tokens taken back",
            )
        if was_finished and num_tokens > each.num_tokens_before:
            late = self.adapter.spell(each.tokens[each.num_tokens_before])
            self._judge(
                f"{each.name} had ended and got token {each.num_tokens_before}: {late}",
                each,
                kind="tokens after the end",
            )
        self._compare_tokens(each)
        each.finished = self.adapter.is_finished(each.request)
        for observer in self.observers:
            self._judge(observer.judge(each), each, kind=_kind(observer))
        enough = (
            each.cancelled or each.near_tie_index is not None or num_tokens >= len(each.expected)
        )
        if each.finished and not enough:
            num_expected = len(each.expected)
            self._judge(
                f"{each.name} ended after {num_tokens} tokens; alone it gets {num_expected}",
                each,
                kind="ended early",
            )

    def _compare_tokens(self, each: ServedRequest) -> None:
        for at, token in enumerate(each.tokens[: each.near_tie_index]):
            expected = each.expected[at] if at < len(each.expected) else None
            if token == expected:
                continue
            before = [*each.spec.prompt, *each.tokens[:at]]
            if not self.adapter.is_near_tie(before, each.spec.sampling, self.mix):
                alone = "" if expected is None else f"it gets {self.adapter.spell(expected)}"
                right = alone or f"it has ended by then{self._describe_end(each)}"
                wrong = f"{each.name}, token {at}: {self.adapter.spell(token)}; alone {right}"
                self._judge(wrong, each, kind="tokens")
            each.near_tie_index = at
            break

    def _describe_end(self, each: ServedRequest) -> str:
        """Describe the end of a request's slow twin, as the end of a sentence."""
        ends = filter(None, (observer.describe_end(each) for observer in self.observers))
        return next((f", {end}" for end in ends), "")

    def _judge(self, wrong: str, each: ServedRequest | None = None, *, kind: str) -> None:
        """Fail if ``wrong`` is not empty, and add the history of the request concerned."""
        if wrong:
            pasts = [observer.describe_past(each) for observer in self.observers] if each else ()
            self.fail(wrong + "".join(pasts), kind=kind)

    def fail(self, summary: str, cause: BaseException | None = None, *, kind: str) -> NoReturn:
        adapter, settled = type(self.adapter), self.settled()
        raise MixDivergence(adapter, self.mix, summary, settled, kind=kind) from cause

    def settled(self) -> RequestMix:
        """Return the mix with the seeds and stop strings of the submitted requests."""
        requests = [*self.mix.requests]
        for each in self.served:
            requests[each.number] = each.spec
        return replace(self.mix, requests=tuple(requests))


def _kind(observer: MixObserver) -> str:
    """Return the kind of a judgement for digests: the module of its capability."""
    return type(observer).__module__.rpartition(".")[2]


def _make_adapter(kind: type[EngineAdapter]) -> EngineAdapter:
    adapter = kind()
    for name, check in checks_of(kind).items():
        coverage.wrap_method(check, adapter, name)
    coverage.current().count_calls(adapter)
    _keep_answers(adapter)  # after the count, which is of calls that compute
    return adapter


# Answers of an engine's model, kept between mixes: many requests have contexts in common.


_MAX_NUMBERS = 1 << 23
"""Most numbers of all answers together: some 256 MiB, as lists of floats."""
_NUMBERS_OF_A_KEY = 100
"""Numbers that take as much memory as the arguments of an answer."""


class Answers:
    """Latest answers of one adapter class."""

    def __init__(self, max_numbers: int = _MAX_NUMBERS) -> None:
        self._answers: OrderedDict[Hashable, Sequence[float]] = OrderedDict()
        self._numbers, self._max_numbers = 0, max_numbers

    def get(self, key: Hashable, compute: Callable[[], Sequence[float]]) -> Sequence[float]:
        """Return the kept answer, or compute it."""
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        answer = self._answers[key] = compute()
        self._numbers += len(answer) + _NUMBERS_OF_A_KEY
        while self._numbers > self._max_numbers:
            _, dropped = self._answers.popitem(last=False)
            self._numbers -= len(dropped) + _NUMBERS_OF_A_KEY
        return answer


_answers: weakref.WeakKeyDictionary[type[Any], Answers] = weakref.WeakKeyDictionary()


def _keep_answers(engine: EngineAdapter) -> None:
    """Let an adapter compute each of its model's answers once, but for those of a server.

    A server may answer differently each time, so each of its answers counts.
    """
    kind = type(engine)
    if kind.replays > 1:
        return
    answers = _answers.setdefault(kind, Answers())

    def kept(name: str, method: Callable[[], Any], tokens: Sequence[int], *others: Any) -> Any:
        *parameters, mix = others
        key = (name, tuple(tokens), *parameters, *_engine_key(mix))
        return answers.get(key, lambda: method()(tokens, *others))

    for name in ("logits", "generate_alone"):
        coverage.wrap_method(partial(kept, name), engine, name)


def _engine_key(mix: RequestMix) -> tuple[Hashable, ...]:
    """Return what an answer may depend on: all of a mix but its requests and their room."""
    return mix.block_size, mix.device, repr(sorted(mix.options.items()))


# Whole mixes, and forks.


def _paths(engine: EngineAdapter, mix: RequestMix) -> Counter[str]:
    counts = Counter({str(name): n for name, n in engine.path_counts().items() if n})
    twins = (path.equals for path in engine.paths.values())
    declared = {*engine.paths, *twins, *engine.conditions}
    for name in sorted(counts.keys() - declared):
        problem = f"{name!r} was counted, and is in neither paths nor conditions"
        raise MixDivergence(type(engine), mix, problem, kind=f"counts {name}")
    for name, path in engine.paths.items():
        if counts[name] and (exclusion := path.describe_exclusion(mix.options)):
            problem = f"path {name!r} was counted, {exclusion}"
            raise MixDivergence(type(engine), mix, problem, kind=f"counts {name}")
    return counts


def run_mix(adapter: type[EngineAdapter], mix: RequestMix) -> Counter[str]:
    """Serve a mix and return its path counts; raise ``MixDivergence`` on a wrong completion."""
    with failing_on(adapter, mix):
        return MixRun(adapter, mix).run()


@contextmanager
def failing_on(adapter: type[EngineAdapter], mix: RequestMix) -> Iterator[None]:
    """Turn hangs, a lost target and errors found by the adapter into ``MixDivergence``."""
    try:
        yield
    except TargetGoneError as gone:
        problem = f"{gone.subject_name} stopped answering while this mix was served: {gone}"
        raise MixDivergence(adapter, mix, problem, kind="gone") from gone
    except AdapterFinding as finding:
        raise MixDivergence(adapter, mix, str(finding), kind=type(finding).__name__) from finding
    except InvalidReturnValue as wrong:
        raise MixDivergence(adapter, mix, str(wrong), kind=wrong.kind) from None
    except StepHung as hung:
        raise MixDivergence(adapter, mix, f"a step {hung}", kind="hung") from hung


def run_forks(adapter: type[EngineAdapter], mix: RequestMix) -> Counter[str]:
    """Fork the mix's first prompt for each of its samplings; compare the forks with requests."""
    mix = room_for_forks(mix)
    with failing_on(adapter, mix):
        engine = _make_adapter(adapter)
        for number, fork in enumerate(served_forks(engine, mix)):
            if fork.diverged_at is not None:
                outputs = f"got {fork.actual}; alone it gets {fork.expected}"
                problem = f"fork {number} of request 0's prompt {outputs}"
                raise MixDivergence(adapter, mix, problem, kind="tokens of a fork")
        if leaks := engine.find_leaks():
            problem = f"every fork was released, and the engine still holds {leaks}"
            raise MixDivergence(adapter, mix, problem, kind="leaks")
        return _paths(engine, mix)


def room_for_forks(mix: RequestMix) -> RequestMix:
    """Return the mix with a cache that is large enough for all forks.

    Engines make no promise for forks that run out of blocks.
    """
    max_new_tokens = max(spec.sampling.max_new_tokens for spec in mix.requests)
    each = len(mix.requests[0].prompt) + max_new_tokens + mix.block_size
    return replace(mix, cache_tokens=each * len(mix.requests))


@dataclass(frozen=True, slots=True)
class ServedFork:
    """The output of one fork of a prompt, and its output alone."""

    expected: list[int]
    actual: list[int]
    diverged_at: int | None
    """Index of the first wrong token, near ties left out; None if all are right."""


def served_forks(engine: EngineAdapter, mix: RequestMix) -> Iterator[ServedFork]:
    """Serve the forks of the mix's first prompt, and each fork as a request alone."""
    engine.make(mix)
    prompt = mix.requests[0].prompt
    samplings = [spec.sampling for spec in mix.requests]
    try:
        forks = engine.fork(prompt, samplings)
    except _COMPLETE:
        raise
    except Exception as error:
        name = type(error).__name__
        problem = f"fork() raised {name}: {error}"
        raise MixDivergence(type(engine), mix, problem, kind=f"raised {name}") from error
    if len(forks) != len(samplings):
        expected_value = f"{len(samplings)} lists of tokens, one for each sampling"
        raise_invalid(call_of(type(engine), "fork"), forks, expected_value)
    for actual, sampling in zip(map(list, forks), samplings, strict=True):
        CURRENT_EXAMPLE.step_began_at = process_time()
        expected = [*engine.generate_alone(prompt, sampling, mix)]
        same = enumerate(zip(expected, actual, strict=False))
        at = next((at for at, (a, b) in same if a != b), None)
        if at is not None and engine.is_near_tie([*prompt, *actual[:at]], sampling, mix):
            at = None
        elif at is None and len(actual) != len(expected):
            at = min(len(actual), len(expected))
        yield ServedFork(expected, actual, at)


# Timelines of a mix that is served once more.


def timeline_of(adapter: type[EngineAdapter], mix: RequestMix) -> Timeline:
    """Return the timeline of a mix, up to the first wrong completion."""
    run = MixRun(adapter, mix)
    lines: list[RequestTimeline] = [_line(at) for at in range(mix.size)]
    step, ended = -1, False
    with suppress(Exception):  # the run that found the failure has reported it
        for step in run.steps():
            _note(run, lines, step)
        ended = True
    if not ended:
        step += 1
        _note(run, lines, step)
        if run.current_request:
            lines[run.current_request.number]["wrong"] = True
    for line, spec in zip(lines, run.settled().requests, strict=True):
        line["description"] = adapter.describe_request(spec)
    return {"steps": step + 1, "requests": lines}


def timeline_of_forks(adapter: type[EngineAdapter], mix: RequestMix) -> Timeline:
    """Return the timeline of the forks of a mix's first prompt, which one call serves."""
    lines: list[RequestTimeline] = [
        _line(at, f"fork {at} of request 0's prompt") for at in range(len(mix.requests))
    ]
    for line, fork in zip(lines, served_forks(adapter(), room_for_forks(mix)), strict=True):
        line["stages"], line["tokens"] = ["arrived", "ended"], [0, len(fork.actual)]
        line["expected"], line["actual"] = list(fork.expected), list(fork.actual)
        if fork.diverged_at is not None:
            line["diverged_at"], line["diverged_step"], line["wrong"] = fork.diverged_at, 1, True
    return {"steps": 2, "requests": lines}


def _line(number: int, description: str = "") -> RequestTimeline:
    return {
        "number": number,
        "description": description,
        "stages": [],
        "tokens": [],
        "expected": [],
        "actual": [],
        "diverged_at": None,
        "diverged_step": None,
        "wrong": False,
    }


def _note(run: MixRun, lines: list[RequestTimeline], step: int) -> None:
    for line in lines:
        line["stages"].append("")
        line["tokens"].append(0)
    for each in run.served:
        line = lines[each.number]
        tokens = list(run.adapter.tokens(each.request))
        previous = line["stages"][-2:-1]
        line["stages"][-1] = _stage(run, each, first=not any(line["stages"]), had=len(tokens))
        if previous and previous[0] in ("ended", "cancelled", "") and any(line["stages"][:-1]):
            line["stages"][-1] = ""
        line["tokens"][-1] = len(tokens)
        line["expected"], line["actual"] = list(each.expected), tokens
        diverged_at = _divergence_index(each, tokens, ended=run.adapter.is_finished(each.request))
        if diverged_at is not None and line["diverged_at"] is None:
            line["diverged_at"], line["diverged_step"], line["wrong"] = diverged_at, step, True


def _stage(run: MixRun, each: ServedRequest, *, first: bool, had: int) -> str:
    if run.adapter.is_finished(each.request):
        return "cancelled" if each.cancelled else "ended"
    if first:
        return "arrived"
    stages = filter(None, (observer.stage(each) for observer in run.observers))
    return next(stages, "decoding" if had else "arrived")


def _divergence_index(each: ServedRequest, actual: list[int], *, ended: bool) -> int | None:
    """Return the index of the first wrong token; None while all are right."""
    if each.near_tie_index is not None:
        return None
    pairs = enumerate(zip(each.expected, actual, strict=False))
    if (
        at := next((at for at, (right, actual_token) in pairs if right != actual_token), None)
    ) is not None:
        return at
    short = ended and not each.cancelled and len(actual) < len(each.expected)
    return (
        min(len(actual), len(each.expected)) if short or len(actual) > len(each.expected) else None
    )
