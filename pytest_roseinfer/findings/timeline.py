"""The timeline of served requests, and the findings of a search as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from pytest_roseinfer.findings.frame import Drawing, box, centred, text, titled, width_of
from pytest_roseinfer.words import some

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
"""What a request may be at, and how that is drawn. An engine's adapter says which of ``waiting``,
``prefilling``, ``decoding`` and ``preempted``; where it does not, a request has arrived until it
has a token."""
_SIGNS = {"cancelled": "x", "ended": "end", "preempted": "off", "waiting": "-", "arrived": "in"}
_LABEL, _STEP, _ROW, _GAP = 92, 30, 26, 6


class Line(TypedDict):
    """One request."""

    number: int
    words: str
    stages: list[str]
    """At each step that was looked at; empty texts before it arrives and after it ends."""
    tokens: list[int]
    """How many tokens it had then."""
    expected: list[int]
    """The tokens that it gets alone."""
    found: list[int]
    parted: int | None
    """The first token that is another than alone, or too many, or that it did not get."""
    parted_step: int | None
    """The step at which that showed."""
    wrong: bool


class Timeline(TypedDict):
    steps: int
    requests: list[Line]


def draw_timeline(timeline: Timeline) -> Drawing:
    """Draw a row for each request and a column for each step, and where a request parted."""
    kept = _kept(timeline)
    marks = [text(0, _ROW / 2, "before step", "faint")]
    for column, step in enumerate(kept):
        marks.append(centred(_LABEL + (column + 0.5) * _STEP, _ROW / 2, str(step), "faint"))
    y = float(_ROW)
    for line in timeline["requests"]:
        marks += _row(line, kept, y)
        y += _ROW + _GAP
    width = float(_LABEL + _STEP * len(kept))
    drawn, width, y = _key(timeline, y, width)
    marks += drawn
    for line in timeline["requests"]:
        if line["wrong"] and line["parted"] is not None:
            drawn, tokens_width, y = _tokens(line, y)
            marks, width = marks + drawn, max(width, tokens_width)
    return Drawing("".join(marks), width + 2, y)


def timeline_words(timeline: Timeline) -> str:
    """Say what a drawing shows, for who cannot see it."""
    said = []
    for line in timeline["requests"]:
        stages = " then ".join(dict.fromkeys(filter(None, line["stages"])))
        parted = ""
        if line["parted"] is not None:
            parted = f", another token {line['parted']} than alone at step {line['parted_step']}"
        said.append(f"request {line['number']}: {stages}{parted}")
    return "; ".join(said)


def _kept(timeline: Timeline) -> list[int]:
    """Return the steps at which anything had changed, and the last."""
    kept, before = [], None
    for step in range(timeline["steps"]):
        now = [(line["stages"][step], line["tokens"][step]) for line in timeline["requests"]]
        if now != before or step == timeline["steps"] - 1:
            kept.append(step)
        before = now
    return kept


def _row(line: Line, kept: Sequence[int], y: float) -> list[str]:
    name = text(0, y + _ROW / 2, f"request {line['number']}", "strong bad" * line["wrong"])
    marks = [titled(line["words"], name)]
    for column, step in enumerate(kept):
        stage, tokens = line["stages"][step], line["tokens"][step]
        if not stage:
            continue
        x = float(_LABEL + column * _STEP)
        said = str(tokens) if stage == "decoding" else _SIGNS.get(stage, "")
        drawn = box(x + 1, y + 1, _STEP - 2, _ROW - 2, STAGES.get(stage, "slot"))
        drawn += centred(x + _STEP / 2, y + _ROW / 2, said, "" if tokens else "faint")
        if step == line["parted_step"]:
            drawn += box(x, y, _STEP, _ROW, "wrong")
        count = some(tokens, "token")
        marks.append(titled(f"before step {step}: {stage}, {count}", drawn))
    return marks


def _key(timeline: Timeline, y: float, width: float) -> tuple[list[str], float, float]:
    """Say what the boxes mean that occur."""
    met = {stage for line in timeline["requests"] for stage in line["stages"]}
    marks, x, y = [], 0.0, y + _GAP
    for stage, kind in STAGES.items():
        if stage not in met:
            continue
        sign = "2" if stage == "decoding" else _SIGNS.get(stage, "")
        said = f"{stage}, tokens so far" if stage == "decoding" else stage
        if x and x + 40 + width_of(said) > 340:
            x, y = 0.0, y + _ROW
        marks += [box(x + 1, y + 2, 26, _ROW - 6, kind), centred(x + 14, y + _ROW / 2 - 1, sign)]
        marks.append(text(x + 34, y + _ROW / 2 - 1, said, "faint"))
        x += 46 + width_of(said)
        width = max(width, x)
    return marks, width, y + _ROW + _GAP


def _tokens(line: Line, y: float) -> tuple[list[str], float, float]:
    """Draw the tokens that a request got below those it gets alone."""
    rows = {"generate_alone": line["expected"], f"request {line['number']}": line["found"]}
    cell = 12 + max(width_of(str(token)) for row in (*rows.values(), [0]) for token in row)
    marks, width = [], 0.0
    for name, row in rows.items():
        marks.append(text(0, y + _ROW / 2, name, "strong"))
        for at in range(max(len(row), (line["parted"] or 0) + 1)):
            x, said = _LABEL + at * cell, str(row[at]) if at < len(row) else ""
            marks.append(box(x, y + 1, cell, _ROW - 2, "of-0" if said else "unwritten"))
            parted = at == line["parted"]
            marks.append(centred(x + cell / 2, y + _ROW / 2, said, "strong" * parted))
            if parted and row is line["found"]:
                marks.append(box(x, y, cell, _ROW, "wrong"))
            width = max(width, x + cell)
        y += _ROW + 2
    return marks, width, y + _GAP


# What a search found, as plain data: reports hold it, and workers send it to their controller.


class Found(TypedDict):
    """One difference, however many tests met it."""

    target: str
    check: str
    """The check that found it, by the name that a trace gives it."""
    tests: list[str]
    """The tests that met it, by their ids."""
    what: str
    """What is wrong, in one line."""
    message: str
    expected: str
    """What must stand in the wrong place, where one place is known to be wrong."""
    found: str
    """What stands there."""
    example: dict[str, Any]
    """The smallest history or mix of requests, as in the trace."""
    trace: str
    """The file to replay, from the root of the project; empty where none could be saved."""
    script: str
    drawing: str
    layer: int
    """The layer that frames show."""
    block_size: int
    frames: list[Frame]
    """The cache before the first step of the history and after each; empty for an engine."""
    timeline: Timeline | None
    """What became of an engine's requests."""


def add(known: list[Found], new: Found) -> None:
    """Add what was found; of what is known already, add the tests that met it."""
    for each in known:
        if each["what"] == new["what"] or each["example"] == new["example"]:
            each["tests"] = sorted({*each["tests"], *new["tests"]})
            return
    known.append(new)
