"""The life of a request: forks of its prompt, its stages, and its cancellation."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass, field
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
    MixObserver,
    RequestCore,
    change,
)
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
        decoding = all(self._pasts[each.number].stage == "decoding" for each in running)
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


def draw_cancel_after(draw: st.DrawFn) -> int | None:
    """Draw the steps until a request of a large mix is cancelled; mostly None."""
    after: int | None = draw(st.sampled_from((None, None, None, None, 0, 1, 2, 4, 8)))
    return after


def let_run(adapter: type[Any], spec: Any) -> Any:
    """Return a request without cancellation for an engine that cannot cancel."""
    return spec if adapter.defines("cancel") else change(spec, cancel_after=None)


def describe(spec: CancelFields) -> Iterator[str]:
    """Describe the cancellation of a request."""
    if spec.cancel_after is not None:
        yield f"cancelled {format_count(spec.cancel_after, 'step')} later"


LIFECYCLE = EngineCapability(
    methods=LifecycleMethods,
    renamed={"forked": "fork(prompt, samplings)"},
    fields=(CancelFields,),
    restrict=let_run,
    describe=describe,
    observers=(Stages, Cancellations),
    refuse=(refuse_unknown_stages,),
)
