"""The marks that drawings are made of, as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

CHARACTER = 7.3
"""The width of a character."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Marks, and the room that they take."""

    marks: str
    width: float
    height: float

    def as_image(self, label: str) -> str:
        """Make inline SVG of it, with a name for who cannot see it."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" '
            f'height="{self.height:.0f}" role="img" aria-label="{escape(label)}">{self.marks}</svg>'
        )


def text(x: float, y: float, said: str, kind: str = "", more: str = "") -> str:
    """Write a line, its middle at the height ``y``."""
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" dy="0.35em"{of_kind}{more}>{escape(said)}</text>'


def centred(x: float, y: float, said: str, kind: str = "") -> str:
    return text(x, y, said, kind, ' text-anchor="middle"')


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 2) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius:g}" class="{kind}"/>'
    )


def hatched(x: float, y: float, width: float, height: float) -> str:
    """Strike through a box with lines that rise to the right."""
    strokes = []
    for begin in range(7 - round(height), round(width), 7):
        left, right = max(begin, 0), min(begin + height, width)
        strokes.append(f"M{x + left:.0f} {y + height - left + begin:.0f}")
        strokes.append(f"l{right - left:.0f} -{right - left:.0f}")
    return f'<path d="{"".join(strokes)}" class="hatch"/>'


def titled(said: str, marks: str) -> str:
    """Have a browser say something of these marks where they are pointed at."""
    return f"<g><title>{escape(said)}</title>{marks}</g>"


def width_of(said: str) -> float:
    return CHARACTER * len(said)
