"""Log-probabilities of prompts on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer.decode.readback import Arrival
    from roseinfer.engine.request import Request
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
