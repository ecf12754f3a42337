"""A finding as one picture: a file that can be put into an issue or a pull request."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from pytest_roseinfer.findings.drawn.blocks import draw
from pytest_roseinfer.findings.drawn.marks import Drawing, box, text, width_of
from pytest_roseinfer.findings.drawn.style import DRAWN, PALETTE
from pytest_roseinfer.findings.drawn.timeline import draw_timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.findings.found import Found

_MOST = 12
"""So many steps are drawn, the last ones; the others are said to be left out."""
_CHARACTERS = 78
_LINE, _SPACE, _MARGIN = 19, 14, 16


def poster(found: Found) -> str:
    """Draw what was found, or return nothing where nothing is known but words."""
    if not (found["frames"] or found["timeline"]):
        return ""
    lines = [(line, "strong bad") for line in wrap(found["what"], _CHARACTERS)]
    lines.append((found["target"], "faint"))
    marks, y = [], float(_MARGIN)
    for said, kind in lines:
        marks.append(text(_MARGIN, y + _LINE / 2, said, kind))
        y += _LINE
    width = max(width_of(said) for said, _ in lines)
    for said, drawing in _parts(found):
        y += _SPACE
        for line in wrap(said, _CHARACTERS):
            marks.append(text(_MARGIN, y + _LINE / 2, line))
            width, y = max(width, width_of(line)), y + _LINE
        marks.append(f'<g transform="translate({_MARGIN} {y:.0f})">{drawing.marks}</g>')
        width, y = max(width, drawing.width), y + drawing.height
    width, y = width + 2 * _MARGIN, y + _MARGIN
    paper = box(0, 0, width, y, "paper", 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {y:.0f}" '
        f'width="{width:.0f}" height="{y:.0f}">\n'
        f"<style>{PALETTE}{DRAWN}svg .paper {{ fill: var(--paper); }}\n</style>\n"
        f"{paper}{''.join(marks)}\n</svg>\n"
    )


def _parts(found: Found) -> Iterator[tuple[str, Drawing]]:
    """Return the drawings, and what is said over each."""
    if found["timeline"]:
        for line in found["timeline"]["requests"]:
            yield f"request {line['number']}: {line['words']}", Drawing("", 0, 0)
        yield "", draw_timeline(found["timeline"])
    frames = found["frames"]
    left_out = len(frames) - _MOST
    for at, (frame, drawing) in enumerate(
        zip(frames, draw(frames, found["block_size"]), strict=True)
    ):
        if at < left_out:
            continue
        said = f"{frame['step']}. {frame['words']}" if at else frame["words"]
        refused = f"; {frame['refused']}" if frame["refused"] else ""
        before = f"(after {left_out} steps) " if at == left_out else ""
        yield f"{before}{said}{refused}", drawing
