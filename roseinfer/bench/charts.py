"""Charts of reports, drawn after the measurement or later from its JSON."""

from __future__ import annotations

import importlib.util
import json
import math
from typing import TYPE_CHECKING, Any

from roseinfer.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Document = Mapping[str, Any]


def check(path: Path) -> None:
    """Raise if a chart cannot be drawn to a file."""
    if path.suffix != ".png":
        raise ConfigError(f"--plot {path}: charts are PNG files; the name must end in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot: matplotlib is not installed; run pip install 'roseinfer[plot]', or write "
            "--json FILE and draw it elsewhere: python -m roseinfer.bench plot FILE CHART.png"
        )


def redraw(saved: Path, path: Path) -> None:
    """Draw the chart of a report written by ``--json``."""
    check(path)
    draw(read(saved), path)


def draw(document: Document, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    _CHARTS[document["benchmark"]](figure, document)
    config, machine = document["config"], document["machine"]
    model = f"{config['model']}, {config['weights']} weights, {config['dtype']}"
    caption = f"{machine['device']}, torch {machine['torch']}, {document['date'][:10]}"
    figure.suptitle(f"{model}\n{caption}", fontsize=9)
    figure.savefig(path, format="png", dpi=150)


def _draw_serving(figure: Figure, document: Document) -> None:
    speed, waits = figure.subplots(1, 2)
    rows = document["tables"]["throughput"]
    # The first peer is roseinfer itself; the others have no time of decoding alone.
    peers = document["tables"]["peers"][1:]
    names = [row["run"] for row in rows] + [row["system"].replace("-", "-\n") for row in peers]
    kinds = {"completion": "completion_tok_per_s", "decode": "decode_tok_per_s"}
    _draw_grouped_bars(
        speed, names, kinds, rows + [{"decode_tok_per_s": None, **row} for row in peers]
    )
    speed.tick_params("x", labelsize=7)
    speed.set_ylabel("tokens per second")
    # Only the last mode is drawn: queue waits differ too much between modes.
    last = rows[-1]["run"]
    of_last = [row for row in document["tables"]["latencies"] if row["run"] == last]
    ranks = {"p50": "p50_ms", "p95": "p95_ms", "p99": "p99_ms"}
    _draw_grouped_bars(waits, [row["metric"] for row in of_last], ranks, of_last)
    waits.set_ylabel("milliseconds")
    waits.set_yscale("log")
    waits.set_title(last, fontsize=9)


def _draw_grouped_bars(
    axes: Axes, names: list[str], fields: Mapping[str, str], rows: list[dict[str, Any]]
) -> None:
    """Draw a group of bars for every row, one bar for every field that is not None."""
    width = 0.8 / len(fields)
    for at, (label, field) in enumerate(fields.items()):
        offset = (at - (len(fields) - 1) / 2) * width
        heights = [row[field] or 0.0 for row in rows]
        axes.bar([place + offset for place in range(len(rows))], heights, width, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.legend(fontsize=8)


def _draw_ladder(figure: Figure, document: Document) -> None:
    axes = figure.subplots()
    floor = document["facts"]["floor_ms"]
    rungs = document["tables"]["rungs"]
    peers = document["tables"]["peers"][1:]  # without roseinfer's row, which is the last rung
    bars = [(row["rung"], row["step_ms"], "tab:blue") for row in rungs]
    bars += [(row["system"], row["ms_per_step"], "tab:gray") for row in peers]
    transform = axes.get_yaxis_transform()
    for place, (_, step_ms, color) in enumerate(bars):
        if not step_ms:  # the text is right of the floor, whose line would cross it
            axes.barh(place, 0.0)
            axes.text(floor * 1.1, place, "not measured", va="center", fontsize=8)
            continue
        axes.barh(place, step_ms, color=color)
        label = f"{step_ms:.3g} ms"
        axes.text(0.01, place, label, transform=transform, va="center", fontsize=8, color="white")
    spread = [(at, row) for at, row in enumerate(rungs) if row["step_ms"]]
    if spread:
        axes.errorbar(
            [row["step_ms"] for _, row in spread],
            [at for at, _ in spread],
            xerr=[
                [row["step_ms"] - row["fastest_ms"] for _, row in spread],
                [row["slowest_ms"] - row["step_ms"] for _, row in spread],
            ],
            fmt="none",
            ecolor="tab:orange",
            elinewidth=2,
            capsize=4,
            label="fastest and slowest run",
        )
    spikes = {at: row["itl_at_boundary_p99_ms"] for at, row in enumerate(rungs)}
    if drawn := [(spike, at) for at, spike in spikes.items() if spike]:
        axes.plot(*zip(*drawn, strict=True), "k|", ms=12, label="ITL p99 at block boundaries")
    axes.axvline(floor, color="tab:red", linestyle="--", label=f"memory floor {floor:.3g} ms")
    axes.set_xscale("log")
    axes.set_xlim(left=floor / 3)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("decode step, milliseconds (log)")
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)


def _draw_trace(figure: Figure, document: Document) -> None:
    """Draw a panel for each number of sequences, with the host's lane above the device's."""
    rows, spans = document["tables"]["steps"], document["tables"]["spans"]
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    lanes = {"step": (1, "tab:blue"), "wait": (1, "lightgray"), "device": (0, "tab:green")}
    on_device = any(span["lane"] == "device" for span in spans)
    for panel, row in zip(panels, rows, strict=True):
        for span in spans:
            if span["sequences"] == row["sequences"]:
                place, color = lanes[span["lane"]]
                spans_x = [(span["begin_us"], span["end_us"] - span["begin_us"])]
                panel.broken_barh(spans_x, (place - 0.4, 0.8), color=color, edgecolor="white")
        panel.set_yticks(*(([0, 1], ["device", "host"]) if on_device else ([1], ["host"])))
        panel.set_title(f"sequences: {row['sequences']}", fontsize=9, loc="left")
    panels[-1].set_xlabel("microseconds (gray: the host waits for the device)")


_CHARTS: dict[str, Callable[[Figure, Document], None]] = {
    "scheduler": _draw_serving,
    "streaming": _draw_serving,
    "ladder": _draw_ladder,
    "trace": _draw_trace,
}


# Reading and validation of reports written by ``--json``.


_TEXT, _NUMBER, _MAYBE_NUMBER = "a string", "a number", "a number or null"
_RANKS = dict.fromkeys(("p50_ms", "p95_ms", "p99_ms"), _MAYBE_NUMBER)
_SHARED: dict[str, Any] = {
    "config": {"model": _TEXT, "weights": _TEXT, "dtype": _TEXT},
    "machine": {"device": _TEXT, "torch": _TEXT},
    "date": _TEXT,
}
_SERVING: dict[str, Any] = {
    "tables": {
        "throughput": [
            {
                "run": _TEXT,
                "completion_tok_per_s": _MAYBE_NUMBER,
                "decode_tok_per_s": _MAYBE_NUMBER,
            }
        ],
        "latencies": [{"run": _TEXT, "metric": _TEXT, **_RANKS}],
        "peers": [{"system": _TEXT, "completion_tok_per_s": _MAYBE_NUMBER}],
    }
}
_LADDER: dict[str, Any] = {
    "facts": {"floor_ms": _NUMBER},
    "tables": {
        "rungs": [
            {
                "rung": _TEXT,
                "step_ms": _MAYBE_NUMBER,
                "fastest_ms": _MAYBE_NUMBER,
                "slowest_ms": _MAYBE_NUMBER,
                "itl_at_boundary_p99_ms": _MAYBE_NUMBER,
            }
        ],
        "peers": [{"system": _TEXT, "ms_per_step": _MAYBE_NUMBER}],
    },
}
_TRACE: dict[str, Any] = {
    "tables": {
        "steps": [{"sequences": _NUMBER}],
        "spans": [{"sequences": _NUMBER, "lane": _TEXT, "begin_us": _NUMBER, "end_us": _NUMBER}],
    }
}
_CHART_SCHEMAS: dict[str, Any] = {
    name: {**_SHARED, **own}
    for name, own in {
        "scheduler": _SERVING,
        "streaming": _SERVING,
        "ladder": _LADDER,
        "trace": _TRACE,
    }.items()
}
"""Fields of a report that its chart needs, and their types, by benchmark."""
_MAY_BE_EMPTY = ("tables.peers", "tables.spans")


def read(file: Path) -> dict[str, Any]:
    """Read a report, and raise unless it has all fields of its chart."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text, at byte {error.start}") from None
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{file}: not valid JSON, at {position}: {error.msg}") from None
    if not isinstance(report, dict) or not isinstance(report.get("benchmark"), str):
        raise ConfigError(f"{file}: not a benchmark report; use a file written by --json")
    benchmark = report["benchmark"]
    if benchmark not in _CHART_SCHEMAS:
        suggestion = did_you_mean(benchmark, _CHART_SCHEMAS)
        raise ConfigError(f"{file}: reports of {benchmark!r} have no chart{suggestion}")
    if mismatch := _find_mismatch(report, _CHART_SCHEMAS[benchmark], ""):
        raise ConfigError(f"{file}: {mismatch}")
    return report


def _find_mismatch(value: Any, expected: Any, place: str) -> str:
    """Return a message about the first value of another type than expected; empty if none."""
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return _mismatch_message(value, "an object", place)
        dot = place and f"{place}."
        parts = (
            _find_mismatch(value[name], each, dot + name)
            if name in value
            else f"{dot}{name} is missing"
            for name, each in expected.items()
        )
        return next(filter(None, parts), "")
    if isinstance(expected, list):
        if not isinstance(value, list) or not (value or place in _MAY_BE_EMPTY):
            return _mismatch_message(value, "a list of rows", place)
        rows = (_find_mismatch(row, expected[0], f"{place}[{at}]") for at, row in enumerate(value))
        return next(filter(None, rows), "")
    return "" if _is(value, expected) else _mismatch_message(value, expected, place)


def _is(value: Any, expected: str) -> bool:
    if expected == _TEXT:
        return isinstance(value, str)
    if value is None:
        return expected == _MAYBE_NUMBER
    return isinstance(value, int | float) and math.isfinite(value)


def _mismatch_message(value: Any, expected: str, place: str) -> str:
    return f"{place}: expected {expected}, actual value {json.dumps(value)[:40]}"
