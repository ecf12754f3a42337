"""The picture of a finding as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from typing import TYPE_CHECKING

from pytest_roseinfer.findings.frame import (
    COLOURS_OF_SEQUENCES,
    DRAWN,
    PALETTE,
    Drawing,
    box,
    centred,
    hatched,
    text,
    title,
    titled,
    width_of,
)
from pytest_roseinfer.findings.timeline import draw_timeline
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_roseinfer.findings.frame import Block, Frame, Row
    from pytest_roseinfer.findings.timeline import Found

_MOST_SLOTS, _FIRST, _LAST = 8, 4, 2
"""Of a longer block only some slots are drawn: the first, the last that are taken, the wrong."""
_MOST_BLOCKS = 24
"""Of more blocks that nobody holds the others are counted."""
_LINE = 300
"""Blocks beyond this width, which a phone has, begin a new line."""
_CELL, _HEAD, _LABEL, _GAP, _MARGIN = 24, 18, 24, 8, 2
"""The heights of a slot, of what is said over a block and over a sequence; gaps."""
_FREE = 34
"""The width of a block that nobody holds."""

Placed = set[tuple[int, int, int | None]]
"""Sequence, position and block of every token."""


@dataclass(frozen=True, slots=True)
class _Slot:
    kind: str
    said: str
    title: str = ""
    wrong: bool = False


def draw(frames: Sequence[Frame], block_size: int) -> list[Drawing]:
    """Draw each frame; what is not where it was in the one before has a darker line."""
    said = {label for frame in frames for row in frame["sequences"] for label in _labels(row)}
    cell = 10 + max([width_of("0.0"), *map(width_of, said)])
    drawn, before = [], None
    for frame in frames:
        drawn.append(_Picture(frame, block_size, cell, before).draw())
        before = _placed(frame, block_size)
    return drawn


def words(frame: Frame) -> str:
    """Say what a drawing shows, for who cannot see it."""
    said = []
    for row in frame["sequences"]:
        blocks = [str(block) for block in row["blocks"] or () if block is not None]
        in_blocks = f" in blocks {', '.join(blocks)}" if blocks else ""
        wrong = [f"position {each['position']} is wrong" for each in row["wrong"]]
        state = [row["state"]] if row["state"] else []
        stored = f"sequence {row['name']}: {len(row['tokens'])} tokens{in_blocks}"
        said.append(", ".join([stored, *state, *wrong]))
    free = [str(block["number"]) for block in frame["blocks"] if "free" in block["states"]]
    return "; ".join([*said, *([f"free: {', '.join(free)}"] if free else [])]) or "nothing stored"


def _labels(row: Row) -> Iterator[str]:
    yield from row["tokens"]
    yield from (each["found"] for each in row["wrong"])


def _placed(frame: Frame, block_size: int) -> Placed:
    return {
        (row["name"], at, _block_at(row, at // block_size))
        for row in frame["sequences"]
        for at in range(len(row["tokens"]) - row["unwritten"])
    }


def _block_at(row: Row, page: int) -> int | None:
    blocks = row["blocks"] or ()
    return blocks[page] if page < len(blocks) else None


class _Picture:
    """One frame while it is drawn, line by line."""

    def __init__(self, frame: Frame, block_size: int, cell: float, before: Placed | None) -> None:
        self.frame, self.block_size, self.cell = frame, block_size, cell
        self.before = _placed(frame, block_size) if before is None else before
        self.blocks = {block["number"]: block for block in frame["blocks"]}
        self.marks: list[str] = []
        self.x, self.y, self.width = float(_MARGIN), float(_MARGIN), 0.0

    def draw(self) -> Drawing:
        for row in self.frame["sequences"]:
            self._sequence(row)
        if not self.frame["sequences"]:
            self._label([("no sequence", "faint")])
        self._unheld()
        return Drawing("".join(self.marks), self.width + _MARGIN, self.y + _MARGIN)

    def _sequence(self, row: Row) -> None:
        count = len(row["tokens"])
        tokens = some(count, "token")
        name = f"sequence {row['name']}"
        self._label(
            [
                (name, "strong bad" if row["marked"] or row["wrong"] else "strong"),
                *[("is wrong", "bad")] * row["marked"],
                (", ".join(filter(None, [tokens, row["state"]])), "faint"),
            ]
        )
        if row["marked"]:
            under = self.y - 4
            width = width_of(name)
            self.marks.append(box(_MARGIN, under, width, 1, "wrong", 0))
        pages = -(-count // self.block_size)
        for page in range(max(pages, len(row["blocks"] or ()))):
            self._block(row, page)
        self._break(_HEAD + _CELL + _GAP if self.x > _MARGIN else 0)

    def _label(self, parts: Iterable[tuple[str, str]]) -> None:
        x = float(_MARGIN)
        for said, kind in parts:
            self.marks.append(text(x, self.y + _LABEL / 2, said, kind))
            x += width_of(said) + 9
        self.width = max(self.width, x)
        self.y += _LABEL

    def _break(self, height: float) -> None:
        """Go on below, at the left."""
        self.x, self.y = float(_MARGIN), self.y + height

    def _block(self, row: Row, page: int) -> None:
        slots = list(self._slots(row, page))
        gone = page < row["given_back"]
        width = width_of("given back") + 12 if gone else self.cell * len(slots)
        if self.x > _MARGIN and self.x + width > _LINE:
            self._break(_HEAD + _CELL + _GAP)
        number = _block_at(row, page)
        block = None if number is None else self.blocks.get(number)
        room = width
        top = self.y + _HEAD
        if gone:
            middle = self.x + width / 2
            self.marks.append(box(self.x, top, width, _CELL, "cached"))
            self.marks.append(centred(middle, top + _CELL / 2, "given back", "faint"))
        else:
            room = self._head(number, block, page, width)
            for at, slot in enumerate(slots):
                self.marks.append(self._drawn(slot, self.x + at * self.cell, top))
            shared = block is not None and "shared" in block["states"]
            wrong = block is not None and block["marked"]
            kind = "wrong" if wrong else f"block{' shared' * shared}"
            self.marks.append(box(self.x, top, width, _CELL, kind))
            self._outline_wrong(slots, top)
        self.x += room + _GAP
        self.width = max(self.width, self.x)

    def _head(self, number: int | None, block: Block | None, page: int, width: float) -> float:
        """Say over a block which it is, and how many have it; return the width that this takes."""
        middle = self.y + _HEAD / 2
        short, name = (
            (str(page), f"page {page}") if number is None else (str(number), f"block {number}")
        )
        noted = [""] if block is None else _notes(block)
        ways = [(name, noted[0]), (short, noted[0]), (name, noted[-1]), (short, noted[-1])]
        widths = [width_of(said) + 8 * bool(note) + width_of(note) for said, note in ways]
        at = next((at for at, each in enumerate(widths) if each <= width), len(ways) - 1)
        (said, note), room = ways[at], max(width, widths[at])
        self.marks.append(text(self.x, middle, said, "faint" if number is None else ""))
        if block is not None:
            kind = "bad strong" if block["marked"] or "free" in block["states"] else "faint"
            end = self.x + room - width_of(note)
            self.marks.append(titled(_about(block), text(end, middle, note, kind)))
        return room

    def _slots(self, row: Row, page: int) -> Iterator[_Slot]:
        """Return what is drawn of a page, slot by slot."""
        begin = page * self.block_size
        stored = row["tokens"][begin : begin + self.block_size]
        wrong = {each["position"] - begin: each for each in row["wrong"]}
        taken = range(len(stored))
        if self.block_size > _MOST_SLOTS:
            last = len(stored) - _LAST
            taken_kept = [at for at in taken if at < _FIRST or at >= last or at in wrong]
        else:
            taken_kept = list(taken)
        before = -1
        for at in taken_kept:
            if at > before + 1:
                yield _Slot("slot", "...", f"{at - before - 1} more")
            before = at
            yield self._slot(row, begin + at, stored[at], at in wrong)
        empty = self.block_size - len(stored)
        if self.block_size > _MOST_SLOTS and empty > 1:
            yield _Slot("slot", f"+{empty}", f"{empty} slots that nobody wrote")
        else:
            yield from (_Slot("slot", "", "nobody wrote here") for _ in range(empty))

    def _slot(self, row: Row, position: int, label: str, wrong: bool) -> _Slot:
        if wrong:
            (each,) = (one for one in row["wrong"] if one["position"] == position)
            said = f"position {position}: {each['words']}"
            return _Slot(_colour(each["found"]), each["found"], said, wrong=True)
        if position >= len(row["tokens"]) - row["unwritten"]:
            return _Slot("unwritten", label, f"position {position}: reserved, not written yet")
        key = (row["name"], position, _block_at(row, position // self.block_size))
        kind = _colour(label) + " new" * (key not in self.before)
        return _Slot(kind, label, f"position {position}: token {label}")

    def _drawn(self, slot: _Slot, x: float, y: float) -> str:
        marks = box(x, y, self.cell, _CELL, slot.kind)
        kind = "strong bad" if slot.wrong else "faint" if slot.kind in ("slot", "unwritten") else ""
        marks += centred(x + self.cell / 2, y + _CELL / 2, slot.said, kind)
        return titled(slot.title, marks)

    def _outline_wrong(self, slots: Sequence[_Slot], top: float) -> None:
        for at, slot in enumerate(slots):
            if slot.wrong:
                x = self.x + at * self.cell
                self.marks.append(box(x, top - 1, self.cell, _CELL + 2, "wrong"))

    def _unheld(self) -> None:
        """Draw the blocks that no sequence holds, those of one kind beside each other."""
        alone = [block for block in self.frame["blocks"] if not block["holders"]]
        alone.sort(key=lambda block: (block["states"], block["number"]))
        for states, group in groupby(alone, key=lambda block: block["states"]):
            blocks = list(group)
            said = "not free, and of no sequence" if states == ["counted"] else ", ".join(states)
            self._label([("blocks", "strong"), (said, "faint")])
            for block in blocks[:_MOST_BLOCKS]:
                self._alone(block)
            if len(blocks) > _MOST_BLOCKS:
                more = f"+{len(blocks) - _MOST_BLOCKS}"
                self.marks.append(text(self.x, self.y + _CELL / 2, more, "faint"))
            self._break(_CELL + _GAP)

    def _alone(self, block: Block) -> None:
        if self.x + _FREE > _LINE:
            self._break(_CELL + _GAP / 2)
        marks = box(
            self.x, self.y, _FREE, _CELL, "cached" if "cached" in block["states"] else "free"
        )
        if "poisoned" in block["states"]:
            marks += hatched(self.x, self.y, _FREE, _CELL)
        if block["marked"]:
            marks += box(self.x, self.y, _FREE, _CELL, "wrong")
        kind = "strong bad" if block["marked"] else ""
        marks += centred(self.x + _FREE / 2, self.y + _CELL / 2, str(block["number"]), kind)
        self.marks.append(titled(_about(block), marks))
        self.x += _FREE + 4
        self.width = max(self.width, self.x)


def _notes(block: Block) -> list[str]:
    """Return what is said over a block of who has it, the longest first."""
    count = "" if block["refcount"] is None else f"x{block['refcount']}"
    if "free" in block["states"]:
        return [f"{count} free too".strip(), "free too"]
    return [f"{count} shared".strip(), count] if "shared" in block["states"] else [count]


def _about(block: Block) -> str:
    holders = f"of sequences {', '.join(map(str, block['holders']))}" * bool(block["holders"])
    count = "" if block["refcount"] is None else f"refcount {block['refcount']}"
    said = [f"block {block['number']}: {', '.join(block['states'])}", holders, count]
    return ", ".join(filter(None, said))


def _colour(label: str) -> str:
    """Return the class of a token's box: tokens that one sequence or text wrote look alike."""
    writer = "".join(filter(str.isdigit, label.partition(".")[0].partition("(")[0]))
    return f"of-{int(writer) % COLOURS_OF_SEQUENCES}" if writer else "slot"


