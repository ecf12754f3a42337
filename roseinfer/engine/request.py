"""One request: what was asked, how far it is, how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roseinfer.config import SamplingParams
    from roseinfer.decode.resident import Resident
    from roseinfer.engine.prefix_cache import Held
    from roseinfer.engine.sequences import InferenceSession
    from roseinfer.errors import RoseinferError
    from roseinfer.text.request_text import RequestText


class FinishReason(StrEnum):
    """Why a request has no more tokens to come."""

    STOP = "stop"
    """The model ended the text, or a stop string did."""
    LENGTH = "length"
    """As many tokens as were asked for, or as the model has positions for."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way through the engine."""

    id: int
    """Requests are numbered as they come."""
    params: SamplingParams
    seed: int
    """The one asked for, or one drawn for a request that asked for none."""
    prompt_length: int
    most_tokens: int
    """Tokens it may generate; fewer than asked for where the model's positions end."""
    session: InferenceSession
    text: RequestText | None
    """None for a model without a tokenizer."""
    held: Held | None = None
    """What it holds of the prefix cache."""
    found: int = 0
    """Tokens that were stored already when it was last admitted."""
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: RoseinferError | None = None
    waits_for: int = 0
    """Blocks that must be free before it is worth trying to admit it again."""
    passed_over: int = 0
    """Requests that came later and were admitted before it."""
    preempted: int = 0
    """How often its blocks were taken from it."""
    in_flight: int = 0
    """Tokens that were chosen, or soon will be, and that have not been read yet."""
    resident: Resident | None = None
    """Its place on the device while it decodes there."""

    full_length: int = field(init=False)
    """Tokens, the prompt's included, when it has all that it may generate."""

    def __post_init__(self) -> None:
        self.full_length = self.prompt_length + self.most_tokens

    @property
    def pending(self) -> int:
        """Tokens that are not stored yet, of which those in flight are not known yet."""
        return len(self.session.token_ids) + self.in_flight - self.session.stored

    @property
    def may_decode(self) -> bool:
        """It has one token to store and another to get, and the next step can know the first."""
        session, coming = self.session, self.in_flight
        known = len(session.token_ids)
        if known + coming - session.stored != 1:
            return False
        return not coming or (self.resident is not None and known + coming < self.full_length)

    @property
    def token_ids(self) -> list[int]:
        """What was generated."""
        return self.session.token_ids[self.prompt_length :]

    @property
    def num_generated(self) -> int:
        return len(self.session.token_ids) - self.prompt_length
