"""Tokens on their way to the host, and which of those behind drafts a request gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from roseinfer.sampling.logprobs import of_a_prompt, told_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from roseinfer.decode.readback import Arrival, Readback
    from roseinfer.engine.request import Request
    from roseinfer.kv.storage import IndexStaging
    from roseinfer.sampling.logprobs import Told

Settle = Callable[["Request", Sequence[int], int], None]
"""Called with a request, its drafts and how many of them were accepted."""
NO_DRAFTS: Mapping[int, list[int]] = MappingProxyType({})


def forget_tokens_in_flight(request: Request) -> None:
    """Count none of a request's tokens as being on their way."""
    request.in_flight = 0


@dataclass(slots=True)
class Flight:
    """Tokens of a forward pass that the host has not read yet."""

    requests: list[Request]
    rows: Sequence[int]
    """The index of each request's token in ``tokens``."""
    tokens: Arrival
    """Negative where there was none to choose."""
    told: Arrival | None
    """The numbers of one token after the other, if some request wants them told."""
    urgent: bool
    """True if a request needs its token on the host before it can go on."""
    drafts: Mapping[int, list[int]]
    """By ids of requests, drafts that were stored: in the rows behind a request's own are the
    tokens behind each of them."""
    settle: Settle | None
    """Called before the tokens of a request with drafts are taken."""

    def __post_init__(self) -> None:
        for request in self.requests:
            request.in_flight += 1
        if self.drafts:
            for request in self.requests:
                request.in_flight += len(self.drafts.get(request.id, ()))

    def land(self) -> Iterator[tuple[Request, int, Told | None]]:
        """Wait for the tokens. Those of requests that have ended meanwhile are dropped."""
        tokens = self.tokens.wait()
        if self.told is None and not self.drafts:  # as nearly always, and most often called
            for request, row in zip(self.requests, self.rows, strict=True):
                if request.finish_reason is None:
                    request.in_flight -= 1
                    yield request, tokens[row], None
            return
        told = self.told.wait() if self.told else []
        each = len(told) // len(tokens)
        for request, first in zip(self.requests, self.rows, strict=True):
            last = first
            if request.id in self.drafts:
                last += self._verify(request, first, tokens)
            for row in range(first, last + 1):
                if request.finish_reason is None:  # no token before has ended it
                    request.in_flight -= 1
                    own = told[row * each : (row + 1) * each] if request.params.logprobs else None
                    yield request, tokens[row], told_of(own) if own else None

    def _verify(self, request: Request, first: int, tokens: Sequence[int]) -> int:
        """Return how many drafts are what the request gets at their places."""
        drafts = self.drafts[request.id]
        wrong = (at for at, draft in enumerate(drafts) if tokens[first + at] != draft)
        accepted = next(wrong, len(drafts))
        request.in_flight -= len(drafts) - accepted
        if self.settle is not None:
            self.settle(request, drafts, accepted)
        return accepted


# Log-probabilities of prompts on their way to the host.


@dataclass(slots=True)
class PromptFlight:
    """Log-probabilities of prompts that the host has not read yet."""

    spans: list[tuple[Request, int, int]]
    """Requests, each with the positions of the tokens that are told of."""
    values: Arrival
    urgent: ClassVar[bool] = False

    def land(self) -> Iterator[tuple[Request, int, Told | None]]:
        """Wait for them, and note them. This brings no tokens.

        A prompt that was begun anew meanwhile gets the same again, at the same positions.
        """
        values = iter(self.values.wait())
        for request, begin, end in self.spans:
            request.prompt_logprobs[begin:end] = islice(values, end - begin)
        return iter(())


def tell_prompts(
    requests: Sequence[Request],
    counts: Mapping[int, int],
    ends: Sequence[int],
    logits: torch.Tensor,
    staging: IndexStaging,
    readback: Readback,
) -> PromptFlight:
    """Start to tell of the prompts of some requests.

    Of request ``at`` the step stored ``counts[at]`` tokens, and its rows of logits end
    before row ``ends[at]``.
    """
    spans: list[tuple[Request, int, int]] = []
    rows: list[int] = []
    tokens: list[int] = []
    for at, count in counts.items():
        session = requests[at].session
        begin = session.stored - count + 1
        end = min(session.stored + 1, requests[at].prompt_length)
        spans.append((requests[at], begin, end))
        first = ends[at] - count
        rows += range(first, first + end - begin)
        tokens += session.token_ids[begin:end]
    at_rows, at_tokens = staging.stage([rows, tokens]).columns
    return PromptFlight(spans, readback.start(of_a_prompt(logits, at_rows, at_tokens)))
