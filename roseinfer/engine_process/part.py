"""A part of a text: all that steps brought for it since somebody looked last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

Likeliest = list[tuple[int, float]]
"""Tokens with their log-probabilities."""


class Start(NamedTuple):
    """What is known of a prompt when its first token is there."""

    found: int
    """How many of its tokens the prefix cache had."""
    queued_s: float
    """How long the engine let it wait before a step had some of it."""
    prefill_s: float
    """How long it took from there to the first token."""
    logprobs: list[float | None]
    """Those of its tokens, if they were asked for."""

    @classmethod
    def of(cls, request: Request) -> Start:
        begun, first = request.begun_at, request.first_at
        assert begun is not None
        assert first is not None
        return cls(
            min(request.found, request.prompt_length),
            begun - request.queued_at,
            first - begun,
            list(request.prompt_logprobs) if request.params.prompt_logprobs else [],
        )


@dataclass(slots=True)
class Part:
    """What several updates of one request come to. Errors are raised by who reads them."""

    count: int = 0
    """How many updates."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    start: Start | None = None
    """It comes with the first token."""
    decode_s: float = 0.0
    """With the last: how long it took from the first."""
    logprobs: list[float] = field(default_factory=list)
    """One for each token, if they were asked for."""
    likeliest: list[Likeliest] = field(default_factory=list)
    """The same for the likeliest tokens at its place."""

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def add(self, update: Update) -> None:
        self.count += 1
        self.text += update.text
        if update.token_id is not None:
            self.tokens.append(update.token_id)
            if update.logprob is not None:
                self.logprobs.append(update.logprob)
                if update.top_logprobs is not None:
                    self.likeliest.append(update.top_logprobs)
        if update.finish_reason is not None:
            self.finish_reason = str(update.finish_reason)
            self.error = update.request.error
            self.decode_s = update.request.decode_s

    def begin(self, request: Request) -> None:
        """Note what is known of a prompt when it was read."""
        self.start = Start.of(request)

    def extend(self, later: Part) -> None:
        """Add what came behind it."""
        self.count += later.count
        self.text += later.text
        self.tokens += later.tokens
        self.finish_reason = later.finish_reason
        self.error = later.error
        self.decode_s = later.decode_s
        self.start = self.start or later.start
        self.logprobs += later.logprobs
        self.likeliest += later.likeliest

    def packed(self) -> tuple[Any, ...]:
        """Return what ``Part`` makes the same of. It is short where there is little to tell."""
        told: tuple[Any, ...] = (self.count, self.text, self.tokens)
        if self.last or self.start is not None:
            told += (self.finish_reason, self.error, self.start, self.decode_s)
        elif self.logprobs:
            told += (None, None, None, 0.0)
        return (*told, self.logprobs, self.likeliest) if self.logprobs else told
