"""What a resident step does beside decoding. Each kind is captured as graphs of its own."""

from __future__ import annotations

from typing import NamedTuple

from roseinfer.sampling_params import MOST_TOP_LOGPROBS


class StepKind(NamedTuple):
    """What the sequences of a step ask for together. Those that ask for less get it all the same,
    and are no worse for it."""

    greedy: bool
    """Every token is the likeliest."""
    penalised: bool = False
    """Tokens are tallied, and penalties taken."""
    guided: bool = False
    """Tokens are chosen among those that are allowed."""
    tops: int | None = None
    """Log-probabilities are told, and those of so many likeliest tokens; None where none are."""
    long: bool = False
    """The only sequence is too long for a step in one kernel."""


def tops_told(*, told: bool, tops: bool) -> int | None:
    """Return of how many likeliest tokens a step tells, if some request asks for any."""
    return (MOST_TOP_LOGPROBS if tops else 0) if told else None
