"""What the server counts, with the meaning that vLLM gives it: dashboards made for it work."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from roseinfer.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roseinfer.engine_process.part import Start


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_FIRST = _numbers(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_BETWEEN = _numbers(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
)
_WHOLE = _numbers("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_CHOICES = _numbers("1 2 5 10 20")
_ENDS = ("stop", "length", "abort", "error")


def lengths_up_to(most: int) -> tuple[float, ...]:
    """Return the bounds that vLLM has for lengths: 1, 2, 5, 10, 20, 50 and so on."""

    def all_of_them() -> Iterator[float]:
        power = 1
        while True:
            yield from (float(power), 2.0 * power, 5.0 * power)
            power *= 10

    return tuple(takewhile(lambda bound: bound <= most, all_of_them()))


class Ended(NamedTuple):
    """A text that ended, of a prompt that was read."""

    prompt_tokens: int
    tokens: int
    most_tokens: int
    """So many it might have had."""
    start: Start
    decode_s: float
    """From its first token to its last."""
    whole_s: float
    """From the request to its end."""


class TextCounts:
    """Counts what one event loop serves."""

    def __init__(self, most_tokens: int) -> None:
        """No prompt and its text have more than ``most_tokens`` together."""
        lengths = lengths_up_to(most_tokens)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Those of them that the prefix cache had."""
        self.generation_tokens = 0
        self.ends: Counter[str] = Counter(dict.fromkeys(_ENDS, 0))
        self.until_first = Histogram(_FIRST)
        self.between = Histogram(_BETWEEN)
        self.most_generated = Histogram(lengths)
        self.choices = Histogram(_CHOICES)

        # Of each text, when it has ended:
        self.whole = Histogram(_WHOLE)
        self.queued = Histogram(_WHOLE)
        self.prefill = Histogram(_WHOLE)
        self.decode = Histogram(_WHOLE)
        self.inference = Histogram(_WHOLE)
        self.each_token = Histogram(_BETWEEN)
        self.prompt_lengths = Histogram(lengths)
        self.computed_lengths = Histogram(lengths)
        self.lengths = Histogram(lengths)
        self.most_lengths = Histogram(lengths)

    def began(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Count a prompt, whose first token came so long after it was asked for."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.until_first.add(seconds)

    def generated(self, tokens: int, seconds: float, *, first: bool) -> None:
        """Count tokens of one text that came together, so long after the one before them.

        The very first of a text had none before it.
        """
        self.generation_tokens += tokens
        later = tokens - first
        if later > 0:
            self.between.add(seconds / later, later)

    def ended(self, why: str, text: Ended | None) -> None:
        """Count an end. There is no ``text`` where no token of it came."""
        self.ends[why] += 1
        if text is None:
            return
        start = text.start
        self.whole.add(text.whole_s)
        self.queued.add(start.queued_s)
        self.prefill.add(start.prefill_s)
        self.decode.add(text.decode_s)
        self.inference.add(start.prefill_s + text.decode_s)
        self.each_token.add(text.decode_s / max(1, text.tokens - 1))
        self.prompt_lengths.add(text.prompt_tokens)
        self.computed_lengths.add(text.prompt_tokens - start.found)
        self.lengths.add(text.tokens)
        self.most_lengths.add(text.most_tokens)

    def answered(self, choices: int, most_generated: int) -> None:
        """Count a prompt of which all choices have ended, the longest with so many tokens."""
        self.choices.add(choices)
        self.most_generated.add(most_generated)
