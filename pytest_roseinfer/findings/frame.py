"""Data model, SVG marks and styles that pictures of a cache share."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, TypedDict

from pytest_roseinfer.oracle.pages import token_label

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pytest_roseinfer.capabilities.observation import Location, Snapshot
    from pytest_roseinfer.oracle.oracle import Oracle


class WrongToken(TypedDict):
    """A token that reads back wrong."""

    position: int
    actual: str
    """Label of the token that is there."""
    description: str


class PageView(TypedDict):
    """One block of a sequence, according to the oracle."""

    number: int
    """Identity of the page: equal only where sequences share it."""
    holders: int
    """Number of sequences that hold the page."""


class SequenceView(TypedDict):
    """One sequence."""

    name: int
    state: str
    """Why the sequence is absent, such as preempted; or that it has ended, as a session."""
    tokens: list[str]
    """Labels of the expected tokens by position, as in ``sequence.token``."""
    unwritten: int
    """Number of last tokens that are reserved and not written yet."""
    pages: list[PageView]
    """Expected blocks; empty if the sequence is absent."""
    blocks: list[int | None] | None
    """Block table, with None for a block that was given back; None if it cannot be read."""
    unreadable: str
    """Error of reading the table; empty without one."""
    given_back: int
    """Number of first blocks that left the window of this layer."""
    wrong: list[WrongToken]
    marked: bool
    """True if the sequence is wrong as a whole, not just some of its tokens."""


class BlockView(TypedDict):
    """One block in the cache's ledger or tables."""

    number: int
    states: list[str]
    """Any of ``held``, ``shared``, ``free``, ``cached`` and ``poisoned``; or ``counted`` for a
    block that is not free and in no table."""
    refcount: int | None
    """Refcount in the cache's ledger; None if it has none."""
    holders: list[int]
    """Sequences whose tables name the block."""
    marked: bool
    """True if the block is wrong."""


class Frame(TypedDict):
    """A cache after one step, as data for drawings."""

    step: int
    """Number of the step that led here; 0 before the first."""
    description: str
    refused: str
    """Why the step was refused; empty if it was not."""
    sequences: list[SequenceView]
    blocks: list[BlockView]


def title(frame: Frame) -> str:
    """Name the step that led to a frame."""
    return f"{frame['step']}. {frame['description']}" if frame["step"] else frame["description"]


class LayerState:
    """One layer of a cache at one moment, with its expected contents."""

    scratch_blocks: Collection[int] = ()
    """Blocks that pictures leave out."""
    poisons_free = False
    """True if free blocks hold poison."""

    def __init__(
        self, oracle: Oracle, snapshot: Snapshot, layer: int, marked: Location | None
    ) -> None:
        self.oracle, self.snapshot, self.layer, self.marked = oracle, snapshot, layer, marked
        self.ledger = snapshot.ledger_or_none(layer)
        self.tables = snapshot.tables_or_errors(layer)
        self._numbers: dict[int, int] = {}

    def frame(self, step: int = 0, description: str = "", refused: str = "") -> Frame:
        return {
            "step": step,
            "description": description,
            "refused": refused,
            "sequences": [self._row(seq) for seq in sorted(self.oracle.named)],
            "blocks": list(self._blocks()),
        }

    def wrong(self, seq: int) -> list[WrongToken]:  # noqa: ARG002
        """List the tokens of a sequence that read back wrong; none here, as nothing is compared."""
        return []

    def _row(self, seq: int) -> SequenceView:
        oracle, here = self.oracle, seq in self.oracle.sequences
        absence, table = oracle.absent.get(seq), self.tables.get(seq) if here else []
        wrong = self.wrong(seq) if here else []
        tokens = absence.tokens if absence and not here else oracle.tokens(seq)
        error = f"{type(table).__name__}: {table}" if isinstance(table, Exception) else ""
        return {
            "name": seq,
            "state": absence.description if absence else oracle.ended.get(seq, ""),
            "tokens": list(map(token_label, tokens)),
            "unwritten": oracle.unwritten(seq) if here else 0,
            "pages": list(self._pages(seq)) if here else [],
            "blocks": None if isinstance(table, Exception) else table,
            "unreadable": error,
            "given_back": oracle.count_out_of_window(seq, self.layer) if here else 0,
            "wrong": wrong,
            "marked": self.marked is not None and seq in self.marked.holders and not wrong,
        }

    def _pages(self, seq: int) -> Iterator[PageView]:
        for page in self.oracle.sequences[seq]:
            number = self._numbers.setdefault(id(page), len(self._numbers))
            yield {"number": number, "holders": page.holders}

    def _blocks(self) -> Iterator[BlockView]:
        ledger, holders = self.ledger, self._holders()
        free, cached = (ledger.free, ledger.cached) if ledger else ((), ())
        refcounts = ledger.refcounts if ledger else {}
        wrong = self.marked.block if self.marked else None
        numbers = {*holders, *free, *cached, *refcounts, *([] if wrong is None else [wrong])}
        for number in sorted(numbers - {*self.scratch_blocks}):
            block_holders = holders.get(number, [])
            yield {
                "number": number,
                "states": self._states(len(block_holders), number in free, number in cached),
                "refcount": refcounts.get(number),
                "holders": block_holders,
                "marked": number == wrong,
            }

    def _states(self, holders: int, free: bool, cached: bool) -> list[str]:
        states = ["shared" if holders > 1 else "held"] if holders else []
        states += ["free"] * free + ["cached"] * cached
        if states == ["free"] and self.poisons_free:
            states.append("poisoned")
        return states or ["counted"]

    def _holders(self) -> dict[int, list[int]]:
        """Map each block of the layer's pool to the sequences whose tables name it."""
        holders: dict[int, list[int]] = {}
        for layer in self.oracle.pool_of(self.layer):
            for seq, table in self.snapshot.tables_or_errors(layer).items():
                for block in () if isinstance(table, Exception) else table:
                    if block is not None and seq not in holders.setdefault(block, []):
                        holders[block].append(seq)
        return holders


