"""Guides: completions that must match a constraint, token by token.

The harness computes the tokens of a guided request itself: each is the argmax of the model's logits
among those that the guide allows.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.capabilities.return_values import are_tokens, returns
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixCondition,
    MixObserver,
    RequestCore,
    SamplingCore,
    change,
)
from pytest_roseinfer.engine_capabilities.sampling import (
    eos_tokens,
    may_be_chosen,
    permitted_logits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import EngineRun, ServedRequest
else:
    from pytest_roseinfer.capabilities import numpy as np
    from pytest_roseinfer.capabilities import strategies as st


@dataclass(frozen=True)
class GuideFields(SamplingCore):
    """Parameter of guided requests."""

    guide: str | None = None
    """One of the adapter's ``guides``, which the completion must match; None for free text."""


@dataclass(frozen=True, kw_only=True)
class GuidedFields(RequestCore):
    """Guide of a request, before it is settled."""

    guided_by: str | None = None
    """Guide that settling passes to ``submit``; None for free text."""


class GuideMethods:
    """Adapter methods and declarations for guided requests."""

    guides: ClassVar[Sequence[str]] = ()
    """Guides that requests may have, in the engine's own notation, such as regular expressions.
    ``submit`` gets one as ``sampling.guide``."""

    @optional
    @returns(are_tokens, "a list of tokens")
    def allowed_tokens(self, guide: str, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens that may follow these, which are a completion so far, by its guide.

        They are found without the engine. They include ``eos_token`` where the completion may end;
        there are none where it ends by itself. Guided requests are greedy, without stop strings or
        logprobs, and go on past the end of the text. ``generate_alone`` gets no guide.
        """


GUIDED = "guided"
GUIDED_DIFFERENTLY = "guided_differently"
GUIDED_RESTARTED = "guided_restarted"


def is_complete(adapter: Any, spec: Any, tokens: Sequence[int]) -> bool:
    """Return True if a request has a guide and its completion ends after these tokens."""
    guide = getattr(spec.sampling, "guide", None)
    return guide is not None and not adapter.allowed_tokens(guide, tokens)


class Guides(MixObserver):
    """Counter of guided requests; their tokens are compared like those of others."""

    any_of = ("allowed_tokens",)

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._preempted: set[int] = set()
        """Numbers of the guided requests that were preempted after the latest step."""

    def note(self, served: ServedRequest) -> None:
        adapter, number = self.run.adapter, served.number
        if served.spec.sampling.guide is None:
            return
        self.counts[GUIDED] += len(served.new_tokens) > 0
        if served.new_tokens and number in self._preempted:
            self._preempted.remove(number)
            self.counts[GUIDED_RESTARTED] += 1
        shows_stage = adapter.defines("stage") and not adapter.is_finished(served.request)
        if shows_stage and served.tokens and adapter.stage(served.request) == "preempted":
            self._preempted.add(number)

    def describe_past(self, served: ServedRequest) -> str:
        """Name the first token that the guide of a request rules out."""
        adapter, guide = self.run.adapter, served.spec.sampling.guide
        if guide is None:
            return ""
        ruled_out = (
            token
            for at, token in enumerate(served.tokens)
            if (allowed := adapter.allowed_tokens(guide, served.tokens[:at]))
            and token not in allowed
        )
        first = next(ruled_out, None)
        return "" if first is None else f"; its guide rules out {adapter.spell(first)} there"

    def judge_step(self) -> str:
        guides = {each.spec.sampling.guide for each in self.run.served if each.new_tokens}
        self.counts[GUIDED_DIFFERENTLY] += len(guides) > 1
        return ""


# Drawing, describing and settling.


def draw_guides(draw: st.DrawFn, adapter: type[Any], specs: Sequence[Any]) -> list[Any]:
    """Draw guides for some of the requests of a few mixes.

    A guide keeps its request from some fast paths, so most mixes have none.
    """
    if not (takes_guides(adapter) and draw(st.sampled_from((False,) * 7 + (True,)))):
        return [*specs]
    guides = (*adapter.guides, None)
    drawn = [change(each, guided_by=draw(st.sampled_from(guides))) for each in specs]
    return [restrict_to_guide(adapter, _often_paused(draw, adapter, each)) for each in drawn]


def _often_paused(draw: st.DrawFn, adapter: type[Any], spec: Any) -> Any:
    """Draw a pause after some tokens of a guided request: it restarts within its guide."""
    if not (spec.guided_by and adapter.defines("pause") and draw(st.booleans())):
        return spec
    return change(spec, pause_after=draw(st.sampled_from((2, 3, 5, 8))), pause_steps=2)


def restrict_to_guide(adapter: type[Any], spec: Any) -> Any:
    """Return a request without a guide that the engine lacks, or without what excludes one."""
    if spec.guided_by is None:
        return spec
    if not adapter.defines("allowed_tokens") or spec.guided_by not in adapter.guides:
        return change(spec, guided_by=None)
    sampling = {"temperature": 0.0, "ignore_eos": True, "logprobs": False, "top_logprobs": 0}
    return change(spec, **sampling, stop_spans=(), ends_early=False, ends_first=False)


def describe(spec: Any) -> Iterator[str]:
    """Describe the guide of a request."""
    if guide := spec.sampling.guide or spec.guided_by:
        yield f"guided by {guide!r}"


def settle_guide(adapter: Any, spec: Any, expected: list[int], mix: Any) -> tuple[Any, list[int]]:
    """Set the guide of a request, and compute its tokens.

    The request ends before a token that rounding could change; without any, it has no guide.
    """
    guide = spec.guided_by
    spec = change(spec, guided_by=None)
    if guide is None:
        return spec, expected
    tokens: list[int] = []
    sampling = replace(spec.sampling, guide=guide)
    while len(tokens) < sampling.max_new_tokens and adapter.allowed_tokens(guide, tokens):
        before = [*spec.prompt, *tokens]
        logits = permitted_logits(adapter, sampling, before, len(spec.prompt), mix)
        rounding = adapter.rounding
        (best, *ties) = np.flatnonzero(
            may_be_chosen(logits, sampling, before, len(spec.prompt), rounding)
        ).tolist()
        if ties:
            sampling = replace(sampling, max_new_tokens=max(1, len(tokens)))
            break
        tokens.append(best)
        if best in eos_tokens(type(adapter)):
            break
    return (replace(spec, sampling=sampling), tokens) if tokens else (spec, expected)


def permit(adapter: Any, sampling: Any, tokens: Sequence[int]) -> Sequence[int] | None:
    """Return the tokens that the guide of a request allows next; None for free text."""
    if sampling.guide is None:
        return None
    allowed: Sequence[int] = adapter.allowed_tokens(sampling.guide, tokens)
    return allowed


def takes_guides(adapter: type[Any]) -> bool:
    """Return True for an engine with guides that requests may have."""
    return bool(adapter.defines("allowed_tokens") and adapter.guides)


def refuse_half_of_guides(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for ``guides`` without ``allowed_tokens``, or the reverse."""
    if bool(adapter.guides) != ("allowed_tokens" in adapter.abilities):
        raise TypeError(
            f"{adapter.__name__} must define both guides and allowed_tokens, or neither"
        )


def _shows_restarts(adapter: type[Any]) -> bool:
    return takes_guides(adapter) and bool(adapter.defines("stage"))


GUIDES = EngineCapability(
    methods=GuideMethods,
    needs={"allowed_tokens": ("logits",)},
    fields=(GuideFields, GuidedFields),
    restrict=restrict_to_guide,
    describe=describe,
    settle=settle_guide,
    permit=permit,
    observers=(Guides,),
    conditions=(
        MixCondition(GUIDED, "A step generated a token by a guide.", takes_guides),
        MixCondition(
            GUIDED_DIFFERENTLY,
            "A step generated tokens by different guides, or by one and without one.",
            takes_guides,
        ),
        MixCondition(
            GUIDED_RESTARTED,
            "A guided request was preempted after its first token and restarted.",
            _shows_restarts,
        ),
    ),
    refuse=(refuse_half_of_guides,),
)
