"""Ends of requests: the reason for each end, compared with the right one, and the kinds of ends."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.capabilities.return_values import is_text, returns
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixCondition,
    MixObserver,
)
from pytest_roseinfer.engine_capabilities.guides import is_complete, takes_guides
from pytest_roseinfer.engine_capabilities.sampling import eos_tokens
from pytest_roseinfer.engine_capabilities.text import FLUSHED, find_stop, is_certain
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.engine_capabilities.capability import EngineRun, ServedRequest

STOP_TOKEN, STOP_STRING, LENGTH, CANCELLED = "stop token", "stop string", "length", "cancelled"
GUIDE = "guide"
_STOP = "stop"
"""Reason of engines that do not tell stop tokens and stop strings apart."""
REASONS = (_STOP, STOP_TOKEN, STOP_STRING, GUIDE, LENGTH, CANCELLED, "error")


def _is_reason(value: Any) -> bool:
    return is_text(value) and value in REASONS


class EndingMethods:
    """Adapter methods for the ends of requests."""

    @optional
    @returns(_is_reason, f"one of {', '.join(REASONS)}")
    def finish_reason(self, request: Any) -> str:
        """Return the reason for the end of a finished request.

        It is ``stop token`` for the end-of-sequence token, ``stop string``, ``guide`` for one that
        is complete, ``length`` for the limit of its tokens, ``cancelled``, or ``error``, which
        fails the test; ``stop`` may stand for the first three. With ``eos_token``, the reason is
        also judged where that token is the last one allowed.
        """


# The right reason, from the tokens and the parameters of a request.


@dataclass(frozen=True, slots=True)
class Ending:
    """The right end of a request."""

    reason: str
    reasons: frozenset[str]
    """Reasons that an engine may report for it."""
    detail: str
    """Description for failure messages."""


def ending_of(adapter: Any, spec: Any, tokens: Sequence[int]) -> Ending:
    """Return the right end of a request that these tokens complete and that is not cancelled."""
    sampling = spec.sampling
    text = adapter.decode(tokens) if sampling.stop else ""
    if text and (span := find_stop(text, sampling.stop)):
        # An incomplete character that the end of the text flushes comes after another end.
        uncertain = set() if is_certain(adapter, tokens, span) else {LENGTH, STOP_TOKEN}
        detail = f"by its stop string {text[span[0] : span[1]]!r}"
        return Ending(STOP_STRING, frozenset({_STOP, STOP_STRING} | uncertain), detail)
    at_limit = len(tokens) >= sampling.max_new_tokens
    if is_complete(adapter, spec, tokens):
        reasons = {_STOP, STOP_TOKEN, GUIDE} | ({LENGTH} if at_limit else set())
        return Ending(GUIDE, frozenset(reasons), "as its guide is complete")
    ends = not sampling.ignore_eos and bool(tokens)
    known = eos_tokens(type(adapter))
    by_token = ends and (tokens[-1] in known or not at_limit)
    unknown = ends and at_limit and not known and adapter.defines("generate_alone")
    if by_token:
        detail = f"by token {adapter.spell(tokens[-1])}"
        return Ending(STOP_TOKEN, frozenset({_STOP, STOP_TOKEN}), detail)
    reasons = {LENGTH, _STOP, STOP_TOKEN} if unknown else {LENGTH}
    limit = format_count(sampling.max_new_tokens, "token")
    return Ending(LENGTH, frozenset(reasons), f"at its limit of {limit}")


_CANCELLED = Ending(CANCELLED, frozenset({CANCELLED}), "as it was cancelled")


class Endings(MixObserver):
    """Counter of the kinds of ends, and judge of their reasons."""

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._judged: set[int] = set()
        """Numbers of the requests that have ended."""

    def judge(self, served: ServedRequest) -> str:
        if not served.finished or served.number in self._judged:
            return ""
        self._judged.add(served.number)
        adapter = self.run.adapter
        right = _CANCELLED
        if not served.cancelled:
            right = ending_of(adapter, served.spec, served.tokens)
        self.counts[_condition(right.reason, len(served.tokens))] += 1
        at_limit = len(served.tokens) == served.spec.sampling.max_new_tokens
        self.counts[AT_LIMIT] += right.reason == STOP_TOKEN and at_limit
        by_other = right.reason == STOP_TOKEN and served.tokens[-1] in adapter.other_eos_tokens
        self.counts[BY_OTHER_TOKEN] += by_other
        if right.reason == STOP_STRING:
            self._count_stop_string(served)
        if not adapter.defines("finish_reason"):
            return ""
        reason = adapter.finish_reason(served.request)
        if reason in right.reasons:
            return ""
        return (
            f"{served.name} ended after {format_count(len(served.tokens), 'token')}, by its "
            f"finish_reason {reason!r}; it ends {right.detail}, so it must be {right.reason!r}"
        )

    def _count_stop_string(self, served: ServedRequest) -> None:
        stops, adapter = served.spec.sampling.stop, self.run.adapter
        text = adapter.decode(served.tokens)
        begin, end = find_stop(text, stops) or (0, 0)
        matched = text[begin:end]
        self.counts[NESTED] += any(matched in each for each in stops if each != matched)
        self.counts[FLUSHED] += not is_certain(adapter, served.tokens, (begin, end))

    def describe_end(self, served: ServedRequest) -> str:
        return ending_of(self.run.adapter, served.spec, served.expected).detail


# Conditions: each kind of end, at the first token and later.


def _condition(reason: str, num_tokens: int) -> str:
    name = reason.replace(" ", "_")
    if reason == CANCELLED:
        return f"{name}_{'later' if num_tokens else 'before_first_token'}"
    return f"ended_by_{name}_{'later' if num_tokens > 1 else 'at_first_token'}"


NESTED, AT_LIMIT = "ended_by_nested_stop_string", "ended_by_stop_token_at_limit"
BY_OTHER_TOKEN = "ended_by_other_stop_token"


def _has_stop_token(adapter: type[Any]) -> bool:
    return bool(eos_tokens(adapter))


def _has_other_stop_tokens(adapter: type[Any]) -> bool:
    return bool(adapter.other_eos_tokens)


def _has_text(adapter: type[Any]) -> bool:
    return bool(adapter.defines("pieces"))


def _can_cancel(adapter: type[Any]) -> bool:
    return bool(adapter.defines("cancel"))


def _is_never_required(_: type[Any]) -> bool:
    return False


def _conditions() -> list[MixCondition]:
    kinds = (
        (STOP_TOKEN, "the end-of-sequence token", _has_stop_token),
        (STOP_STRING, "a stop string", _has_text),
        (GUIDE, "its guide was complete", takes_guides),
        (LENGTH, "the most tokens that it may have", None),
    )
    conditions = []
    for reason, noun, required in kinds:
        first, later = _condition(reason, 1), _condition(reason, 2)
        # A guide of one token is rare.
        required_first = _is_never_required if reason == GUIDE else required
        conditions += [
            MixCondition(first, f"The first token of a request ended it: {noun}.", required_first),
            MixCondition(later, f"A later token of a request ended it: {noun}.", required),
        ]
    before, later = _condition(CANCELLED, 0), _condition(CANCELLED, 1)
    return [
        *conditions,
        MixCondition(
            AT_LIMIT, "The last token allowed was the end-of-sequence token.", _has_stop_token
        ),
        MixCondition(
            BY_OTHER_TOKEN,
            "A token of other_eos_tokens ended a request.",
            _has_other_stop_tokens,
        ),
        MixCondition(
            NESTED, "A request ended by a stop string inside another one of its own.", _has_text
        ),
        MixCondition(
            FLUSHED,
            "The last of a request's tokens left an incomplete character, which completed a stop "
            "string.",
            _is_never_required,
        ),
        MixCondition(before, "A request was cancelled before its first token.", _can_cancel),
        MixCondition(later, "A request was cancelled after its first token.", _can_cancel),
    ]


ENDINGS = EngineCapability(
    methods=EndingMethods,
    observers=(Endings,),
    conditions=_conditions(),
)
