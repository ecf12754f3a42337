"""A part of a text: all that steps brought for it since somebody looked last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roseinfer.engine.engine import Update
    from roseinfer.engine.request import Request

Likeliest = list[tuple[int, float]]
"""Tokens with their log-probabilities."""


@dataclass(slots=True)
class Part:
    """What several updates of one request come to. Errors are raised by who reads them."""

    count: int = 0
    """How many updates."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    found: int | None = None
    """With the first token: how much of the prompt the prefix cache had."""
    prompt_logprobs: list[float | None] = field(default_factory=list)
    """With the first token: those of the prompt's tokens, if they were asked for."""
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

    def begin(self, request: Request) -> None:
        """Note what is known of a prompt when it was read."""
        self.found = min(request.found, request.prompt_length)
        if request.params.prompt_logprobs:
            self.prompt_logprobs = list(request.prompt_logprobs)

    def extend(self, later: Part) -> None:
        """Add what came behind it."""
        self.count += later.count
        self.text += later.text
        self.tokens += later.tokens
        self.finish_reason = later.finish_reason
        self.error = later.error
        if later.found is not None:
            self.found, self.prompt_logprobs = later.found, later.prompt_logprobs
        self.logprobs += later.logprobs
        self.likeliest += later.likeliest

    def packed(self) -> tuple[Any, ...]:
        """Return what ``Part`` makes the same of. It is short where there is little to tell."""
        told: tuple[Any, ...] = (self.count, self.text, self.tokens)
        if self.last or self.found is not None:
            told += (self.finish_reason, self.error, self.found, self.prompt_logprobs)
        elif self.logprobs:
            told += (None, None, None, [])
        return (*told, self.logprobs, self.likeliest) if self.logprobs else told
