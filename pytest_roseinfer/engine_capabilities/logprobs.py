"""Logprobs of tokens, top logprobs, and prompt logprobs, compared with those of the model."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.capabilities.return_values import (
    are_floats,
    elements,
    is_float,
    is_number,
    list_of,
    returns,
)
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixCondition,
    MixObserver,
    SamplingCore,
    change,
)
from pytest_roseinfer.engine_capabilities.sampling import log_probabilities, logits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import (
        EngineRun,
        Floats,
        ServedRequest,
    )
else:
    from pytest_roseinfer.capabilities import numpy as np
    from pytest_roseinfer.capabilities import strategies as st


@dataclass(frozen=True)
class LogprobFields(SamplingCore):
    """Parameters of logprobs."""

    logprobs: bool = False
    """True if the request gets the log-probability of each token."""
    top_logprobs: int = 0
    """Number of top logprobs that the request gets for each token."""
    prompt_logprobs: bool = False
    """True if the request gets the log-probability of each token of its prompt."""


def _is_pair(value: Any) -> bool:
    pair = elements(value)
    return pair is not None and len(pair) == 2 and is_number(pair[0]) and is_float(pair[1])


def _is_float_or_none(value: Any) -> bool:
    return value is None or is_float(value)


class LogprobMethods:
    """Adapter methods that return logprobs."""

    @optional
    @returns(are_floats, "a list of numbers, one for each token")
    def logprobs(self, request: Any) -> Sequence[float]:
        """Return the log-probability of each token so far, if the request has ``logprobs``."""

    @optional
    @returns(
        list_of(list_of(_is_pair)),
        "a list of pairs for each token, each of a token and its log-probability",
    )
    def top_logprobs(self, request: Any) -> Sequence[Sequence[tuple[int, float]]]:
        """Return the top logprobs at the position of each token so far.

        They are pairs of a token and its log-probability, as many as the request's
        ``top_logprobs``, the highest first.
        """

    @optional
    @returns(
        list_of(_is_float_or_none),
        "a list of numbers, one for each token of the prompt, with None for the first",
    )
    def prompt_logprobs(self, request: Any) -> Sequence[float | None]:
        """Return the log-probability of each token of the prompt, None for the first.

        It is called if the request has ``prompt_logprobs``, at its first token and at its end.
        """


_SUM_ERROR = 1e-5
"""Largest error of log-probabilities in float32."""
_FEW_TOKENS = 4
IN_CHUNKS, RESTARTED = "prompt_logprobs_in_chunks", "prompt_logprobs_restarted"
RESTARTED_LATER = "prompt_logprobs_restarted_later"


class Logprobs(MixObserver):
    """Judge of logprobs, which must be those of the model's logits before any sampling."""

    any_of = ("logprobs", "prompt_logprobs")

    def __init__(self, run: EngineRun) -> None:
        super().__init__(run)
        self._stages: dict[int, str] = {}
        """Stage of each request with prompt logprobs after the latest step, by its number."""
        self._judged: dict[int, bool] = {}
        """Requests whose prompt logprobs were judged, by number: True if that was at their end."""

    def note(self, served: ServedRequest) -> None:
        adapter, number = self.run.adapter, served.number
        if not (adapter.defines("stage") and self._wants(served, "prompt_logprobs")):
            return
        ended = served.finished or adapter.is_finished(served.request)
        stage = "" if ended else adapter.stage(served.request)
        before = self._stages.get(number)
        self._stages[number] = stage
        self.counts[IN_CHUNKS] += before != stage == "prefilling" and not served.tokens
        if before == "preempted" != stage and not served.cancelled:
            self.counts[RESTARTED_LATER if served.num_tokens_before else RESTARTED] += 1

    def judge(self, served: ServedRequest) -> str:
        logprobs = self._of_tokens(served, "logprobs")
        top = self._of_tokens(served, "top_logprobs")
        for name, of_tokens in (("logprobs", logprobs), ("top logprobs", top)):
            if of_tokens is not None and len(of_tokens) != len(served.tokens):
                return f"{served.name} has {len(served.tokens)} tokens and {len(of_tokens)} {name}"
        text = [*served.spec.prompt, *served.tokens]
        for at in served.new_tokens:
            place, wrong = len(served.spec.prompt) + at, ""
            if logprobs is not None:
                wrong = self._wrong_logprob(text[:place], text[place], logprobs[at])
            if top is not None:
                num_top = served.spec.sampling.top_logprobs
                wrong = wrong or self._wrong_top(text[:place], top[at], num_top)
            if wrong:
                return f"{served.name}, token {at}: {wrong}"
        return self._judge_prompt(served)

    def _judge_prompt(self, served: ServedRequest) -> str:
        """Judge prompt logprobs at the first token, and again at the end: none may change."""
        is_due = served.tokens and self._judged.get(served.number) is not served.finished
        if not is_due or served.cancelled or not self._wants(served, "prompt_logprobs"):
            return ""
        self._judged[served.number] = served.finished
        logprobs = self.run.adapter.prompt_logprobs(served.request)
        wrong = self._wrong_prompt(served.spec.prompt, logprobs)
        return wrong and f"{served.name}: {wrong}"

    def _wants(self, served: ServedRequest, name: str) -> bool:
        return self.run.adapter.defines(name) and bool(getattr(served.spec.sampling, name))

    def _of_tokens(self, served: ServedRequest, name: str) -> Sequence[Any] | None:
        """Return the logprobs of the tokens so far; None for a request without logprobs."""
        if not self._wants(served, name):
            return None
        logprobs: Sequence[Any] = getattr(self.run.adapter, name)(served.request)
        return logprobs

    def _wrong_logprob(self, before: Sequence[int], token: int, actual: float) -> str:
        logits = logits_of(self.run.adapter, before, self.run.mix)
        right = float(log_probabilities(logits)[token])
        if abs(actual - right) <= self._room(logits):
            return ""
        return f"log-probability {actual:.6g}; by the model it is {right:.6g}"

    def _wrong_top(
        self, before: Sequence[int], top: Sequence[tuple[int, float]], num_top: int
    ) -> str:
        logits = logits_of(self.run.adapter, before, self.run.mix)
        right = log_probabilities(logits)
        ids = [token for token, _ in top]
        many = min(num_top, len(right))
        tokens = {*ids} & {*range(len(right))}
        if len(tokens) != len(ids) or len(ids) != many:
            return f"top logprobs are of {ids}; they must be of {many} different tokens"
        room = self._room(logits)
        for at, ((token, value), lowest) in enumerate(zip(top, np.sort(right)[::-1], strict=False)):
            if abs(value - right[token]) > room:
                return (
                    f"top log-probability of {token} {value:.6g}; by the model {right[token]:.6g}"
                )
            if abs(right[token] - lowest) > room:
                return f"top logprobs are of {ids}; by the model {token} is not number {at + 1}"
        return ""

    def _wrong_prompt(self, prompt: Sequence[int], logprobs: Sequence[float | None]) -> str:
        if len(logprobs) != len(prompt) or logprobs[0] is not None:
            return (
                f"prompt logprobs are {[*logprobs]}; there must be one for each of its "
                f"{len(prompt)} tokens, with None for the first"
            )
        for at in range(1, len(prompt)):
            value = logprobs[at]
            if value is None:
                return f"prompt logprobs have None for token {at}"
            if wrong := self._wrong_logprob(prompt[:at], prompt[at], value):
                return f"token {at} of its prompt: {wrong}"
        return ""

    def _room(self, logits: Floats) -> float:
        """Return the largest allowed error of log-probabilities from these logits."""
        return 2 * float(self.run.adapter.rounding) * float(np.abs(logits).max()) + _SUM_ERROR


