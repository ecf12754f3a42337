"""A picture of the blocks involved in a failure: what they should hold, who holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.oracle import token_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.findings.location import Location
    from pytest_roseinfer.oracle import Oracle, Page
    from pytest_roseinfer.running.observation import Snapshot

_FIRST, _LAST = 4, 3
"""Tokens of a long page that are shown in any case."""
Tables = dict[int, "list[int] | str"]
"""By sequence; in its place, why a table cannot be read."""


def picture(location: Location | None, num_layers: int, oracle: Oracle, shown: Snapshot) -> str:
    """The tokens the oracle expects and the tables the cache keeps, the wrong place marked.

    Where the location is known, only its layer and the sequences it has to do with are drawn.
    """
    layers = [location.layer] if location else range(num_layers)
    tables = {layer: _tables(shown, layer) for layer in layers if shown.tables is not None}
    seqs = list(oracle.sequences)
    lines = []
    if location:
        seqs = _involved(oracle, location, tables.get(location.layer, {}))
        lines.append(_legend(location))
    lines += _draw_pages(oracle, location, seqs)
    for layer, of_layer in tables.items():
        own = {seq: of_layer[seq] for seq in seqs}
        lines += _draw_tables(location, layer, own, _refcounts(shown, layer))
    return "\n".join(lines)


def _tables(shown: Snapshot, layer: int) -> Tables:
    tables = shown.tables or {}
    return {seq: _table(table) for (seq, at), table in tables.items() if at == layer}


def _table(shown: list[int] | Exception) -> list[int] | str:
    if isinstance(shown, Exception):  # the cache is broken; the picture must not be
        return f"unreadable, {type(shown).__name__}: {shown}"
    return shown


def _involved(oracle: Oracle, location: Location, tables: Tables) -> list[int]:
    """Holders of the place, who shares a block with them, and whose token was found there."""
    everyone = oracle.sequences

    def held(seq: int) -> set[tuple[str, int]]:
        pages = {("page", id(page)) for page in everyone[seq]}
        table = tables.get(seq, ())
        return pages if isinstance(table, str) else pages | {("block", each) for each in table}

    wrong = {each for seq in location.holders for each in held(seq)}
    token = location.contents.token if location.contents else None
    involved = [
        seq
        for seq in everyone
        if seq in location.holders or held(seq) & wrong or token in oracle.tokens(seq)
    ]
    return involved or list(everyone)


def _legend(location: Location) -> str:
    """What the mark means, and all that is known of what it marks."""
    said = f"> < marks what is wrong in layer {location.layer}"
    if location.block is not None:
        said += f", block {location.block}"
    if contents := location.contents:
        said += f", head {contents.head}, {contents.kind}: {contents.words()}"
    return said


def _draw_pages(oracle: Oracle, location: Location | None, seqs: Sequence[int]) -> list[str]:
    lines = ["what should be stored, page by page (sequence.token, x holders where shared):"]
    slot = location.slot if location else None
    for seq in seqs:
        wrong = _wrong_page(location, seq)
        shown = (
            _page(page, is_wrong=at == wrong, slot=slot if at == wrong else None)
            for at, page in enumerate(oracle.sequences[seq])
        )
        lines.append(f"  {_name(location, seq)}: {' '.join(shown)}")
    if others := len(oracle.sequences) - len(seqs):
        lines.append(f"  other sequences, not drawn: {others}")
    return lines


def _draw_tables(
    location: Location | None, layer: int, tables: Tables, refcounts: Mapping[int, int]
) -> list[str]:
    lines = [f"tables of layer {layer} (block, x its refcount):"]
    for seq, table in tables.items():
        if isinstance(table, list):
            wrong = _wrong_page(location, seq)
            table = " ".join(
                _marked(_block(block, refcounts), at == wrong) for at, block in enumerate(table)
            )
        lines.append(f"  {_name(location, seq)}: {table}")
    if location and location.block is not None and not location.holders:
        lines.append(f"  of no sequence: {_marked(_block(location.block, refcounts))}")
    return lines


def _refcounts(shown: Snapshot, layer: int) -> Mapping[int, int]:
    """Those of the books, if they can be read; a block whose count is not known says so."""
    ledger = shown.ledgers[layer] if shown.ledgers else None
    return {} if ledger is None or isinstance(ledger, Exception) else ledger.refcounts


def _wrong_page(location: Location | None, seq: int) -> int | None:
    return location.holders.get(seq) if location else None


def _name(location: Location | None, seq: int) -> str:
    """Marked where nothing smaller can be."""
    wrong = location is not None and seq in location.holders and location.holders[seq] is None
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
