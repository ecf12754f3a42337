"""What became of a run: its steps, and each request as whoever waits for it sees it."""

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
    """For every token, the number of the request it belongs to."""

    @property
    def passes(self) -> int:
        """Steps of the model that it stands for: most tokens that one request got in it."""
        return max(Counter(self.requests).values())

    @property
    def pass_ms(self) -> float:
        return (self.ended - self.began) / self.passes * 1e3


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request in seconds: when it came, and when its tokens did."""

    arrived: float
    started: float
    """When the step began that first worked on it."""
    tokens: tuple[float, ...]
    """When each of its tokens was handed over; those handed over together at one time."""

    @property
    def queue_wait(self) -> float:
        return self.started - self.arrived

    @property
    def time_to_first_token(self) -> float:
        return self.tokens[0] - self.arrived

    @property
    def latency(self) -> float:
        return self.tokens[-1] - self.arrived

    @property
    def time_per_output_token(self) -> float | None:
        """The mean gap between tokens; None for a single token."""
        if len(self.tokens) == 1:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """The gaps from one handing over to the next, however many tokens each brings."""
        return self.gaps_before(lambda _: True)

    def gaps_before(self, wanted: Callable[[int], bool]) -> list[float]:
        """The gaps before tokens whose number, counted from 0, is wanted."""
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

    @property
    def total_s(self) -> float:
        return self.steps[-1].ended - self.began

    def decode_steps(self) -> list[StepRecord]:
        """The steps that brought tokens, but nobody's first one."""
        begun: set[int] = set()
        found = []
        for step in self.steps:
            before = len(begun)
            begun.update(step.requests)
            if len(begun) == before:
                found.append(step)
        return found
