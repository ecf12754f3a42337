"""Timelines of served requests, and findings of a search as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from pytest_roseinfer.findings.frame import Drawing, box, centred, text, width_of, with_tooltip
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.findings.frame import Frame

STAGES = {
    "arrived": "free",
    "waiting": "free",
    "prefilling": "of-1",
    "decoding": "of-0",
    "preempted": "unwritten",
    "cancelled": "slot",
    "ended": "slot",
}
"""Stages of a request and their style classes.

An engine's adapter reports ``waiting``, ``prefilling``, ``decoding`` and ``preempted``; without
that, a request is ``arrived`` until it has a token.
"""
_SIGNS = {"cancelled": "x", "ended": "end", "preempted": "off", "waiting": "-", "arrived": "in"}
_LABEL, _STEP, _ROW, _GAP = 92, 30, 26, 6


class RequestTimeline(TypedDict):
    """Timeline of one request."""

    number: int
    description: str
    stages: list[str]
    """Stage at each recorded step; empty before the request arrives and after it ends."""
    tokens: list[int]
    """Number of output tokens at each recorded step."""
    expected: list[int]
    """Tokens that the request gets alone."""
    actual: list[int]
    diverged_at: int | None
    """Index of the first token that is different, surplus or missing; None if all are right."""
    diverged_step: int | None
    """Step of the first difference; None without one."""
    wrong: bool


class Timeline(TypedDict):
    """Timelines of the requests of one mix."""

    steps: int
    requests: list[RequestTimeline]


def draw_timeline(timeline: Timeline) -> Drawing:
    """Draw a row per request and a column per step, and mark where a request diverged."""
    steps_shown = _steps_with_changes(timeline)
    marks = [text(0, _ROW / 2, "before step", "faint")]
    for column, step in enumerate(steps_shown):
        marks.append(centred(_LABEL + (column + 0.5) * _STEP, _ROW / 2, str(step), "faint"))
    y = float(_ROW)
    for line in timeline["requests"]:
        marks += _row(line, steps_shown, y)
        y += _ROW + _GAP
    width = float(_LABEL + _STEP * len(steps_shown))
    drawn, width, y = _key(timeline, y, width)
    marks += drawn
    for line in timeline["requests"]:
        if line["wrong"] and line["diverged_at"] is not None:
            drawn, tokens_width, y = _tokens(line, y)
            marks, width = marks + drawn, max(width, tokens_width)
    return Drawing("".join(marks), width + 2, y)


def describe_timeline(timeline: Timeline) -> str:
    """Describe a drawing for screen readers."""
    parts = []
    for line in timeline["requests"]:
        stages = " then ".join(dict.fromkeys(filter(None, line["stages"])))
        divergence = ""
        if line["diverged_at"] is not None:
            divergence = (
                f", token {line['diverged_at']} differs from alone at step {line['diverged_step']}"
            )
        parts.append(f"request {line['number']}: {stages}{divergence}")
    return "; ".join(parts)


def _steps_with_changes(timeline: Timeline) -> list[int]:
    """Return the steps with changes, and the last step."""
    steps_shown, before = [], None
    for step in range(timeline["steps"]):
        now = [(line["stages"][step], line["tokens"][step]) for line in timeline["requests"]]
        if now != before or step == timeline["steps"] - 1:
            steps_shown.append(step)
        before = now
    return steps_shown


def _row(line: RequestTimeline, steps_shown: Sequence[int], y: float) -> list[str]:
    name = text(0, y + _ROW / 2, f"request {line['number']}", "strong bad" * line["wrong"])
    marks = [with_tooltip(line["description"], name)]
    for column, step in enumerate(steps_shown):
        stage, tokens = line["stages"][step], line["tokens"][step]
        if not stage:
            continue
        x = float(_LABEL + column * _STEP)
        label = str(tokens) if stage == "decoding" else _SIGNS.get(stage, "")
        drawn = box(x + 1, y + 1, _STEP - 2, _ROW - 2, STAGES.get(stage, "slot"))
        drawn += centred(x + _STEP / 2, y + _ROW / 2, label, "" if tokens else "faint")
        if step == line["diverged_step"]:
            drawn += box(x, y, _STEP, _ROW, "wrong")
        count = format_count(tokens, "token")
        marks.append(with_tooltip(f"before step {step}: {stage}, {count}", drawn))
    return marks


def _key(timeline: Timeline, y: float, width: float) -> tuple[list[str], float, float]:
    """Draw a legend of the boxes that occur."""
    stages = {stage for line in timeline["requests"] for stage in line["stages"]}
    marks, x, y = [], 0.0, y + _GAP
    for stage, kind in STAGES.items():
        if stage not in stages:
            continue
        sign = "2" if stage == "decoding" else _SIGNS.get(stage, "")
        label = f"{stage}, tokens so far" if stage == "decoding" else stage
        if x and x + 40 + width_of(label) > 340:
            x, y = 0.0, y + _ROW
        marks += [box(x + 1, y + 2, 26, _ROW - 6, kind), centred(x + 14, y + _ROW / 2 - 1, sign)]
        marks.append(text(x + 34, y + _ROW / 2 - 1, label, "faint"))
        x += 46 + width_of(label)
        width = max(width, x)
    return marks, width, y + _ROW + _GAP


def _tokens(line: RequestTimeline, y: float) -> tuple[list[str], float, float]:
    """Draw the tokens that a request got, below those it gets alone."""
    rows = {"generate_alone": line["expected"], f"request {line['number']}": line["actual"]}
    cell = 12 + max(width_of(str(token)) for row in (*rows.values(), [0]) for token in row)
    marks, width = [], 0.0
    for name, row in rows.items():
        marks.append(text(0, y + _ROW / 2, name, "strong"))
        for at in range(max(len(row), (line["diverged_at"] or 0) + 1)):
            x, label = _LABEL + at * cell, str(row[at]) if at < len(row) else ""
            marks.append(box(x, y + 1, cell, _ROW - 2, "of-0" if label else "unwritten"))
            is_divergence = at == line["diverged_at"]
            marks.append(centred(x + cell / 2, y + _ROW / 2, label, "strong" * is_divergence))
            if is_divergence and row is line["actual"]:
                marks.append(box(x, y, cell, _ROW, "wrong"))
            width = max(width, x + cell)
        y += _ROW + 2
    return marks, width, y + _GAP


# Findings as plain data, for reports and for workers to send to their controller.


class FindingRecord(TypedDict):
    """One failure, with all tests that hit it."""

    target: str
    check: str
    """Check that found it, by its name in traces."""
    digest: str
    """Digest by which a file of known findings names it."""
    known: str
    """Reason and link if it is a known finding; empty for any other."""
    tests: list[str]
    """Ids of the tests that hit it."""
    summary: str
    """Summary in one line."""
    message: str
    expected: str
    """Expected contents of the wrong location; empty if it is unknown."""
    actual: str
    """Actual contents of the wrong location; empty if it is unknown."""
    example: dict[str, Any]
    """Smallest history or mix of requests, as in the trace."""
    trace: str
    """Trace file to replay, relative to the project's root; empty if none could be saved."""
    script: str
    drawing: str
    layer: int
    """Layer that the frames show."""
    block_size: int
    frames: list[Frame]
    """Cache before the first step of the history and after each; empty for an engine."""
    timeline: Timeline | None
    """Timeline of an engine's requests; None for a cache."""


def add(findings: list[FindingRecord], new: FindingRecord) -> None:
    """Add a finding; if it is known already, add only its tests."""
    for each in findings:
        if each["summary"] == new["summary"] or each["example"] == new["example"]:
            each["tests"] = sorted({*each["tests"], *new["tests"]})
            return
    findings.append(new)
