"""The plot of paths x conditions: how often each path ran while each condition was met."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_roseinfer.report.verdict import Target

_WIDTH, _HEIGHT, _NAME = 48, 26, 20
"""The size of a cell, and the height of a path's name, which stands over its row: beside it, a
phone would have no room for the cells."""
_CHARACTER = 7.3
"""The width of a character in a label."""
_SLANT = 35
"""The names of columns rise by so many degrees."""


def plot(target: Target) -> str:
    """Draw inline SVG: a row for each path, a column for all its runs and one for each condition.

    Shades follow the logarithm of a count, so that what was met three times still shows.
    """
    paths = list(target["times"])
    conditions = [row["name"] for row in target["rows"] if row["kind"] == "condition"]
    columns = ["times run", *conditions]
    row = _NAME + _HEIGHT
    longest, slant = _CHARACTER * max(map(len, columns)), math.radians(_SLANT)
    top = 16 + longest * math.sin(slant)
    cells = _WIDTH * len(columns) + longest * math.cos(slant)
    width = max(cells, _CHARACTER * max(map(len, paths)))
    height = top + row * len(paths) + 6
    most = max([1, *target["times"].values()])
    marks = []
    for at, name in enumerate(columns):
        x, y = _WIDTH * (at + 0.5), top - 10
        marks.append(_text(x, y, name, f'transform="rotate(-{_SLANT} {x:.0f} {y:.0f})"'))
    for at, path in enumerate(paths):
        y = top + row * at
        marks.append(_text(2, y + _NAME / 2, path, ""))
        counts = {f"{path} ran": target["times"][path]} | {
            f"{path} while {name}: steps": target["together"][path][name] for name in conditions
        }
        for column, (what, count) in enumerate(counts.items()):
            marks.append(_cell(_WIDTH * column, y + _NAME, count, most, what))
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="paths x conditions reached">{"".join(marks)}</svg>'
    )


def _text(x: float, y: float, text: str, attributes: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" dy="0.32em" {attributes}>{escape(text)}</text>'


def _cell(x: float, y: float, count: int, most: int, what: str) -> str:
    shade = 0.12 + 0.88 * math.log1p(count) / math.log1p(most) if count else 0
    box = (
        f'<rect x="{x + 2:.0f}" y="{y + 2:.0f}" width="{_WIDTH - 4}" height="{_HEIGHT - 4}" '
        f'rx="3" class="{"cell" if count else "empty"}" fill-opacity="{shade:.2f}"/>'
    )
    tone = f'text-anchor="middle" class="{"dark" if shade > 0.65 else "light"}"'
    number = _text(x + _WIDTH / 2, y + _HEIGHT / 2, str(count), tone)
    return f"<g><title>{escape(what)} {count}</title>{box}{number}</g>"
