"""The error that a failing history raises, with its picture in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.oracle.pages import token_label

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_roseinfer.capabilities.observation import Finding, Location, Snapshot
    from pytest_roseinfer.histories.history import History
    from pytest_roseinfer.oracle.oracle import Oracle

# A picture of the blocks involved in a failure: their right contents and their holders.


_FIRST, _LAST = 4, 3
"""Tokens of a long page that are shown in any case."""
Tables = dict[int, "list[int | None] | str"]
"""The table of each sequence, or why it cannot be read."""


def picture(location: Location | None, num_layers: int, oracle: Oracle, shown: Snapshot) -> str:
    """Draw the tokens the oracle expects and the tables the cache keeps, the wrong place marked.

    Where the location is known, only its layer and the sequences it has to do with are drawn.
    """
    layers = [location.layer] if location else range(num_layers)
    tables = {layer: _tables(shown, layer) for layer in layers if shown.tables is not None}
    seqs = list(oracle.sequences)
    lines = []
    if location:
        seqs = _involved(oracle, location, tables.get(location.layer, {}))
        lines.append(_legend(location))
    named = "t and text.token" if oracle.texts else "sequence.token"
    lines.append(f"what should be stored, page by page ({named}, x holders where shared):")
    for seq in seqs:
        pages = (_page(location, seq, at, oracle) for at in range(len(oracle.sequences[seq])))
        lines.append(f"  {_name(location, seq)}: {' '.join(pages)}")
    lines += [f"  sequence {seq} is {how.words}" for seq, how in oracle.absent.items()]
    if others := len(oracle.sequences) - len(seqs):
        lines.append(f"  other sequences, not drawn: {others}")
    for layer, of_layer in tables.items():
        own = {seq: of_layer[seq] for seq in seqs}
        lines += _draw_tables(location, layer, own, _refcounts(shown, layer))
    return "\n".join(lines)


def _tables(shown: Snapshot, layer: int) -> Tables:
    return {
        seq: f"unreadable, {type(table).__name__}: {table}"
        if isinstance(table, Exception)
        else table
        for seq, table in shown.tables_or_errors(layer).items()
    }


def _involved(oracle: Oracle, location: Location, tables: Tables) -> list[int]:
    """List the place's holders, who shares a block with them, and who wrote what is there."""
    everyone = oracle.sequences

    def held(seq: int) -> set[tuple[str, int]]:
        pages = {("page", id(page)) for page in everyone[seq]}
        table = tables.get(seq, ())
        blocks = () if isinstance(table, str) else table
        return pages | {("block", each) for each in blocks if each is not None}

    wrong = {each for seq in location.holders for each in held(seq)}
    token = location.contents.token if location.contents else None
    involved = [
        seq
        for seq in everyone
        if seq in location.holders or held(seq) & wrong or token in oracle.tokens(seq)
    ]
    return involved or list(everyone)


def _legend(location: Location) -> str:
    """Say what the mark means, and where what it marks is."""
    said = f"> < marks what is wrong in layer {location.layer}"
    if location.block is not None:
        said += f", block {location.block}"
    if contents := location.contents:
        said += f", head {contents.head}, {contents.kind}"
    return said


def _draw_tables(
    location: Location | None, layer: int, tables: Tables, refcounts: Mapping[int, int]
) -> list[str]:
    def drawn(block: int | None, wrong: bool) -> str:
        shown = "none" if block is None else f"{block}x{refcounts.get(block, '?')}"
        return _marked(shown, wrong)

    lines = [f"tables of layer {layer} (block, x its refcount):"]
    for seq, table in tables.items():
        if isinstance(table, list):
            wrong = location.holders.get(seq) if location else None
            table = " ".join(drawn(block, at == wrong) for at, block in enumerate(table))
        lines.append(f"  {_name(location, seq)}: {table}")
    if location and location.block is not None and not location.holders:
        lines.append(f"  of no sequence: {drawn(location.block, wrong=True)}")
    return lines


def _refcounts(shown: Snapshot, layer: int) -> Mapping[int, int]:
    """Return the refcounts in the cache's books, if these can be read."""
    ledger = shown.ledger_or_none(layer)
    return ledger.refcounts if ledger else {}


def _name(location: Location | None, seq: int) -> str:
    """Name a sequence, marked if its wrong block is unknown."""
    wrong = location is not None and location.holders.get(seq, 0) is None
    return _marked(f"sequence {seq}", wrong)


def _page(location: Location | None, seq: int, at: int, oracle: Oracle) -> str:
    is_wrong = location is not None and location.holders.get(seq) == at
    if location and at < oracle.given_back(seq, location.layer):
        return _marked("[given back]", is_wrong)
    slot = location.slot if location and is_wrong else None
    seen = enumerate(oracle.tokens_on(seq, at))
    tokens = [_marked(token_label(token), position == slot) for position, token in seen]
    if slot is not None and slot >= len(tokens):
        tokens.append(_marked("nothing"))
    shown = f"[{' '.join(_shortened(tokens, slot))}]"
    holders = oracle.sequences[seq][at].holders
    shown += f"x{holders}" if holders > 1 else ""
    return _marked(shown, is_wrong and slot is None)


def _shortened(tokens: list[str], slot: int | None) -> list[str]:
    """Keep the first and the last of many tokens, and the one in ``slot``."""
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


class Difference(AssertionError):
    """The target does something else than it must.

    Its message is put together when it is read: a search sees hundreds of these on its way to the
    smallest example.
    """

    def __init__(self, what: str, details: Callable[[], str]) -> None:
        super().__init__(what)
        self.what = what
        """In one line."""
        self.added: list[str] = []
        """Paragraphs for the end of the message, such as how to replay it."""
        self.without_room = False
        """It is an error of a step that had to be refused anyway."""
        self.shown_by = ""
        """The test that met the same before, and shows what this one leaves out."""
        self._details = details

    def __str__(self) -> str:
        before = f"All of it is shown by {self.shown_by}, which met the same."
        return "\n\n".join([self.what, before if self.shown_by else self._details(), *self.added])


class Divergence(Difference):
    """A cache differs from its oracle after ``history``, which ends with the step that shows it."""

    def __init__(
        self,
        finding: Finding,
        history: History,
        oracle: Oracle,
        shown: Snapshot,
        refused: Mapping[int, str],
    ) -> None:
        """``refused`` says why of the steps that the cache had to refuse, and did."""

        def details() -> str:
            drawn = picture(finding.location, history.spec.num_layers, oracle, shown)
            return f"after step {history.size} of\n{history.words(refused)}\n\n{drawn}"

        super().__init__(finding.what, details)
        self.history = history
        self.location = finding.location
        self.without_room = finding.without_room
