"""Pictures of a finding as SVG."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from textwrap import shorten, wrap
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
    width_of,
    with_tooltip,
)
from pytest_roseinfer.findings.timeline import draw_timeline
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pytest_roseinfer.findings.frame import BlockView, Frame, SequenceView
    from pytest_roseinfer.findings.timeline import FindingRecord

_MAX_SLOTS, _FIRST, _LAST = 8, 4, 2
"""Slots drawn of a block: up to 8; of a longer one the first 4, the last 2 filled, the wrong."""
_MAX_BLOCKS = 24
"""Maximum blocks drawn of those without holders; the rest are counted."""
_LINE = 300
"""Maximum width in pixels of a line of blocks, that of a phone."""
_CELL, _HEAD, _LABEL, _GAP, _MARGIN = 24, 18, 24, 8, 2
"""Heights of a slot, of a block's header and of a sequence's label; gap and margin."""
_FREE = 34
"""Width of a block without holders."""

_MAX_SEQUENCES = 8
"""Maximum sequences drawn of a frame, those of the error first; the rest are counted."""
_MAX_HEIGHT = 1900
"""Maximum height in pixels of the drawings of one picture, of which the latest are kept."""

Placed = set[tuple[int, int, int | None]]
"""Sequence, position and block of every token."""


@dataclass(frozen=True, slots=True)
class _Slot:
    kind: str
    label: str
    title: str = ""
    wrong: bool = False


def draw(frames: Sequence[Frame], block_size: int) -> list[Drawing]:
    """Draw each frame; tokens that are new or moved since the previous one have a darker line."""
    names = _drawn_sequences(frames)
    kept_frames = [_with_sequences(frame, names) for frame in frames]
    labels = {
        label for frame in kept_frames for row in frame["sequences"] for label in _labels(row)
    }
    cell = 10 + max([width_of("0.0"), *map(width_of, labels)])
    drawn, before = [], None
    for frame, kept in zip(frames, kept_frames, strict=True):
        num_others = len(frame["sequences"]) - len(kept["sequences"])
        drawn.append(_Picture(kept, block_size, cell, before, num_others).draw())
        before = _place_tokens(kept, block_size)
    return drawn


def _drawn_sequences(frames: Sequence[Frame]) -> set[int]:
    """Return the names of the sequences to draw: those of the error, then those of the last step.

    Sequences of the error are wrong, hold a wrong block or share one, or have the token that was
    expected or found.
    """
    if not frames:
        return set()
    last = frames[-1]
    before = {row["name"]: row for row in frames[-2]["sequences"]} if len(frames) > 1 else {}
    wrong = [row for row in last["sequences"] if row["wrong"] or row["marked"]]
    holders = {name for block in last["blocks"] if block["marked"] for name in block["holders"]}
    blocks = {block for row in wrong for block in row["blocks"] or () if block is not None}
    labels = {each["actual"] for row in wrong for each in row["wrong"]}
    labels |= {row["tokens"][each["position"]] for row in wrong for each in row["wrong"]}

    def distance(row: SequenceView) -> int:
        if row in wrong or row["name"] in holders:
            return 0
        if labels.intersection(row["tokens"]) or blocks.intersection(row["blocks"] or ()):
            return 1
        return 2 if before.get(row["name"]) != row else 3

    rows = sorted(last["sequences"], key=distance)
    names = [row["name"] for row in rows[:_MAX_SEQUENCES]]
    others = (row["name"] for frame in reversed(frames) for row in frame["sequences"])
    return {*names, *list(dict.fromkeys([*names, *others]))[:_MAX_SEQUENCES]}


def _with_sequences(frame: Frame, names: set[int]) -> Frame:
    rows = [row for row in frame["sequences"] if row["name"] in names]
    return {**frame, "sequences": rows}


def words(frame: Frame) -> str:
    """Describe a drawing for screen readers."""
    parts = []
    for row in frame["sequences"]:
        blocks = [str(block) for block in row["blocks"] or () if block is not None]
        in_blocks = f" in blocks {', '.join(blocks)}" if blocks else ""
        wrong = [f"position {each['position']} is wrong" for each in row["wrong"]]
        state = [row["state"]] if row["state"] else []
        stored = f"sequence {row['name']}: {len(row['tokens'])} tokens{in_blocks}"
        parts.append(", ".join([stored, *state, *wrong]))
    free = [str(block["number"]) for block in frame["blocks"] if "free" in block["states"]]
    return "; ".join([*parts, *([f"free: {', '.join(free)}"] if free else [])]) or "nothing stored"


def _labels(row: SequenceView) -> Iterator[str]:
    yield from row["tokens"]
    yield from (each["actual"] for each in row["wrong"])


def _place_tokens(frame: Frame, block_size: int) -> Placed:
    return {
        (row["name"], at, _block_at(row, at // block_size))
        for row in frame["sequences"]
        for at in range(len(row["tokens"]) - row["unwritten"])
    }


def _block_at(row: SequenceView, page: int) -> int | None:
    blocks = row["blocks"] or ()
    return blocks[page] if page < len(blocks) else None


class _Picture:
    """One frame while it is drawn, line by line."""

    def __init__(
        self, frame: Frame, block_size: int, cell: float, before: Placed | None, num_others: int
    ) -> None:
        self.num_others = num_others
        """Number of sequences that are not drawn."""
        self.frame, self.block_size, self.cell = frame, block_size, cell
        self.before = _place_tokens(frame, block_size) if before is None else before
        self.blocks = {block["number"]: block for block in frame["blocks"]}
        self.marks: list[str] = []
        self.x, self.y, self.width = float(_MARGIN), float(_MARGIN), 0.0

    def draw(self) -> Drawing:
        for row in self.frame["sequences"]:
            self._sequence(row)
        if self.num_others:
            others = format_count(self.num_others, "other sequence")
            self._label([(f"{others}, not drawn", "faint")])
        elif not self.frame["sequences"]:
            self._label([("no sequence", "faint")])
        self._draw_free_blocks()
        return Drawing("".join(self.marks), self.width + _MARGIN, self.y + _MARGIN)

    def _sequence(self, row: SequenceView) -> None:
        count = len(row["tokens"])
        tokens = format_count(count, "token")
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
        for content, kind in parts:
            self.marks.append(text(x, self.y + _LABEL / 2, content, kind))
            x += width_of(content) + 9
        self.width = max(self.width, x)
        self.y += _LABEL

    def _break(self, height: float) -> None:
        """Continue on a new line."""
        self.x, self.y = float(_MARGIN), self.y + height

    def _block(self, row: SequenceView, page: int) -> None:
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
                self.marks.append(self._draw_slot(slot, self.x + at * self.cell, top))
            shared = block is not None and "shared" in block["states"]
            wrong = block is not None and block["marked"]
            kind = "wrong" if wrong else f"block{' shared' * shared}"
            self.marks.append(box(self.x, top, width, _CELL, kind))
            self._outline_wrong(slots, top)
        self.x += room + _GAP
        self.width = max(self.width, self.x)

    def _head(self, number: int | None, block: BlockView | None, page: int, width: float) -> float:
        """Draw a block's header, its number and notes; return the width that this takes."""
        middle = self.y + _HEAD / 2
        short, name = (
            (str(page), f"page {page}") if number is None else (str(number), f"block {number}")
        )
        notes = [""] if block is None else _notes(block)
        candidates = [(name, notes[0]), (short, notes[0]), (name, notes[-1]), (short, notes[-1])]
        widths = [width_of(label) + 8 * bool(note) + width_of(note) for label, note in candidates]
        at = next((at for at, each in enumerate(widths) if each <= width), len(candidates) - 1)
        (label, note), room = candidates[at], max(width, widths[at])
        self.marks.append(text(self.x, middle, label, "faint" if number is None else ""))
        if block is not None:
            kind = "bad strong" if block["marked"] or "free" in block["states"] else "faint"
            end = self.x + room - width_of(note)
            self.marks.append(with_tooltip(_about(block), text(end, middle, note, kind)))
        return room

    def _slots(self, row: SequenceView, page: int) -> Iterator[_Slot]:
        """Yield the slots to draw of a page."""
        begin = page * self.block_size
        stored = row["tokens"][begin : begin + self.block_size]
        wrong = {each["position"] - begin: each for each in row["wrong"]}
        written_slots = range(len(stored))
        if self.block_size > _MAX_SLOTS:
            last = len(stored) - _LAST
            taken_kept = [at for at in written_slots if at < _FIRST or at >= last or at in wrong]
        else:
            taken_kept = list(written_slots)
        before = -1
        for at in taken_kept:
            if at > before + 1:
                yield _Slot("slot", "...", f"{at - before - 1} more")
            before = at
            yield self._slot(row, begin + at, stored[at], at in wrong)
        empty = self.block_size - len(stored)
        if self.block_size > _MAX_SLOTS and empty > 1:
            yield _Slot("slot", f"+{empty}", f"{empty} unwritten slots")
        else:
            yield from (_Slot("slot", "", "not written") for _ in range(empty))

    def _slot(self, row: SequenceView, position: int, label: str, wrong: bool) -> _Slot:
        if wrong:
            (each,) = (one for one in row["wrong"] if one["position"] == position)
            tooltip = f"position {position}: {each['description']}"
            return _Slot(_colour(each["actual"]), each["actual"], tooltip, wrong=True)
        if position >= len(row["tokens"]) - row["unwritten"]:
            return _Slot("unwritten", label, f"position {position}: reserved, not written yet")
        key = (row["name"], position, _block_at(row, position // self.block_size))
        kind = _colour(label) + " new" * (key not in self.before)
        return _Slot(kind, label, f"position {position}: token {label}")

    def _draw_slot(self, slot: _Slot, x: float, y: float) -> str:
        marks = box(x, y, self.cell, _CELL, slot.kind)
        kind = "strong bad" if slot.wrong else "faint" if slot.kind in ("slot", "unwritten") else ""
        marks += centred(x + self.cell / 2, y + _CELL / 2, slot.label, kind)
        return with_tooltip(slot.title, marks)

    def _outline_wrong(self, slots: Sequence[_Slot], top: float) -> None:
        for at, slot in enumerate(slots):
            if slot.wrong:
                x = self.x + at * self.cell
                self.marks.append(box(x, top - 1, self.cell, _CELL + 2, "wrong"))

    def _draw_free_blocks(self) -> None:
        """Draw the blocks without holders, grouped by state."""
        alone = [block for block in self.frame["blocks"] if not block["holders"]]
        alone.sort(key=lambda block: (block["states"], block["number"]))
        for states, group in groupby(alone, key=lambda block: block["states"]):
            blocks = list(group)
            label = "not free, held by no sequence" if states == ["counted"] else ", ".join(states)
            self._label([("blocks", "strong"), (label, "faint")])
            for block in blocks[:_MAX_BLOCKS]:
                self._add_free_block(block)
            if len(blocks) > _MAX_BLOCKS:
                more = f"+{len(blocks) - _MAX_BLOCKS}"
                self.marks.append(text(self.x, self.y + _CELL / 2, more, "faint"))
            self._break(_CELL + _GAP)

    def _add_free_block(self, block: BlockView) -> None:
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
        self.marks.append(with_tooltip(_about(block), marks))
        self.x += _FREE + 4
        self.width = max(self.width, self.x)


def _notes(block: BlockView) -> list[str]:
    """Return the notes on a block's holders for its header, the longest first."""
    count = "" if block["refcount"] is None else f"x{block['refcount']}"
    if "free" in block["states"]:
        return [f"{count} also free".strip(), "also free"]
    return [f"{count} shared".strip(), count] if "shared" in block["states"] else [count]


def _about(block: BlockView) -> str:
    holders = f"held by sequences {', '.join(map(str, block['holders']))}" * bool(block["holders"])
    count = "" if block["refcount"] is None else f"refcount {block['refcount']}"
    parts = [f"block {block['number']}: {', '.join(block['states'])}", holders, count]
    return ", ".join(filter(None, parts))


def _colour(label: str) -> str:
    """Return the style class of a token's box: one colour per writing sequence or text."""
    writer = "".join(filter(str.isdigit, label.partition(".")[0].partition("(")[0]))
    return f"of-{int(writer) % COLOURS_OF_SEQUENCES}" if writer else "slot"


# A finding as one picture, for an issue or a pull request.


_MOST = 12
"""Maximum steps drawn, the last ones; the number of steps left out is shown."""
_CHARACTERS = 78
_CAPTION_LINES = 4
"""Maximum lines of a caption."""
_LINE_HEIGHT, _SPACE, _POSTER_MARGIN = 19, 14, 16


def draw_failure(finding: FindingRecord) -> str:
    """Draw a finding; return "" for one without frames and timeline."""
    if not (finding["frames"] or finding["timeline"]):
        return ""
    lines = [(line, "strong bad") for line in wrap(finding["summary"], _CHARACTERS)]
    lines.append((finding["target"], "faint"))
    marks, y = [], float(_POSTER_MARGIN)
    for caption, kind in lines:
        marks.append(text(_POSTER_MARGIN, y + _LINE_HEIGHT / 2, caption, kind))
        y += _LINE_HEIGHT
    width = max(width_of(caption) for caption, _ in lines)
    for caption, drawing in _parts(finding):
        y += _SPACE
        for line in wrap(caption, _CHARACTERS):
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


def _parts(finding: FindingRecord) -> Iterator[tuple[str, Drawing]]:
    """Yield the drawings of a finding, each with its caption."""
    if finding["timeline"]:
        for line in finding["timeline"]["requests"]:
            yield f"request {line['number']}: {line['description']}", Drawing("", 0, 0)
        yield "", draw_timeline(finding["timeline"])
    frames = finding["frames"]
    drawings = draw(frames, finding["block_size"])
    left_out = len(frames) - _count_fitting(frames, drawings)
    for at, (frame, drawing) in enumerate(zip(frames, drawings, strict=True)):
        if at < left_out:
            continue
        before = f"(after {left_out} steps) " if at == left_out > 0 else ""
        yield before + _caption(frame), drawing


def _caption(frame: Frame) -> str:
    """Name the step of a frame, whose description is cut after a few lines."""
    refused = f"; {frame['refused']}" if frame["refused"] else ""
    return shorten(f"{title(frame)}{refused}", _CAPTION_LINES * _CHARACTERS, placeholder=" ...")


def _count_fitting(frames: Sequence[Frame], drawings: Sequence[Drawing]) -> int:
    """Return the number of last drawings that a picture has room for, which is at least one."""
    height, count = 0.0, 0
    for frame, drawing in zip(reversed(frames), reversed(drawings), strict=True):
        height += drawing.height + _SPACE + _LINE_HEIGHT * len(wrap(_caption(frame), _CHARACTERS))
        if count == _MOST or (count and height > _MAX_HEIGHT):
            break
        count += 1
    return count
