"""One request as whoever waits for it sees it: when it came, when its tokens did."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds on one clock."""

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
        """None for a single token: there is nothing between it and another."""
        if len(self.tokens) == 1:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """Between one handing over and the next, however many tokens each brings."""
        return self.gaps_before(lambda _: True)

    def gaps_before(self, wanted: Callable[[int], bool]) -> list[float]:
        """The same, of the handings over that bring a token of a wanted number, from 0 on."""
        gaps = []
        earlier = None
        for moment, tokens in groupby(enumerate(self.tokens), key=itemgetter(1)):
            if earlier is not None and any(wanted(number) for number, _ in tokens):
                gaps.append(moment - earlier)
            earlier = moment
        return gaps

    def in_parts(self, interval: int) -> Timeline:
        """The same if only the first token came at once, and those after it ``interval`` a time."""
        last = len(self.tokens) - 1
        shown = (min(-(-at // interval) * interval, last) for at in range(last + 1))
        return Timeline(self.arrived, self.started, tuple(self.tokens[at] for at in shown))
