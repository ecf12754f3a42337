"""The life of a request: its refusal, forks, stages, pauses, and its cancellation."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.capabilities.return_values import (
    are_tokens,
    is_text,
    list_of,
    returns,
)
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixCondition,
    MixObserver,
    RequestCore,
    change,
)
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import EngineRun, ServedRequest
else:
    from pytest_roseinfer.capabilities import strategies as st

STAGES = ("waiting", "prefilling", "decoding", "preempted")


@dataclass(frozen=True, kw_only=True)
class CancelFields(RequestCore):
    """Fields of the cancellation of a request."""

    cancel_after: int | None = None
    """Steps from its arrival until it is cancelled; None if it runs to its end."""


@dataclass(frozen=True, kw_only=True)
class PauseFields(RequestCore):
    """Fields of the pause of a request."""

    pause_after: int | None = None
    """Steps from its arrival until it is paused; None if it is not."""
    pause_steps: int = 0
    """Steps from its pause until it is resumed."""


@dataclass(frozen=True, kw_only=True)
class RefusalFields(RequestCore):
    """Field of the refusals before a request."""

    refused_before: int = 0
    """Tokens that do not fit the cache, of two requests that are submitted right before it and must
    be refused: one with a long prompt, and one with many new tokens; 0 for none."""


def _are_errors(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(each, type) and issubclass(each, Exception) for each in value
    )


def _is_stage(value: Any) -> bool:
    return is_text(value) and value in STAGES


class LifecycleMethods:
    """Adapter methods for the life of a request."""

    never_idles: ClassVar[bool] = False
    """True if at most ``extra_steps`` steps in a row generate no token while all unfinished
    requests are ``decoding`` by ``stage``, before and after the step. A step with a request that is
    waiting, prefilling or preempted is never judged."""

    @optional
    @returns(_is_stage, f"one of {', '.join(STAGES)}")
    def stage(self, request: Any) -> str:
        """Return the stage of an unfinished request.

        It is ``waiting``, ``prefilling``, ``decoding`` or ``preempted``. Failure messages mention
        earlier preemptions of a request, and its timeline shows all stages.
        """

    @optional
    def pause(self, request: Any) -> None:
        """Pause an unfinished request: it gets no more tokens until it is resumed.

        Tokens in flight may still come: those of at most ``extra_steps`` steps, at any time.
        """

    @optional
    def resume(self, request: Any) -> None:
        """Resume a request that was paused and has not ended."""

    @optional
    @returns(_are_errors, "a tuple of exception types")
    def refusals(self, prompt: Sequence[int], sampling: Any, mix: Any) -> tuple[type, ...]:
        """Return the errors of which ``submit`` must raise one, for a request that can never fit.

        It is empty for one that can be served, and where that is unknown. The harness passes
        requests whose tokens take more blocks than the cache has, and the shortest prompt for which
        there are errors: if a model has 160 positions, one of 160 tokens.
        """

    @optional
    def cancel(self, request: Any) -> None:
        """End a request, which may have finished already. Without it, no request is cancelled."""

    @optional
    @returns(list_of(are_tokens), "a list of tokens for each sampling")
    def fork(self, prompt: Sequence[int], samplings: Sequence[Any]) -> list[list[int]]:
        """Store the prompt once, and return the tokens of its completion by each sampling.

        Each completion must equal that of ``generate_alone``.
        """


# Stages and idle steps


_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


@dataclass(slots=True)
class RequestPast:
    """The past of a request: its preemptions, and its tokens from the prefix cache."""

    stage: str = ""
    """Stage after the latest step."""
    tokens: int = 0
    """Number of tokens after the latest step."""
    preemptions: int = 0
    tokens_at_preemption: int = 0
    """Number of tokens at the latest preemption."""
    cached: int = 0
    """Number of prompt tokens served from the prefix cache."""

    def note(self, adapter: Any, request: Any, tokens: int) -> None:
        """Record the stage of an unfinished request, which has this number of tokens now."""
        self.tokens = tokens
        if adapter.defines("stage") and not adapter.is_finished(request):
            before, self.stage = self.stage, adapter.stage(request)
            if self.stage == "preempted" and before != "preempted":
                self.preemptions, self.tokens_at_preemption = self.preemptions + 1, tokens
        if adapter.defines("cached_tokens"):
            self.cached = adapter.cached_tokens(request)

    def describe(self) -> str:
        """Describe the past, for the end of a failure message."""
        parts = ""
        if self.cached:
            first = "token was" if self.cached == 1 else f"{self.cached} tokens were"
            parts = f"; its first {first} found in the cache"
        if self.preemptions:
            last = f" {self.preemptions} times, last" if self.preemptions > 1 else ""
            when = (
                f"after its {_ordinal(self.tokens_at_preemption)} token"
                if self.tokens_at_preemption
                else "before its first token"
            )
            parts += f"; it was preempted{last} {when}{' and came back' * self._is_back()}"
        return parts

    def _is_back(self) -> bool:
        """Return True if it has resumed: it got a token, or is at another stage."""
        return self.tokens > self.tokens_at_preemption or self.stage != "preempted"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else _ENDINGS.get(number % 10, "th")
    return f"{number}{ending}"


@dataclass(slots=True)
class IdleSteps:
    """Counter of consecutive steps without a token although all requests were decoding."""

    steps: int = 0
    """Idle steps in a row, up to the latest step."""
    _before: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens of each request after the previous step."""

    def note(self, now: Mapping[int, int]) -> None:
        """Record the tokens of each unfinished request; empty if one is not decoding."""
        self.steps = self.steps + 1 if now and now == self._before else 0
        self._before = now

    def describe(self) -> str:
        """Describe the idle steps, for a failure message."""
        many = f"{self.steps} steps in a row" if self.steps > 1 else "a step"
        return f"requests {[*self._before]} were decoding, and {many} generated no token for them"


