"""What happened in a run: its steps, and when each request got its tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A call of ``Engine.step`` that brought tokens, and those before it that brought none."""

    began: float
    ended: float
    requests: list[int]
    """The number of the request that each token belongs to."""

    @property
    def passes(self) -> int:
        """The steps of the model that it stands for: most tokens that one request got in it."""
        return max(Counter(self.requests).values())

    @property
    def pass_ms(self) -> float:
        return (self.ended - self.began) / self.passes * 1e3


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request's times, in seconds."""

    arrived: float
    started: float
    """The step that first worked on it began then."""
    tokens: tuple[float, ...]
    """Each token was handed over then; those handed over together have one time."""

    @property
    def time_per_output_token(self) -> float | None:
        """The mean gap between tokens; None for a single token."""
        if len(self.tokens) == 1:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    def gaps(self, wanted: Callable[[int], bool] = lambda _: True) -> list[float]:
        """Return the gaps between tokens handed over, however many tokens come together.

        With ``wanted``, only those before tokens whose number, counted from 0, is wanted.
        """
        gaps = []
        earlier = None
        for moment, tokens in groupby(enumerate(self.tokens), key=itemgetter(1)):
            if earlier is not None and any(wanted(number) for number, _ in tokens):
                gaps.append(moment - earlier)
            earlier = moment
        return gaps

    def in_parts(self, interval: int) -> Timeline:
        """Hand over the first token at once, and those after it ``interval`` at a time."""
        last = len(self.tokens) - 1
        shown = (min(-(-at // interval) * interval, last) for at in range(last + 1))
        return Timeline(self.arrived, self.started, tuple(self.tokens[at] for at in shown))


@dataclass(frozen=True, slots=True)
class RunRecord:
    began: float
    steps: list[StepRecord]
    timelines: list[Timeline]
    prompt_lengths: list[int]
    token_ids: list[list[int]]

    def decode_steps(self) -> list[StepRecord]:
        """Return the steps that brought no request's first token."""
        begun: set[int] = set()
        found = []
        for step in self.steps:
            if begun.issuperset(step.requests):
                found.append(step)
            begun.update(step.requests)
        return found
