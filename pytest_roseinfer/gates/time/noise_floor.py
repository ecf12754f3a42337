"""What a comparison of a step with itself says about the machine it was made on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_roseinfer.gates.time.paired import Comparison, Plan


def whole(plan: Plan) -> Plan:
    """The plan without its shortcuts: how far it gets when it goes to its end."""
    return replace(plan, looks=plan.looks[-1:])


def told_apart(comparison: Comparison, margin: float) -> str:
    """Which slowdowns the gate would find here, in words.

    It fires where the whole interval lies beyond the margin. Half an interval beyond it, that
    is as likely as not; a whole one beyond it, next to certain.
    """
    half = comparison.interval.half_width
    if comparison.doubt:
        return f"nothing can be said: {comparison.doubt}"
    return (
        f"against itself {comparison.ratio - 1:+.2%}, give or take {half:.2%} after "
        f"{len(comparison.ratios)} series ({comparison.seconds:.0f} s): with a margin of "
        f"{margin:.1%}, a slowdown of {margin + half:.1%} is found every other time, one of "
        f"{margin + 2 * half:.1%} nearly always"
    )
