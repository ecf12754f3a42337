"""Reports of comparisons: a table, messages, and entries for the history file."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.paired_timing import UNBOUNDED, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.gates.paired_timing import Comparison, Timings

_SIDES = ("there", "here")


@dataclass(frozen=True, slots=True)
class TimedComparison:
    """A comparison of one test."""

    test: str
    there: str
    """Name of the other side."""
    comparison: Comparison
    margin: float
    noise_floor: bool = False
    """True if both sides were the same code, to measure the machine's noise."""

    def sides(self) -> Iterator[tuple[str, Timings, list[float]]]:
        """Yield each side's name, its raw times and its normalised times."""
        there, here = self.comparison.paired_tpot
        yield "there", self.comparison.there, there
        yield "here", self.comparison.here, here

    def in_words(self) -> str:
        """Explain a result that the table leaves open; return "" for a clear one."""
        comparison = self.comparison
        after = f"after {len(comparison.ratios)} series"
        took = f"{after} and {comparison.seconds:.0f} s"
        if self.noise_floor and comparison.doubt:
            return f"{self.test}: no result: {comparison.doubt}"
        if comparison.interval == UNBOUNDED:
            needed = comparison.seconds / len(comparison.ratios) * comparison.missed_analysis
            return (
                f"{self.test}: UNDECIDED {took}: too short for an interval, which needs "
                f"{comparison.missed_analysis} series, about {needed:.0f} s here"
            )
        if self.noise_floor:
            # The gate fails a step if its whole interval is beyond the margin. That has even odds
            # if the ratio is half an interval beyond it, and is nearly sure at a whole interval.
            half = (comparison.interval.high - comparison.interval.low) / 2
            return (
                f"{self.test}: against itself {comparison.ratio - 1:+.2%} +/- {half:.2%} "
                f"{after} ({comparison.seconds:.0f} s): with a margin of {self.margin:.1%}, a "
                f"slowdown of {self.margin + half:.1%} is found half of the time, one of "
                f"{self.margin + 2 * half:.1%} nearly always"
            )
        if comparison.doubt:
            return f"{self.test}: UNDECIDED because {comparison.doubt}"
        if comparison.verdict is Verdict.UNDECIDED:
            return f"{self.test}: UNDECIDED {took}; its margin is {self.margin:.1%}"
        return ""


def side_fields(timings: Timings, paired_tpot: Sequence[float]) -> dict[str, Any]:
    """Return the numbers of one side, for ``extra_info`` and the history entry."""
    steps = sorted(step for turn in timings.turns for step in turn)
    p50 = median(steps)
    floor = timings.ready.floor_seconds
    return {
        "paired_tpot_us": 1e6 * median(paired_tpot),
        "tpot_p50_us": 1e6 * p50,
        "tpot_p99_us": 1e6 * steps[int(0.99 * (len(steps) - 1))],
        "tokens_per_second": timings.ready.tokens / p50,
        "share_of_memory_floor": floor / p50 if floor else None,
        "path_counts": timings.path_counts,
        "device": timings.ready.device,
        "versions": dict(timings.ready.versions),
    }


def verdict_fields(timed: TimedComparison) -> dict[str, Any]:
    """Return the numbers of the verdict, for ``extra_info`` and the history entry."""
    comparison = timed.comparison
    unbounded = comparison.interval == UNBOUNDED
    return {
        "against": timed.there,
        "verdict": comparison.verdict.value,
        "doubt": comparison.doubt,
        "ratio": comparison.ratio,
        # JSON has no infinity.
        "interval": None if unbounded else [comparison.interval.low, comparison.interval.high],
        "margin": timed.margin,
        "series": len(comparison.ratios),
        "seconds": comparison.seconds,
    }


def entry_of(timed: TimedComparison) -> dict[str, Any]:
    """Return a comparison as an entry of the history file."""
    return {
        "test": timed.test,
        **verdict_fields(timed),
        "ratios": [round(ratio, 6) for ratio in timed.comparison.ratios],
        **{side: side_fields(timings, paired) for side, timings, paired in timed.sides()},
    }


def table(entries: Sequence[dict[str, Any]], form: str) -> str:
    """Format comparisons as a table; ``form`` is a tabulate format."""
    from tabulate import tabulate

    rows = [
        {
            "test": each["test"],
            **{f"step {side}": f"{each[side]['paired_tpot_us']:.1f} us" for side in _SIDES},
            "here / there": f"{each['ratio']:.3f}",
            "interval": "{:.3f} to {:.3f}".format(*each["interval"])
            if each["interval"]
            else "none",
            "series": each["series"],
            "verdict": each["verdict"],
        }
        for each in entries
    ]
    return tabulate(rows, headers="keys", tablefmt=form, disable_numparse=True)
