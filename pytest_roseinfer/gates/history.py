"""History of gate results: its file, trends, change points, and charts."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.environment import commit_of, differences, environment_here, is_installed
from pytest_roseinfer.gates.gate import CannotCompare, Gate, show_problems
from pytest_roseinfer.gates.timing_report import entry_of, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pytest
    from matplotlib.axes import Axes

    from pytest_roseinfer.gates.step_work import CostVerdict, StepWork
    from pytest_roseinfer.gates.timing_report import TimedComparison

# History file: a line of JSON per run, the newest last.


HISTORY_NAME = "history.jsonl"
FORMAT = 1
"""Format version of the file's lines; raised on incompatible changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Results of one pytest run; docs/reference/files.md describes the fields."""

    format: int = FORMAT
    timestamp: str
    commit: str
    dirty: bool
    environment: Mapping[str, str]
    times: Sequence[dict[str, Any]] = field(default_factory=tuple)
    work: Sequence[dict[str, Any]] = field(default_factory=tuple)

    @property
    def label(self) -> str:
        """Short name of the commit, for people."""
        return f"{self.commit[:9] or 'no commit'}{' with changes' if self.dirty else ''}"


def append_run(folder: Path, run: RunFigures) -> Path:
    """Append a run to a folder's file in one write, so that two runs cannot mix their lines."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / HISTORY_NAME
    with file.open("ab", buffering=0) as lines:
        lines.write(json.dumps(asdict(run)).encode() + b"\n")
    return file


def read_runs(folder: Path) -> list[RunFigures]:
    """Return the recorded runs of a folder, the oldest first."""
    file = folder / HISTORY_NAME
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotCompare(f"{file} cannot be read: {error}") from error
    runs = [_read(line, f"{file}, line {at}") for at, line in enumerate(lines, 1)]
    if not runs:
        raise CannotCompare(f"{file}: no recorded run; record one with --roseinfer-timings")
    return sorted(runs, key=lambda run: run.timestamp)


def _read(line: str, location: str) -> RunFigures:
    try:
        entry = json.loads(line)
        if entry["format"] != FORMAT:
            raise CannotCompare(f"{location}: format is {entry['format']}, expected {FORMAT}")
        return RunFigures(**entry)
    except (ValueError, TypeError, KeyError) as error:
        raise CannotCompare(f"{location}: not a recorded run: {error!r}") from error


# Trends: one figure of a step over the runs.


TIME = "time of a step (us)"
RATIO = "here / there"


@dataclass(frozen=True, slots=True)
class Point:
    """The value of a figure in one run."""

    run: RunFigures
    value: float


@dataclass(slots=True)
class Trend:
    """The values of one figure, run after run."""

    step: str
    """The test, with its device or the reference that it is compared with."""
    figure: str
    exact: bool
    """True for counts, which repeat exactly; False for times."""
    points: list[Point] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.step}, {self.figure}"


def trends_of(runs: Sequence[RunFigures]) -> list[Trend]:
    """Group the runs' values by figure; leave out figures that are always 0."""
    trends: dict[tuple[str, str], Trend] = {}
    for run in runs:
        for step, figure, exact, value in _figures(run):
            trend = trends.setdefault((step, figure), Trend(step, figure, exact))
            trend.points.append(Point(run, value))
    return [trend for trend in trends.values() if any(point.value for point in trend.points)]


def _figures(run: RunFigures) -> Iterator[tuple[str, str, bool, float]]:
    for timed in run.times:
        here = timed["here"]
        yield f"{timed['test']} on {here['device']}", TIME, False, here["paired_tpot_us"]
        yield f"{timed['test']} against {timed['against']}", RATIO, False, timed["ratio"]
    for work in run.work:
        step = f"{work['test']}, {work['step']} on {work['device']}"
        for group, count in work["counts"].items():
            yield step, group, True, count


# Change points: runs from which on a figure has another value.
#
# Counts are exact, so any difference is a change. For times, the library ruptures finds segments of
# the logarithms whose distributions differ, with a kernel that bounds the influence of outliers.