# SVG marks.


CHARACTER = 7.3
"""Width of a character, in pixels."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """SVG marks, with their width and height in pixels."""

    marks: str
    width: float
    height: float

    def as_image(self, label: str) -> str:
        """Return inline SVG with a label for screen readers."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" '
            f'height="{self.height:.0f}" role="img" aria-label="{escape(label)}">{self.marks}</svg>'
        )


def text(x: float, y: float, content: str, kind: str = "", more: str = "") -> str:
    """Return a line of text, vertically centred at ``y``."""
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.0f}" y="{y:.0f}" dy="0.35em"{of_kind}{more}>{escape(content)}</text>'


def centred(x: float, y: float, content: str, kind: str = "") -> str:
    return text(x, y, content, kind, ' text-anchor="middle"')


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 2) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius:g}" class="{kind}"/>'
    )


def hatched(x: float, y: float, width: float, height: float) -> str:
    """Return hatching for a box: lines that rise to the right."""
    strokes = []
    for begin in range(7 - round(height), round(width), 7):
        left, right = max(begin, 0), min(begin + height, width)
        strokes.append(f"M{x + left:.0f} {y + height - left + begin:.0f}")
        strokes.append(f"l{right - left:.0f} -{right - left:.0f}")
    return f'<path d="{"".join(strokes)}" class="hatch"/>'


def with_tooltip(tooltip: str, marks: str) -> str:
    """Add a tooltip to marks."""
    return f"<g><title>{escape(tooltip)}</title>{marks}</g>"


def width_of(content: str) -> float:
    return CHARACTER * len(content)


# Styles of pages and drawings, light and dark.


PALETTE = """
:root { --paper: #ffffff; --ink: #1c2330; --faint: #5d6775; --line: #d5dbe3; --shade: #12707a;
  --good: #17743f; --bad: #b8202a; --soft: #f5f7f9;
  --of-0: #d6e6f5; --of-1: #fbe2c4; --of-2: #d5edd9; --of-3: #e9dcf3; --of-4: #fadbe3;
  --of-5: #e6e3c6; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181f; --ink: #e4e8ee; --faint: #9aa4b2; --line: #39424f; --shade: #35b3bf;
    --good: #4cc580; --bad: #ff7b80; --soft: #1b212a;
    --of-0: #1f3d59; --of-1: #573a1b; --of-2: #1f482b; --of-3: #422f59; --of-4: #592d3b;
    --of-5: #474520; } }
"""
"""Colours; ``--of-0`` and so on are for the tokens of one sequence each."""
COLOURS_OF_SEQUENCES = 6
DRAWN = """
svg text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: var(--ink); }
svg .faint { fill: var(--faint); } svg .bad { fill: var(--bad); } svg .strong { font-weight: 700; }
svg .block { fill: none; stroke: var(--faint); }
svg .shared { stroke: var(--ink); stroke-width: 2; }
svg .slot { fill: var(--paper); stroke: var(--line); }
svg .unwritten, svg .cached { fill: none; stroke: var(--faint); stroke-dasharray: 3 3; }
svg .free { fill: none; stroke: var(--line); }
svg .hatch { stroke: var(--line); }
svg .new { stroke: var(--ink); stroke-width: 1.5; }
svg .wrong { fill: none; stroke: var(--bad); stroke-width: 2.5; }
""" + "".join(
    f"svg .of-{number} {{ fill: var(--of-{number}); stroke: var(--line); }}\n"
    for number in range(COLOURS_OF_SEQUENCES)
)
