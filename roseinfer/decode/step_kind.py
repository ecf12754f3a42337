"""What a resident step does beside decoding. Each kind is captured as graphs of its own."""

from __future__ import annotations

from typing import NamedTuple


class StepKind(NamedTuple):
    """A step does more than it must for some of its sequences, and so for none more than it must
    for one of them."""

    greedy: bool
    """Every token is the likeliest."""
    penalised: bool = False
    """Tokens are tallied, and penalties taken."""
    tops: int | None = None
    """Log-probabilities are told, and those of so many likeliest tokens; None where none are."""
