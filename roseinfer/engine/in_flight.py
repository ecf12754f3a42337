"""Tokens in flight to the host, and the verification of drafts when they are read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from roseinfer.sampling import prompt_token_logprobs, unpack_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from roseinfer.engine.request import Request
    from roseinfer.kv.storage import IndexStaging
    from roseinfer.kv.transfers import PendingReadback, Readback
    from roseinfer.sampling import TokenLogprobs

DraftsVerified = Callable[["Request", Sequence[int], int], None]
"""Called with a request, its drafts and how many of them were accepted."""


def drop_tokens_in_flight(request: Request) -> None:
    """Drop the tokens that a request has in flight, and its drafts."""
    request.num_in_flight = 0
    request.drafts = []


@dataclass(slots=True)
class TokensInFlight:
    """Tokens of a forward pass that the host has not read yet."""

    requests: list[Request]
    rows: Sequence[int]
    """Index of each request's first token in ``tokens``."""
    tokens: PendingReadback
    """Token ids; negative where no token could be chosen."""
    logprobs: PendingReadback | None
    """Packed log-probabilities, token after token; None if no request needs them."""
    blocks_next_step: bool
    """True if a request needs its token on the host before its next step."""
    on_drafts_verified: DraftsVerified | None = None
    """Callback that runs before the tokens of a request with drafts are yielded; None if no request
    has drafts. The row after a request's own has the token that follows its first draft, the next
    row the one that follows the second, and so on."""

    def __post_init__(self) -> None:
        for request in self.requests:
            request.num_in_flight += 1
        if self.on_drafts_verified is not None:
            for request in self.requests:
                request.num_in_flight += len(request.drafts)

    def collect(self) -> Iterator[tuple[Request, int, TokenLogprobs | None]]:
        """Wait for the tokens and yield them, except those of requests that have ended since."""
        tokens = self.tokens.wait()
        if (
            self.logprobs is None and self.on_drafts_verified is None
        ):  # fast path of nearly all calls
            for request, row in zip(self.requests, self.rows, strict=True):
                if request.finish_reason is None:
                    request.num_in_flight -= 1
                    yield request, tokens[row], None
            return
        flat = self.logprobs.wait() if self.logprobs else []
        size = len(flat) // len(tokens)
        for request, first in zip(self.requests, self.rows, strict=True):
            last = first
            if request.drafts:
                last += self._verify(request, first, tokens)
            for row in range(first, last + 1):
                if request.finish_reason is None:  # a previous token may have ended it
                    request.num_in_flight -= 1
                    packed = (
                        flat[row * size : (row + 1) * size] if request.params.logprobs else None
                    )
                    yield request, tokens[row], unpack_logprobs(packed) if packed else None

    def _verify(self, request: Request, first: int, tokens: Sequence[int]) -> int:
        """Return the number of accepted drafts: those equal to the model's own tokens."""
        drafts, request.drafts = request.drafts, []
        wrong = (at for at, draft in enumerate(drafts) if tokens[first + at] != draft)
        accepted = next(wrong, len(drafts))
        request.num_in_flight -= len(drafts) - accepted
        if self.on_drafts_verified is not None:
            self.on_drafts_verified(request, drafts, accepted)
        return accepted


# Prompt log-probabilities in flight.


@dataclass(slots=True)
class PromptLogprobsInFlight:
    """Log-probabilities of prompts that the host has not read yet."""

    spans: list[tuple[Request, int, int]]
    """Requests, each with the first position and the end of its tokens in ``values``."""
    values: PendingReadback
    blocks_next_step: ClassVar[bool] = False

    def collect(self) -> Iterator[tuple[Request, int, TokenLogprobs | None]]:
        """Wait for the values and record them. This yields no tokens.

        A prompt that was restarted meanwhile gets the same values at the same positions again.
        """
        values = iter(self.values.wait())
        for request, begin, end in self.spans:
            request.prompt_logprobs[begin:end] = islice(values, end - begin)
        return iter(())


def launch_prompt_logprobs(
    chunks: Sequence[tuple[Request, int, int]],
    logits: torch.Tensor,
    staging: IndexStaging,
    readback: Readback,
) -> PromptLogprobsInFlight:
    """Start to read back the prompt log-probabilities of some requests.

    Each has the number of tokens that the step stored, and the row where its logits end.
    """
    spans: list[tuple[Request, int, int]] = []
    rows: list[int] = []
    tokens: list[int] = []
    for request, count, row_end in chunks:
        sequence = request.sequence
        begin = sequence.num_stored - count + 1
        end = min(sequence.num_stored + 1, request.prompt_length)
        spans.append((request, begin, end))
        first = row_end - count
        rows += range(first, first + end - begin)
        tokens += sequence.token_ids[begin:end]
    at_rows, at_tokens = staging.stage([rows, tokens]).columns
    return PromptLogprobsInFlight(
        spans, readback.start(prompt_token_logprobs(logits, at_rows, at_tokens))
    )