_LEAST_RUNS = 3
"""Minimum number of times on either side of a change: fewer could be a busy day."""
_MISSING = (
    "change points of times need ruptures, which is not installed: pip install 'roseinfer[plot]'"
)


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A lasting change of a figure, from one run to the next."""

    trend: Trend
    at: int
    """Index of the first point after the change."""
    before: float
    after: float
    """Median after the change, up to the next one; ``before`` is that before it."""

    def __str__(self) -> str:
        earlier, later = (self.trend.points[at].run for at in (self.at - 1, self.at))
        by = f" ({self.after / self.before - 1:+.1%})" if self.before else ""
        lines = [
            f"{self.trend.title}: {self.before:g} -> {self.after:g}{by} at {later.label} "
            f"({later.timestamp}), the run before was {earlier.label}"
        ]
        differed = differences(earlier.environment, later.environment)
        lines += [f"  {line}" for line in differed or ["the environment is the same"]]
        return "\n".join(lines)


def require_library() -> None:
    """Raise ``CannotCompare`` if the library that finds changes of times is not installed."""
    if not is_installed("ruptures"):
        raise CannotCompare(_MISSING)


def change_points(trend: Trend) -> Iterator[ChangePoint]:
    """Yield the changes of a trend, the oldest first."""
    values = [point.value for point in trend.points]
    firsts = _differing(values) if trend.exact else _segments(values)
    for begin, first, end in zip([0, *firsts], firsts, [*firsts[1:], len(values)], strict=False):
        before, after = (
            round(median(each), 3) for each in (values[begin:first], values[first:end])
        )
        yield ChangePoint(trend, first, before, after)


def _differing(values: Sequence[float]) -> list[int]:
    return [at for at, (old, new) in enumerate(pairwise(values), 1) if old != new]


def _segments(values: Sequence[float]) -> list[int]:
    """Return the starts of the segments that ruptures finds, without the first."""
    if len(values) < 2 * _LEAST_RUNS:
        return []
    import numpy as np
    from ruptures import KernelCPD

    logs = np.log(np.asarray(values)).reshape(-1, 1)
    # With this penalty, 1 to 4 of 100 histories of 8 to 150 unchanged runs show a false change.
    penalty = 1 + math.log(len(values)) / 2
    ends = KernelCPD(kernel="rbf", min_size=_LEAST_RUNS).fit(logs).predict(pen=penalty)
    return [int(first) for first in ends[:-1]]


# Chart of a history: each figure over the runs, with its change points.


_LINE, _CHANGE = "#4c72b0", "#c44e52"
_MAX_LABELS = 12
"""Maximum commits named along an axis; with more runs, some are left out."""


@dataclass(frozen=True, slots=True)
class History:
    """Trends and change points of a folder's runs."""

    trends: Sequence[Trend]
    changes: Sequence[ChangePoint]

    @classmethod
    def of(cls, runs: Sequence[RunFigures]) -> History:
        require_library()
        trends = trends_of(runs)
        return cls(trends, [change for trend in trends for change in change_points(trend)])

    @property
    def charted_trends(self) -> Sequence[Trend]:
        """Trends worth a chart: all except counts that never changed."""
        moving = [change.trend for change in self.changes]
        return [trend for trend in self.trends if not trend.exact or trend in moving]

    def chart(self) -> str:
        """Return SVG with a chart per trend, one below the other."""
        if not is_installed("matplotlib"):
            missing = "no chart: matplotlib is not installed (pip install 'roseinfer[plot]')"
            raise CannotCompare(missing)
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 2.4 * len(self.charted_trends)), layout="constrained")
        FigureCanvasSVG(figure)
        rows = figure.subplots(len(self.charted_trends), 1, squeeze=False)
        for (axes,), trend in zip(rows, self.charted_trends, strict=True):
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
        label = f"{commit}: {change.before:g} -> {change.after:g}"
        axes.annotate(
            label, (change.at - 0.5, 1), xycoords=("data", "axes fraction"), fontsize=8,
            color=_CHANGE, xytext=(3, -9), textcoords="offset points",
        )  # fmt: skip
    every = -(-len(values) // _MAX_LABELS)
    shown = range(0, len(values), every)
    axes.set_xticks(shown, [trend.points[at].run.label[:9] for at in shown], fontsize=7)
    axes.set_title(trend.step, fontsize=9, loc="left")
    axes.set_ylabel(trend.figure, fontsize=8)
    axes.margins(y=0.25)


# Chart of a run's comparisons: both sides in this run, and the ratio in every recorded run.


PLOT_NAME = "timings.png"
_OUTLIERS = 0.02
"""Share of the slowest turns that is off the chart: outliers of a shared machine."""
_COLOURS = {"SAME": "#4c72b0", "FASTER": "#2e8b57", "SLOWER": "#c44e52"}
_UNDECIDED = "#999999"


def draw(folder: Path, newest: Sequence[TimedComparison], runs: Sequence[RunFigures]) -> str:
    """Draw ``timings.png`` into a folder; return "", or why it was not drawn."""
    if not is_installed("matplotlib"):
        return "no plot: matplotlib is not installed (pip install 'roseinfer[plot]')"
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2 * len(newest)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(newest), 2, squeeze=False, width_ratios=(3, 2))
    for (left, right), timed in zip(axes, newest, strict=True):
        results = [each for run in runs for each in run.times if each["test"] == timed.test]
        _draw_turns(left, timed, results[-1])
        _draw_ratios(right, results)
    figure.savefig(folder / PLOT_NAME, dpi=120)
    return ""


def _draw_turns(axes: Axes, timed: TimedComparison, result: dict[str, Any]) -> None:
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
    """Draw ratios instead of times, which runs on different machines cannot share an axis for."""
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