# A finding as one picture: a file that can be put into an issue or a pull request.


_MOST = 12
"""So many steps are drawn, the last ones; the others are said to be left out."""
_CHARACTERS = 78
_LINE_HEIGHT, _SPACE, _POSTER_MARGIN = 19, 14, 16


def poster(found: Found) -> str:
    """Draw what was found, or return nothing where nothing is known but words."""
    if not (found["frames"] or found["timeline"]):
        return ""
    lines = [(line, "strong bad") for line in wrap(found["what"], _CHARACTERS)]
    lines.append((found["target"], "faint"))
    marks, y = [], float(_POSTER_MARGIN)
    for said, kind in lines:
        marks.append(text(_POSTER_MARGIN, y + _LINE_HEIGHT / 2, said, kind))
        y += _LINE_HEIGHT
    width = max(width_of(said) for said, _ in lines)
    for said, drawing in _parts(found):
        y += _SPACE
        for line in wrap(said, _CHARACTERS):
            marks.append(text(_POSTER_MARGIN, y + _LINE_HEIGHT / 2, line))
            width, y = max(width, width_of(line)), y + _LINE_HEIGHT
        marks.append(f'<g transform="translate({_POSTER_MARGIN} {y:.0f})">{drawing.marks}</g>')
        width, y = max(width, drawing.width), y + drawing.height
    width, y = width + 2 * _POSTER_MARGIN, y + _POSTER_MARGIN
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
        refused = f"; {frame['refused']}" if frame["refused"] else ""
        before = f"(after {left_out} steps) " if at == left_out else ""
        yield f"{before}{title(frame)}{refused}", drawing
