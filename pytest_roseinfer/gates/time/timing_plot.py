"""A chart of a folder of timings: both sides of the newest run, and the runs before it."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

NAME = "timings.png"
_WIDTH, _HEIGHT = 11.0, 3.2
"""Inches; the height is that of each test."""
_DPI = 120
_BINS = 40
_OUTLIERS = 0.02
"""This share of the turns, the slowest, is off the chart: on a shared machine some take ages."""
_COLOURS = {"SAME": "#4c72b0", "FASTER": "#2e8b57", "SLOWER": "#c44e52", "UNSURE": "#999999"}


def draw(folder: Path) -> str:
    """Draw ``timings.png`` into a folder of JSON files; returns why there is none, if so."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install 'roseinfer[plot]')"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = history(folder)
    newest = runs[-1]["results"]
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(newest)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(newest), 2, squeeze=False, width_ratios=(3, 2))
    for (left, right), result in zip(axes, newest, strict=True):
        _distributions(left, result)
        _history(right, result["test"], runs)
    figure.savefig(folder / NAME, dpi=_DPI)
    return ""


def history(folder: Path) -> list[dict[str, Any]]:
    """The runs of a folder, the oldest first."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return sorted(runs, key=lambda run: str(run["when"]))


def _distributions(axes: Axes, result: dict[str, Any]) -> None:
    turns = {side: sorted(result[side]["turns_us"]) for side in ("there", "here")}
    end = max(each[int((1 - _OUTLIERS) * (len(each) - 1))] for each in turns.values())
    begin = min(each[0] for each in turns.values())
    for side, label in (("there", result["against"]), ("here", "here")):
        label = f"{label}: {result[side]['tpot_p50_us']:.1f} us"
        axes.hist(turns[side], bins=_BINS, range=(begin, end + 1e-3), alpha=0.55, label=label)
    low, high = result["interval"]
    axes.set_title(
        f"{result['test']}\n{result['verdict']}: {result['ratio']:.3f} ({low:.3f} to {high:.3f})",
        fontsize=9,
    )
    axes.set_xlabel("TPOT of a turn (us)")
    axes.legend(fontsize=8)


def _history(axes: Axes, test: str, runs: list[dict[str, Any]]) -> None:
    """The ratio of each run with its interval: times of different machines have no common axis."""
    own = [each for run in runs for each in run["results"] if each["test"] == test]
    for at, each in enumerate(own):
        low, high = each["interval"]
        colour = _COLOURS[each["verdict"]]
        axes.plot([at, at], [low, high], color=colour)
        axes.plot(at, each["ratio"], "o", color=colour)
    margin = own[-1]["margin"]
    axes.axhspan(1 / (1 + margin), 1 + margin, alpha=0.12, color="#4c72b0")
    axes.set_xlabel("run")
    axes.set_ylabel("here / there")
    axes.set_title(f"{len(own)} runs; shaded: the margin", fontsize=9)
