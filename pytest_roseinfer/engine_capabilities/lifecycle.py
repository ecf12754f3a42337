"""The life of a request: forks of its prompt, its stages, and cancelling it."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.answers import are_tokens, is_number, is_text, list_of, returns
from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixObserver,
    RequestCore,
    change,
)
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import EngineRun, ServedRequest
else:
    from pytest_roseinfer.capabilities import strategies as st

STAGES = ("waiting", "prefilling", "decoding", "preempted")


@dataclass(frozen=True, kw_only=True)
class CancelFields(RequestCore):
    """The step at which a request is cancelled."""

    cancel_after: int | None = None
    """Steps from its arrival until it is cancelled; None for one that runs to its end."""


def _is_stage(shown: Any) -> bool:
    return is_text(shown) and shown in STAGES


class LifecycleMethods:
    """The methods about a request between its submission and its end."""

    never_idles: ClassVar[bool] = False
    """True if no more than ``extra_steps`` steps in a row bring no token while all requests that
    were submitted and go on are ``decoding`` by ``stage``, before the step and after it. A step
    with one that waits, is prefilled or was preempted is never judged."""

    @optional
    @returns(_is_stage, f"one of {', '.join(STAGES)}")
    def stage(self, request: Any) -> str:
        """Return ``waiting``, ``prefilling``, ``decoding`` or ``preempted``, for one that goes on.

        A failure says that its request was preempted before, and its timeline shows all stages.
        """

    @optional
    @returns(is_number, "a number of tokens")
    def cached_tokens(self, request: Any) -> int:
        """Return how many of its first tokens were served from the prefix cache, for a failure.

        That is when it last began; one that was preempted begins again.
        """

    @optional
    def cancel(self, request: Any) -> None:
        """End a request, which may have finished already. Without it, none is cancelled."""

    @optional
    @returns(list_of(are_tokens), "a list of tokens for each sampling")
    def fork(self, prompt: Sequence[int], samplings: Sequence[Any]) -> list[list[int]]:
        """Store the prompt once, complete it in each of these ways, and return the tokens of each.

        Each must be what ``generate_alone`` gives for it.
        """


# The past of a request, and idle steps.


_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


@dataclass(slots=True)
class Past:
    """What happened to a request by now."""

    stage: str = ""
    """Its stage when it was last looked at."""
    tokens: int = 0
    """Number of tokens that it had then."""
    preemptions: int = 0
    had: int = 0
    """Number of tokens that it had when it was preempted last."""
    cached: int = 0
    """Number of its first tokens that were served from the prefix cache."""

    def note(self, adapter: Any, request: Any, tokens: int) -> None:
        """Look at a request that went on and has so many tokens now."""
        self.tokens = tokens
        if adapter.defines("stage") and not adapter.is_finished(request):
            before, self.stage = self.stage, adapter.stage(request)
            if self.stage == "preempted" and before != "preempted":
                self.preemptions, self.had = self.preemptions + 1, tokens
        if adapter.defines("cached_tokens"):
            self.cached = adapter.cached_tokens(request)

    def words(self) -> str:
        """Return the past in words that a failure of the request ends with."""
        words = ""
        if self.cached:
            first = "token was" if self.cached == 1 else f"{self.cached} tokens were"
            words = f"; its first {first} found in the cache"
        if self.preemptions:
            last = f" {self.preemptions} times, last" if self.preemptions > 1 else ""
            when = f"after its {_ordinal(self.had)} token" if self.had else "before its first token"
            words += f"; it was preempted{last} {when}{' and came back' * self._is_back()}"
        return words

    def _is_back(self) -> bool:
        """Return True if it goes on again, or did: it got a token or is at another stage."""
        return self.tokens > self.had or self.stage != "preempted"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else _ENDINGS.get(number % 10, "th")
    return f"{number}{ending}"


@dataclass(slots=True)
class Idle:
    """The steps in a row, up to the latest, that brought no token although all were decoding."""

    steps: int = 0
    _before: Mapping[int, int] = field(default_factory=dict)
    """Numbers of tokens after the step before, by requests."""

    def note(self, now: Mapping[int, int]) -> None:
        """Look at how many tokens each request that goes on has, if all are decoding."""
        self.steps = self.steps + 1 if now and now == self._before else 0
        self._before = now

    def words(self) -> str:
        """Describe the idle steps, for a failure."""
        many = f"{self.steps} steps in a row" if self.steps > 1 else "a step"
        return f"requests {[*self._before]} were decoding, and {many} brought none of them a token"


class Stages(MixObserver):
    """Remembers what happened to each request, and sees that no step is idle."""

    any_of = ("stage", "cached_tokens")

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._pasts: dict[int, Past] = {}
        """What happened to each request, by its number."""
        self._idle = Idle()

    def note(self, served: ServedRequest) -> None:
        past = self._pasts.setdefault(served.number, Past())
        if not served.finished:
            past.note(self.run.adapter, served.request, len(served.tokens))

    def judge_step(self) -> str:
        going = [each for each in self.run.served if not each.finished]
        decoding = all(self._pasts[each.number].stage == "decoding" for each in going)
        self._idle.note({each.number: len(each.tokens) for each in going if decoding})
        adapter = self.run.adapter
        return (
            self._idle.words()
            if adapter.never_idles and self._idle.steps > adapter.extra_steps
            else ""
        )

    def past(self, served: ServedRequest) -> str:
        return self._pasts[served.number].words()

    def stage(self, served: ServedRequest) -> str:
        adapter = self.run.adapter
        return str(adapter.stage(served.request)) if adapter.defines("stage") else ""


def refuse_unknown_stages(adapter: type[Any]) -> None:
    if adapter.never_idles and "stage" not in adapter.abilities:
        raise TypeError(
            f"{adapter.__name__}.never_idles is True and must be judged by stage: define that too"
        )


# Cancelling requests.


class Cancellations(MixObserver):
    """Cancels requests when their time has come, and sees that they end."""

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
    """Draw when a request of a crowd is cancelled, if it is."""
    after: int | None = draw(st.sampled_from((None, None, None, None, 0, 1, 2, 4, 8)))
    return after


def let_run(adapter: type[Any], spec: Any) -> Any:
    """Return a request that nobody cancels, for an engine that cannot."""
    return spec if adapter.defines("cancel") else change(spec, cancel_after=None)


def words(spec: CancelFields) -> Iterator[str]:
    if spec.cancel_after is not None:
        yield f"cancelled {some(spec.cancel_after, 'step')} later"


LIFECYCLE = EngineCapability(
    methods=LifecycleMethods,
    renamed={"forked": "fork(prompt, samplings)"},
    fields=(CancelFields,),
    restrict=let_run,
    words=words,
    observers=(Stages, Cancellations),
    refuse=(refuse_unknown_stages,),
)
