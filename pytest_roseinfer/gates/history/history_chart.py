"""The chart of a kept history: each figure over the runs, with its change points."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_roseinfer.gates.gate import CannotCompare
from pytest_roseinfer.gates.history.change_points import change_points, require_library
from pytest_roseinfer.gates.history.trends import trends_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from pytest_roseinfer.gates.history.change_points import ChangePoint
    from pytest_roseinfer.gates.history.kept_runs import KeptRun
    from pytest_roseinfer.gates.history.trends import Trend

_LINE, _CHANGE = "#4c72b0", "#c44e52"
_MOST_LABELS = 12
"""Commits named along an axis; with more, some are left out."""


@dataclass(frozen=True, slots=True)
class History:
    """What a folder's runs say over time."""

    trends: Sequence[Trend]
    changes: Sequence[ChangePoint]

    @classmethod
    def of(cls, runs: Sequence[KeptRun]) -> History:
        require_library()
        trends = trends_of(runs)
        return cls(trends, [change for trend in trends for change in change_points(trend)])

    @property
    def drawn(self) -> Sequence[Trend]:
        """All but the counts that never changed, whose line says nothing."""
        moving = [change.trend for change in self.changes]
        return [trend for trend in self.trends if not trend.exact or trend in moving]

    def chart(self) -> str:
        """Return SVG with a chart for each trend, one below the other."""
        if importlib.util.find_spec("matplotlib") is None:
            missing = "no chart: matplotlib is not installed (pip install 'roseinfer[plot]')"
            raise CannotCompare(missing)
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 2.4 * len(self.drawn)), layout="constrained")
        FigureCanvasSVG(figure)
        rows = figure.subplots(len(self.drawn), 1, squeeze=False)
        for (axes,), trend in zip(rows, self.drawn, strict=True):
            _draw(axes, trend, [change for change in self.changes if change.trend is trend])
        text = io.StringIO()
        figure.savefig(text, format="svg")
        return text.getvalue()


def _draw(axes: Axes, trend: Trend, changes: Sequence[ChangePoint]) -> None:
    values = [point.value for point in trend.points]
    axes.plot(values, "o-", color=_LINE, markersize=3, linewidth=1)
    for change in changes:
        axes.axvline(change.at - 0.5, color=_CHANGE, linewidth=1)
        commit = trend.points[change.at].run.label
        said = f"{commit}: {change.before:g} -> {change.after:g}"
        axes.annotate(
            said, (change.at - 0.5, 1), xycoords=("data", "axes fraction"), fontsize=8,
            color=_CHANGE, xytext=(3, -9), textcoords="offset points",
        )  # fmt: skip
    every = -(-len(values) // _MOST_LABELS)
    shown = range(0, len(values), every)
    axes.set_xticks(shown, [trend.points[at].run.label[:9] for at in shown], fontsize=7)
    axes.set_title(trend.step, fontsize=9, loc="left")
    axes.set_ylabel(trend.figure, fontsize=8)
    axes.margins(y=0.25)