OPTION = "--roseinfer-timings"


class HistoryGate(Gate):
    """Gate that records results, and fails a run that has none to record."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.timed: list[TimedComparison] = []
        self.has_new_steps = False
        """True if a step is new in this run: it has no comparison and so no results."""
        self._work: list[dict[str, Any]] = []
        self._lines: list[str] = []
        self._chart = ""

    def record_work(
        self, key: tuple[str, str, str], work: StepWork, verdict: CostVerdict | None
    ) -> None:
        """Record the counts of a step; ``verdict`` is None without a baseline."""
        test, step, device = key
        self._work.append(
            {
                "test": test,
                "step": step,
                "device": device,
                "tokens": work.tokens,
                "counts": {name: sum(each.values()) for name, each in work.groups.items()},
                "more": verdict.increases if verdict else [],
                "less": verdict.decreases if verdict else [],
            }
        )

    def to_json(self) -> list[dict[str, Any]]:
        return self._work

    def add(self, work: list[dict[str, Any]]) -> None:
        self._work += work

    def judge(self, *, passed: bool) -> Sequence[str]:
        folder = settings.current().timing.folder
        assert folder
        if not (self.timed or self._work):
            missing = passed and not self.has_new_steps
            return [f"{OPTION}: no test of this run timed or counted a step"] if missing else []
        try:
            self._keep(Path(folder))
        except (CannotCompare, OSError) as error:
            return [f"{OPTION} {folder}: {error}"]
        return []

    def _keep(self, folder: Path) -> None:
        commit, dirty = commit_of(self.config.rootpath)
        run = RunFigures(
            timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=commit,
            dirty=dirty,
            environment=environment_here(gpu=settings.current().gpu),
            times=[entry_of(each) for each in self.timed],
            work=self._work,
        )
        self._lines.append(f"written: {append_run(folder, run)}")
        runs = read_runs(folder)
        if self.timed:
            why_not = draw(folder, self.timed, runs)
            self._lines.append(why_not or f"written: {folder / PLOT_NAME}")
        if settings.current().reports:
            self._draw(runs)

    def _draw(self, runs: Sequence[RunFigures]) -> None:
        """Draw the chart for the run's HTML report, or report the error that prevents it."""
        try:
            history = History.of(runs)
            drawn = history.chart() if history.charted_trends else ""
        except CannotCompare as error:
            self._lines.append(str(error))
            return
        self._chart = drawn[drawn.find("<svg") :]  # without the XML header of a standalone file

    def figures(self) -> Mapping[str, str]:
        return {"History of gate results": self._chart} if self._chart else {}

    def in_markdown(self) -> Iterable[str]:
        return [f"- {line}" for line in self._lines]

    def show(self, reporter: pytest.TerminalReporter) -> None:
        if self._lines or self.problems:
            reporter.section("roseinfer: recorded gate results")
            for line in self._lines:
                reporter.line(line)
            show_problems(reporter, self.problems)


# The newest recorded run as Markdown, for a pull request.


def in_markdown(runs: Sequence[RunFigures]) -> str:
    """Report the newest run, and how its environment differs from the previous run's."""
    newest = runs[-1]
    lines = [f"### Decode steps at {newest.label}", ""]
    for part in (_times(newest), _work(newest), _environment(runs)):
        lines += [*part, ""]
    return "\n".join(lines)


def _times(run: RunFigures) -> Iterator[str]:
    if run.times:
        yield table(run.times, "github")
        yield ""
    for timed in run.times:
        yield f"- {_describe_verdict(timed)}"


def _describe_verdict(timed: dict[str, Any]) -> str:
    because = f" because {timed['doubt']}" if timed["doubt"] else ""
    return (
        f"`{timed['test']}`: **{timed['verdict']}**{because} against `{timed['against']}`, with a "
        f"margin of {timed['margin']:.1%} after {timed['series']} series, {timed['seconds']:.0f} s"
    )


def _work(run: RunFigures) -> Iterator[str]:
    if not run.work:
        return
    grew = [work for work in run.work if work["more"]]
    yield f"{len(grew)} of {len(run.work)} steps do more work than their baselines."
    for work in run.work:
        lines = [*work["more"], *work["less"]]
        if lines:
            yield from ("", f"`{work['test']}`, {work['step']}:", "", "```", *lines, "```")


def _environment(runs: Sequence[RunFigures]) -> Iterator[str]:
    newest = runs[-1]
    yield ", ".join(f"{name} {text}" for name, text in newest.environment.items())
    for timed in newest.times:
        there, here = timed["there"]["versions"], timed["here"]["versions"]
        for line in differences(there, here):
            yield f"- from there to here: {line}"
    for line in differences(runs[-2].environment, newest.environment) if len(runs) > 1 else ():
        yield f"- since the run before, at {runs[-2].label}: {line}"
