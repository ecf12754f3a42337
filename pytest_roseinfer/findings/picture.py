"""A picture of the blocks involved in a failure: what they should hold, who holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.oracle import token_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.findings.location import Place
    from pytest_roseinfer.oracle import Page
    from pytest_roseinfer.running.machine import Machine

_FIRST, _LAST = 4, 3
"""Tokens of a long page that are shown in any case."""
Tables = dict[int, "list[int] | str"]
"""By sequence; in its place, why a table cannot be read."""


def picture(machine: Machine, place: Place | None) -> str:
    """The tokens the oracle expects and the tables the cache keeps, the wrong place marked.

    Of a known place, only that layer and the sequences it has to do with are drawn.
    """
    layers = [place.layer] if place else range(machine.spec.num_layers)
    tables = {layer: _tables(machine, layer) for layer in layers if "table" in machine.can}
    seqs = list(machine.oracle.sequences)
    lines = []
    if place:
        seqs = _involved(machine, place, tables.get(place.layer, {}))
        lines.append(_legend(place))
    lines += _draw_pages(machine, place, seqs)
    for layer, of_layer in tables.items():
        lines += _draw_tables(machine, place, layer, {seq: of_layer[seq] for seq in seqs})
    return "\n".join(lines)


def _tables(machine: Machine, layer: int) -> Tables:
    return {seq: _table(machine, seq, layer) for seq in machine.oracle.sequences}


def _table(machine: Machine, seq: int, layer: int) -> list[int] | str:
    try:
        return list(machine.adapter.table(seq, layer))
    except Exception as error:  # the cache is broken; the picture must not be
        return f"unreadable, {type(error).__name__}: {error}"


def _involved(machine: Machine, place: Place, tables: Tables) -> list[int]:
    """Holders of the place, who shares a block with them, and whose token was found there."""
    everyone = machine.oracle.sequences

    def held(seq: int) -> set[tuple[str, int]]:
        pages = {("page", id(page)) for page in everyone[seq]}
        table = tables.get(seq, ())
        return pages if isinstance(table, str) else pages | {("block", each) for each in table}

    wrong = {each for seq in place.holders for each in held(seq)}
    token = place.contents.token if place.contents else None
    involved = [
        seq
        for seq in everyone
        if seq in place.holders or held(seq) & wrong or token in machine.oracle.tokens(seq)
    ]
    return involved or list(everyone)


def _legend(place: Place) -> str:
    """What the mark means, and all that is known of what it marks."""
    said = f"> < marks what is wrong in layer {place.layer}"
    if place.block is not None:
        said += f", block {place.block}"
    if place.contents is None:
        return said
    return f"{said}, head {place.contents.head}, {place.contents.kind}: {place.contents.words()}"


def _draw_pages(machine: Machine, place: Place | None, seqs: Sequence[int]) -> list[str]:
    lines = ["what should be stored, page by page (sequence.token, x holders where shared):"]
    for seq in seqs:
        wrong = _wrong_page(place, seq)
        pages = machine.oracle.sequences[seq]
        shown = (
            _page(page, is_wrong=at == wrong, slot=place.slot if place and at == wrong else None)
            for at, page in enumerate(pages)
        )
        lines.append(f"  {_name(place, seq)}: {' '.join(shown)}")
    if others := len(machine.oracle.sequences) - len(seqs):
        lines.append(f"  other sequences, not drawn: {others}")
    return lines


def _draw_tables(machine: Machine, place: Place | None, layer: int, tables: Tables) -> list[str]:
    lines = [f"tables of layer {layer} (block, x its refcount):"]
    refcounts = _refcounts(machine, layer)
    for seq, table in tables.items():
        if isinstance(table, list):
            wrong = _wrong_page(place, seq)
            table = " ".join(
                _marked(_block(block, refcounts), at == wrong) for at, block in enumerate(table)
            )
        lines.append(f"  {_name(place, seq)}: {table}")
    if place and place.block is not None and not place.holders:
        lines.append(f"  of no sequence: {_marked(_block(place.block, refcounts))}")
    return lines


def _refcounts(machine: Machine, layer: int) -> Mapping[int, int]:
    try:
        return machine.adapter.ledger(layer).refcounts if "ledger" in machine.can else {}
    except Exception:  # as in _table; a block whose count is not known says so
        return {}


def _wrong_page(place: Place | None, seq: int) -> int | None:
    return place.holders.get(seq) if place else None


def _name(place: Place | None, seq: int) -> str:
    """Marked where nothing smaller can be."""
    wrong = place is not None and seq in place.holders and place.holders[seq] is None
    return _marked(f"sequence {seq}", wrong)


def _block(block: int, refcounts: Mapping[int, int]) -> str:
    return f"{block}x{refcounts.get(block, '?')}"


def _page(page: Page, *, is_wrong: bool, slot: int | None) -> str:
    tokens = [_marked(token_label(token), at == slot) for at, token in enumerate(page.tokens)]
    if slot is not None and slot >= len(tokens):
        tokens.append(_marked("nothing"))
    shown = f"[{' '.join(_shortened(tokens, slot))}]"
    shown += f"x{page.holders}" if page.holders > 1 else ""
    return _marked(shown, is_wrong and slot is None)


def _shortened(tokens: list[str], slot: int | None) -> list[str]:
    """The first and the last of many, and the one in ``slot``."""
    count = len(tokens)
    if count <= _FIRST + _LAST + 1:
        return tokens
    kept = [at for at in range(count) if at < _FIRST or at >= count - _LAST or at == slot]
    shown = []
    for before, at in zip([-1, *kept], kept, strict=False):
        shown += ["..."] * (at > before + 1) + [tokens[at]]
    return shown


def _marked(text: str, wrong: bool = True) -> str:
    return f">{text}<" if wrong else text
