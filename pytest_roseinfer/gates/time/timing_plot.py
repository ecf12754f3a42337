"""The chart of a run's comparisons: both sides in this run, and the ratio in every kept run."""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from pytest_roseinfer.gates.history.kept_runs import KeptRun
    from pytest_roseinfer.gates.time.timing_report import Timed

NAME = "timings.png"
_OUTLIERS = 0.02
"""This share of the turns, the slowest, is off the chart: on a shared machine some take ages."""
_COLOURS = {"SAME": "#4c72b0", "FASTER": "#2e8b57", "SLOWER": "#c44e52"}
_UNDECIDED = "#999999"


def draw(folder: Path, newest: Sequence[Timed], runs: Sequence[KeptRun]) -> str:
    """Draw ``timings.png`` into a folder; return why there is none, if so."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install 'roseinfer[plot]')"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2 * len(newest)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(newest), 2, squeeze=False, width_ratios=(3, 2))
    for (left, right), timed in zip(axes, newest, strict=True):
        own = [each for run in runs for each in run.times if each["test"] == timed.test]
        _draw_turns(left, timed, own[-1])
        _draw_ratios(right, own)
    figure.savefig(folder / NAME, dpi=120)
    return ""


def _draw_turns(axes: Axes, timed: Timed, result: dict[str, Any]) -> None:
    turns = {
        side: sorted(1e6 * median(turn) for turn in timings.turns)
        for side, timings, _ in timed.sides()
    }
    end = max(each[int((1 - _OUTLIERS) * (len(each) - 1))] for each in turns.values())
    begin = min(each[0] for each in turns.values())
    for side, label in (("there", result["against"]), ("here", "here")):
        label = f"{label}: {result[side]['paired_tpot_us']:.1f} us"
        axes.hist(turns[side], bins=40, range=(begin, end + 1e-3), alpha=0.55, label=label)
    within = " ({:.3f} to {:.3f})".format(*result["interval"]) if result["interval"] else ""
    axes.set_title(
        f"{result['test']}\n{result['verdict']}: {result['ratio']:.3f}{within}", fontsize=9
    )
    axes.set_xlabel("median step of a turn (us)")
    axes.legend(fontsize=8)


def _draw_ratios(axes: Axes, results: list[dict[str, Any]]) -> None:
    """Draw ratios and no times, since runs on different machines share no other axis."""
    for at, each in enumerate(results):
        colour = _COLOURS.get(each["verdict"], _UNDECIDED)
        if each["interval"]:
            axes.plot([at, at], each["interval"], color=colour)
        axes.plot(at, each["ratio"], "o", color=colour)
    margin = results[-1]["margin"]
    axes.axhspan(1 / (1 + margin), 1 + margin, alpha=0.12, color=_COLOURS["SAME"])
    axes.set_xlabel("run")
    axes.set_ylabel("here / there")
    axes.set_title(f"{len(results)} runs; shaded: the margin", fontsize=9)
