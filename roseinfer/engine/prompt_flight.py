"""Log-probabilities of prompts on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from roseinfer.sampling.log_probabilities import of_a_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from roseinfer.decode.readback import Arrival, Readback
    from roseinfer.engine.request import Request
    from roseinfer.kv.storage import IndexStaging
    from roseinfer.sampling.log_probabilities import Told


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
