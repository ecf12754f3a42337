"""What was compared, for people and programs: a table, lines of words, an entry to be kept."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.gates.paired import UNBOUNDED, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.gates.paired import Comparison, Timings

_SIDES = ("there", "here")


@dataclass(frozen=True, slots=True)
class Timed:
    """One comparison of a run."""

    test: str
    there: str
    """The name of the side it was compared with."""
    comparison: Comparison
    margin: float
    noise_floor: bool = False
    """Both sides were the same code, to see what the machine makes of that."""

    def sides(self) -> Iterator[tuple[str, Timings, list[float]]]:
        """Return the name of each side with its times, and with those beside the other's."""
        there, here = self.comparison.paired_tpot
        yield "there", self.comparison.there, there
        yield "here", self.comparison.here, here

    def in_words(self) -> str:
        """Say what the table leaves open; return "" if it leaves nothing open."""
        comparison = self.comparison
        after = f"after {len(comparison.ratios)} series"
        took = f"{after} and {comparison.seconds:.0f} s"
        if self.noise_floor and comparison.doubt:
            return f"{self.test}: nothing can be said: {comparison.doubt}"
        if comparison.interval == UNBOUNDED:
            needed = comparison.seconds / len(comparison.ratios) * comparison.missed_look
            return (
                f"{self.test}: UNDECIDED {took}: that is too short for an interval, which takes "
                f"{comparison.missed_look} series, about {needed:.0f} s here"
            )
        if self.noise_floor:
            # The gate fails a step if its whole interval lies beyond the margin. If the ratio lies
            # half an interval beyond it, that is as likely as not; with a whole one, nearly sure.
            half = (comparison.interval.high - comparison.interval.low) / 2
            return (
                f"{self.test}: against itself {comparison.ratio - 1:+.2%}, give or take {half:.2%} "
                f"{after} ({comparison.seconds:.0f} s): with a margin of {self.margin:.1%}, a "
                f"slowdown of {self.margin + half:.1%} is found every other time, one of "
                f"{self.margin + 2 * half:.1%} nearly always"
            )
        if comparison.doubt:
            return f"{self.test}: UNDECIDED because {comparison.doubt}"
        if comparison.verdict is Verdict.UNDECIDED:
            return f"{self.test}: UNDECIDED {took}; its margin is {self.margin:.1%}"
        return ""


def facts(timings: Timings, paired_tpot: Sequence[float]) -> dict[str, Any]:
    """Return one side in numbers, for ``extra_info`` and the kept entry."""
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


def judged(timed: Timed) -> dict[str, Any]:
    """Return the decision in numbers, for the same two places."""
    comparison = timed.comparison
    unbounded = comparison.interval == UNBOUNDED
    return {
        "against": timed.there,
        "verdict": comparison.verdict.value,
        "doubt": comparison.doubt,
        "ratio": comparison.ratio,
        # JSON has no word for a bound that is none.
        "interval": None if unbounded else [comparison.interval.low, comparison.interval.high],
        "margin": timed.margin,
        "series": len(comparison.ratios),
        "seconds": comparison.seconds,
    }


def entry_of(timed: Timed) -> dict[str, Any]:
    """Return a comparison as it is kept."""
    return {
        "test": timed.test,
        **judged(timed),
        "ratios": [round(ratio, 6) for ratio in timed.comparison.ratios],
        **{side: facts(timings, paired) for side, timings, paired in timed.sides()},
    }


def table(entries: Sequence[dict[str, Any]], form: str) -> str:
    """Lay comparisons out as a table; ``form`` is one of tabulate's."""
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