def draw_logprobs(draw: st.DrawFn, adapter: type[Any], spec: Any) -> Any:
    """Draw the logprob parameters that an adapter class supports."""
    values: dict[str, Any] = {}
    if adapter.defines("logprobs"):
        values["logprobs"] = draw(st.sampled_from((True, False, True, False)))
    if values.get("logprobs") and adapter.defines("top_logprobs"):
        values["top_logprobs"] = draw(st.sampled_from((0, 1, 4, 20)))
    if adapter.defines("prompt_logprobs"):
        # A prompt of a few tokens is hardly ever computed in chunks.
        rarely = (False,) * (3 if len(spec.prompt) > _FEW_TOKENS else 7)
        values["prompt_logprobs"] = draw(st.sampled_from((*rarely, True)))
    return change(spec, **values)


def describe(spec: Any) -> Iterator[str]:
    """Describe the logprob parameters of a request."""
    sampling: LogprobFields = spec.sampling
    if sampling.logprobs:
        yield "with logprobs"
    if sampling.top_logprobs:
        yield f"with {sampling.top_logprobs} top logprobs"
    if sampling.prompt_logprobs:
        yield "with prompt logprobs"


def _shows_restarts(adapter: type[Any]) -> bool:
    return bool(adapter.defines("prompt_logprobs") and adapter.defines("stage"))


LOGPROBS = EngineCapability(
    methods=LogprobMethods,
    needs={
        "logprobs": ("logits",),
        "top_logprobs": ("logprobs",),
        "prompt_logprobs": ("logits",),
    },
    fields=(LogprobFields,),
    draw=draw_logprobs,
    describe=describe,
    observers=(Logprobs,),
    conditions=(
        MixCondition(
            IN_CHUNKS,
            "A step stored a part of a prompt whose logprobs were requested.",
            _shows_restarts,
        ),
        MixCondition(
            RESTARTED,
            "A request with prompt logprobs was preempted and restarted before its first token.",
            _shows_restarts,
        ),
        MixCondition(RESTARTED_LATER, "The same, after its first token.", _shows_restarts),
    ),
)