class Stages(MixObserver):
    """Recorder of the past of each request, and judge of idle steps."""

    any_of = ("stage", "cached_tokens")

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._pasts: dict[int, RequestPast] = {}
        """Past of each request, by its number."""
        self._idle = IdleSteps()

    def note(self, served: ServedRequest) -> None:
        past = self._pasts.setdefault(served.number, RequestPast())
        if not served.finished:
            past.note(self.run.adapter, served.request, len(served.tokens))

    def judge_step(self) -> str:
        running = [each for each in self.run.served if not each.finished]
        decoding = all(
            self._pasts[each.number].stage == "decoding" and not each.paused for each in running
        )
        self._idle.note({each.number: len(each.tokens) for each in running if decoding})
        adapter = self.run.adapter
        return (
            self._idle.describe()
            if adapter.never_idles and self._idle.steps > adapter.extra_steps
            else ""
        )

    def describe_past(self, served: ServedRequest) -> str:
        return self._pasts[served.number].describe()

    def stage(self, served: ServedRequest) -> str:
        adapter = self.run.adapter
        return str(adapter.stage(served.request)) if adapter.defines("stage") else ""


def refuse_unknown_stages(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for ``never_idles`` without ``stage``."""
    if adapter.never_idles and "stage" not in adapter.abilities:
        raise TypeError(
            f"{adapter.__name__}.never_idles is True, which needs stage: define that too"
        )


# Cancellation


class Cancellations(MixObserver):
    """Canceller of requests at their steps, and judge that they end."""

    any_of = ("cancel",)

    def act(self, step: int) -> str:
        adapter = self.run.adapter
        for each in self.run.served:
            after = each.spec.cancel_after
            if after is not None and each.spec.arrival + after == step:
                each.cancelled = not adapter.is_finished(each.request)
                adapter.cancel(each.request)
                if not adapter.is_finished(each.request):
                    return f"{each.name} was cancelled and goes on"
        return ""


# Pauses and refusals


PAUSED_EARLY, PAUSED_LATER = "paused_before_first_token", "paused_later"
REFUSED = "request_refused"


class Pauses(MixObserver):
    """Pauser of requests, and judge that they get no tokens until they are resumed."""

    any_of = ("pause",)

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._step = 0
        self._late: Counter[int] = Counter()
        """Number of steps that generated tokens of each request during its pause."""

    def act(self, step: int) -> str:
        self._step, adapter = step, self.run.adapter
        for each in self.run.served:
            after = each.spec.pause_after
            if after is None or adapter.is_finished(each.request):
                continue
            pause = each.spec.arrival + after
            if step == pause:
                has_begun = len(adapter.tokens(each.request)) > 0
                adapter.pause(each.request)
                each.paused = True
                self.counts[PAUSED_LATER if has_begun else PAUSED_EARLY] += 1
            if step == pause + each.spec.pause_steps:
                adapter.resume(each.request)
                each.paused = False
        return ""

    def judge(self, served: ServedRequest) -> str:
        steps = self._step - served.spec.arrival - (served.spec.pause_after or 0)
        # Tokens that are seen right after its pause were generated before.
        if not (served.paused and served.new_tokens and steps):
            return ""
        self._late[served.number] += 1
        if self._late[served.number] <= self.run.adapter.extra_steps:
            return ""
        return f"{served.name} has been paused for {format_count(steps, 'step')} and got a token"

    def added_steps(self) -> int:
        paused = [each for each in self.run.mix.requests if each.pause_after is not None]
        return sum(each.pause_steps + int(each.max_tokens) for each in paused)


class Refusals(MixObserver):
    """Submitter of requests that can never fit, and judge that they are refused."""

    any_of = ("refusals",)

    def act(self, step: int) -> str:
        if not step and (problem := self._describe_acceptance(*self._shortest_prompt())):
            return problem
        for spec in self.run.mix.requests:
            if spec.arrival == step and spec.refused_before:
                for prompt, sampling in self._oversized(spec):
                    if problem := self._describe_acceptance(prompt, sampling):
                        return problem
        return ""

    def _shortest_prompt(self) -> tuple[Sequence[int], Any]:
        """Return the shortest prompt that must be refused, and parameters with one new token.

        A model with 160 positions must refuse one of 160 tokens, even if they fit the cache.
        """
        adapter, mix, spec = self.run.adapter, self.run.mix, self.run.mix.requests[0]
        sampling = replace(spec.sampling, max_new_tokens=1)
        beyond = (mix.cache_tokens // mix.block_size + 1) * mix.block_size + 1

        def prompt_of(length: int) -> Sequence[int]:
            return ((*spec.prompt,) * length)[:length]

        def must_be_refused(length: int) -> bool:
            return bool(adapter.refusals(prompt_of(length), sampling, mix))

        lengths = range(1, beyond)
        return prompt_of(1 + bisect_left(lengths, True, key=must_be_refused)), sampling

    def _oversized(self, spec: Any) -> Iterator[tuple[Sequence[int], Any]]:
        """Yield a prompt that is too long, and parameters with too many new tokens."""
        size = self.run.mix.block_size
        stored = -(-self.run.mix.cache_tokens // size) * size + spec.refused_before
        prompt = (spec.prompt * stored)[:stored]
        yield prompt, replace(spec.sampling, max_new_tokens=1)
        # The last token is never stored.
        new = stored - len(spec.prompt) + 1
        yield spec.prompt, replace(spec.sampling, max_new_tokens=new)

    def _describe_acceptance(self, prompt: Sequence[int], sampling: Any) -> str:
        """Submit an oversized request; describe the problem if it is accepted."""
        adapter, mix = self.run.adapter, self.run.mix
        errors = adapter.refusals(prompt, sampling, mix)
        if not errors:
            return ""
        try:
            adapter.submit(prompt, sampling)
        except errors:
            self.counts[REFUSED] += 1
            return ""
        names = " or ".join(each.__name__ for each in errors)
        return (
            f"a request of {format_count(len(prompt), 'token')} for up to "
            f"{sampling.max_new_tokens} new ones was accepted, in a cache of {mix.cache_tokens}: "
            f"submit must raise {names}"
        )


def draw_pause_and_refusals(draw: st.DrawFn, adapter: type[Any], spec: Any) -> Any:
    """Draw the pause of a request, and the refusals before it.

    A request with prompt logprobs is often paused, since it may then restart within its prompt.
    """
    in_prompt = getattr(spec.sampling, "prompt_logprobs", False)
    goes_on = (False,) * (1 if in_prompt else 7)
    if adapter.defines("pause") and draw(st.sampled_from((*goes_on, True))):
        after = draw(st.sampled_from((1, 2, 1, 3) if in_prompt else (0, 1, 2, 3, 5)))
        steps = draw(st.sampled_from((1, 2, 5)))
        spec = change(spec, pause_after=after, pause_steps=steps)
    if adapter.defines("refusals") and draw(st.sampled_from((False,) * 7 + (True,))):
        spec = change(spec, refused_before=draw(st.sampled_from((1, 1, 2, 30))))
    return spec


def draw_cancel_after(draw: st.DrawFn) -> int | None:
    """Draw the steps until a request of a large mix is cancelled; mostly None."""
    after: int | None = draw(st.sampled_from((None, None, None, None, 0, 1, 2, 4, 8)))
    return after


def let_run(adapter: type[Any], spec: Any) -> Any:
    """Return a request without the events that an engine does not support."""
    if not adapter.defines("cancel"):
        spec = change(spec, cancel_after=None)
    if not adapter.defines("pause"):
        spec = change(spec, pause_after=None, pause_steps=PauseFields.pause_steps)
    return spec if adapter.defines("refusals") else change(spec, refused_before=0)


def describe(spec: Any) -> Iterator[str]:
    """Describe the refusals before a request, its pause and its cancellation."""
    if spec.refused_before:
        yield f"after two that exceed the cache by {format_count(spec.refused_before, 'token')}"
    if spec.pause_after is not None:
        steps = format_count(spec.pause_steps, "step")
        yield f"paused for {steps} from {format_count(spec.pause_after, 'step')} later on"
    if spec.cancel_after is not None:
        yield f"cancelled {format_count(spec.cancel_after, 'step')} later"


def _defines(name: str) -> Callable[[type[Any]], bool]:
    return lambda adapter: bool(adapter.defines(name))


LIFECYCLE = EngineCapability(
    methods=LifecycleMethods,
    renamed={"forked": "fork(prompt, samplings)"},
    needs={"pause": ("resume",), "resume": ("pause",)},
    fields=(CancelFields, PauseFields, RefusalFields),
    draw=draw_pause_and_refusals,
    restrict=let_run,
    describe=describe,
    observers=(Stages, Refusals, Pauses, Cancellations),
    conditions=(
        MixCondition(
            PAUSED_EARLY, "A request was paused before its first token.", _defines("pause")
        ),
        MixCondition(
            PAUSED_LATER, "A request was paused after its first token.", _defines("pause")
        ),
        MixCondition(REFUSED, "A request that can never fit was refused.", _defines("refusals")),
    ),
    refuse=(refuse_unknown_stages,),
)
