"""Logprobs of tokens, of the top tokens at each place, and of prompts, held to the model's own."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.capabilities.answers import (
    are_floats,
    elements,
    is_float,
    is_number,
    list_of,
    returns,
)
from pytest_roseinfer.capabilities.capability import optional
from pytest_roseinfer.engine_capabilities.capability import (
    EngineCapability,
    MixObserver,
    SamplingCore,
    change,
)
from pytest_roseinfer.engine_capabilities.sampling import log_probabilities, logits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from hypothesis import strategies as st

    from pytest_roseinfer.engine_capabilities.capability import Floats, ServedRequest
else:
    from pytest_roseinfer.capabilities import numpy as np
    from pytest_roseinfer.capabilities import strategies as st


@dataclass(frozen=True)
class LogprobFields(SamplingCore):
    """The logprobs that a request gets with its tokens."""

    logprobs: bool = False
    """True if it gets the log-probability of each token."""
    top_logprobs: int = 0
    """Number of the tokens of the highest logits whose log-probabilities it gets, at the place of
    each token."""
    prompt_logprobs: bool = False
    """True if it gets the log-probability of each token of its prompt."""


def _is_pair(shown: Any) -> bool:
    pair = elements(shown)
    return pair is not None and len(pair) == 2 and is_number(pair[0]) and is_float(pair[1])


def _is_float_or_none(shown: Any) -> bool:
    return shown is None or is_float(shown)


class LogprobMethods:
    """The methods that return logprobs."""

    @optional
    @returns(are_floats, "a list of numbers, one for each token")
    def logprobs(self, request: Any) -> Sequence[float]:
        """Return the log-probability of each token by now, if the request has ``logprobs``."""

    @optional
    @returns(
        list_of(list_of(_is_pair)),
        "a list of pairs for each token, each of a token and its log-probability",
    )
    def top_logprobs(self, request: Any) -> Sequence[Sequence[tuple[int, float]]]:
        """Return for each token by now the top logprobs at its place.

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

        It is called if the request has ``prompt_logprobs``.
        """


_SUM_ERROR = 1e-5
"""Error of log-probabilities in 32 bits, at most."""


class Logprobs(MixObserver):
    """Holds logprobs to those of the model's own logits, whatever the parameters of a request."""

    any_of = ("logprobs", "prompt_logprobs")

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
                most = served.spec.sampling.top_logprobs
                wrong = wrong or self._wrong_top(text[:place], top[at], most)
            if wrong:
                return f"{served.name}, token {at}: {wrong}"
        if served.tokens and not served.known and self._wants(served, "prompt_logprobs"):
            found = self.run.adapter.prompt_logprobs(served.request)
            if wrong := self._wrong_prompt(served.spec.prompt, found):
                return f"{served.name}: {wrong}"
        return ""

    def _wants(self, served: ServedRequest, name: str) -> bool:
        return self.run.adapter.defines(name) and bool(getattr(served.spec.sampling, name))

    def _of_tokens(self, served: ServedRequest, name: str) -> Sequence[Any] | None:
        """Return the logprobs of the tokens by now; None for a request without."""
        if not self._wants(served, name):
            return None
        found: Sequence[Any] = getattr(self.run.adapter, name)(served.request)
        return found

    def _wrong_logprob(self, before: Sequence[int], token: int, found: float) -> str:
        logits = logits_of(self.run.adapter, before, self.run.mix)
        right = float(log_probabilities(logits)[token])
        if abs(found - right) <= self._room(logits):
            return ""
        return f"log-probability {found:.6g}; by the model it is {right:.6g}"

    def _wrong_top(self, before: Sequence[int], top: Sequence[tuple[int, float]], most: int) -> str:
        logits = logits_of(self.run.adapter, before, self.run.mix)
        right = log_probabilities(logits)
        ids = [token for token, _ in top]
        many = min(most, len(right))
        tokens = {*ids} & {*range(len(right))}
        if len(tokens) != len(ids) or len(ids) != many:
            return f"top logprobs are of {ids}; they must be of {many} different tokens"
        room = self._room(logits)
        for at, ((token, value), least) in enumerate(zip(top, np.sort(right)[::-1], strict=False)):
            if abs(value - right[token]) > room:
                return (
                    f"top log-probability of {token} {value:.6g}; by the model {right[token]:.6g}"
                )
            if abs(right[token] - least) > room:
                return f"top logprobs are of {ids}; by the model {token} is not number {at + 1}"
        return ""

    def _wrong_prompt(self, prompt: Sequence[int], found: Sequence[float | None]) -> str:
        if len(found) != len(prompt) or found[0] is not None:
            return (
                f"prompt logprobs are {[*found]}; there must be one for each of its {len(prompt)} "
                "tokens, with None for the first"
            )
        for at in range(1, len(prompt)):
            value = found[at]
            if value is None:
                return f"prompt logprobs have None for token {at}"
            if wrong := self._wrong_logprob(prompt[:at], prompt[at], value):
                return f"token {at} of its prompt: {wrong}"
        return ""

    def _room(self, logits: Floats) -> float:
        """Return how far off log-probabilities of such logits may be."""
        return 2 * float(self.run.adapter.rounding) * float(np.abs(logits).max()) + _SUM_ERROR


def draw_logprobs(draw: st.DrawFn, adapter: type[Any], spec: Any) -> Any:
    values: dict[str, Any] = {}
    if adapter.defines("logprobs"):
        values["logprobs"] = draw(st.sampled_from((False, False, False, True)))
    if values.get("logprobs") and adapter.defines("top_logprobs"):
        values["top_logprobs"] = draw(st.sampled_from((0, 1, 4, 20)))
    if adapter.defines("prompt_logprobs"):
        values["prompt_logprobs"] = draw(st.sampled_from((False,) * 7 + (True,)))
    return change(spec, **values)


def words(spec: Any) -> Iterator[str]:
    sampling: LogprobFields = spec.sampling
    if sampling.logprobs:
        yield "with logprobs"
    if sampling.top_logprobs:
        yield f"with {sampling.top_logprobs} top logprobs"
    if sampling.prompt_logprobs:
        yield "with prompt logprobs"


LOGPROBS = EngineCapability(
    methods=LogprobMethods,
    needs={
        "logprobs": ("logits",),
        "top_logprobs": ("logprobs",),
        "prompt_logprobs": ("logits",),
    },
    fields=(LogprobFields,),
    draw=draw_logprobs,
    words=words,
    observers=(Logprobs,),
)
