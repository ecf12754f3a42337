"""Error that a failing history raises, with a picture of the cache as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.findings.frame import LayerState
from pytest_roseinfer.oracle.pages import token_label

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pytest_roseinfer.capabilities.observation import Finding, Location, Snapshot
    from pytest_roseinfer.findings.frame import Frame, SequenceView
    from pytest_roseinfer.histories.history import History
    from pytest_roseinfer.oracle.oracle import Oracle

# Picture of the blocks involved in a failure: expected contents and holders.


_FIRST, _LAST = 4, 3
"""Number of first and last tokens of a long page that are always shown."""


def picture(location: Location | None, num_layers: int, oracle: Oracle, shown: Snapshot) -> str:
    """Draw the oracle's tokens and the cache's tables, with the wrong location marked.

    If the location is known, draw only its layer and the sequences involved.
    """
    layers = [location.layer] if location else range(num_layers)
    frames = {layer: LayerState(oracle, shown, layer, location).frame() for layer in layers}
    everyone = next(iter(frames.values()))["sequences"]
    here = [row for row in everyone if row["pages"]]
    rows = _involved_rows(here, location) if location else here
    lines = [_legend(location)] if location else []
    named = "t and text.token" if oracle.texts else "sequence.token"
    lines.append(f"expected contents, page by page ({named}, x holders where shared):")
    for row in rows:
        pages = (_page(location, row, at, oracle.block_size) for at in range(len(row["pages"])))
        lines.append(f"  {_name(location, row)}: {' '.join(pages)}")
    lines += [f"  sequence {row['name']} is {row['state']}" for row in everyone if row["state"]]
    if others := len(here) - len(rows):
        lines.append(f"  other sequences, not drawn: {others}")
    names = {row["name"] for row in rows}
    for layer, frame in frames.items() if shown.tables is not None else ():
        lines.append(f"tables of layer {layer} (block, x its refcount):")
        lines += _draw_tables(location, frame, names)
    return "\n".join(lines)


def _involved_rows(rows: Sequence[SequenceView], location: Location) -> list[SequenceView]:
    """List the location's holders, sequences that share blocks with them, and its writers."""

    def held(row: SequenceView) -> set[tuple[str, int]]:
        pages = {("page", page["number"]) for page in row["pages"]}
        return pages | {("block", each) for each in row["blocks"] or () if each is not None}

    wrong = {each for row in rows if row["name"] in location.holders for each in held(row)}
    contents = location.contents
    tokens = (contents.token, contents.expected_token) if contents else ()
    labels = {token_label(token) for token in tokens if token is not None}
    involved = [
        row
        for row in rows
        if row["name"] in location.holders or held(row) & wrong or labels & {*row["tokens"]}
    ]
    return involved or list(rows)


def _legend(location: Location) -> str:
    """Explain the mark and name the location it marks."""
    legend = f"> < marks the error in layer {location.layer}"
    if location.block is not None:
        legend += f", block {location.block}"
    if contents := location.contents:
        legend += f", head {contents.head}, {contents.kind}"
    return legend


def _draw_tables(location: Location | None, frame: Frame, names: Collection[int]) -> Iterator[str]:
    refcounts = {block["number"]: block["refcount"] for block in frame["blocks"]}

    def drawn(block: int | None, wrong: bool) -> str:
        if block is None:
            return _marked("none", wrong)
        count = refcounts.get(block)
        return _marked(f"{block}x{'?' if count is None else count}", wrong)

    for row in frame["sequences"]:
        if row["name"] not in names:
            continue
        wrong = location.holders.get(row["name"]) if location else None
        blocks = (drawn(block, at == wrong) for at, block in enumerate(row["blocks"] or ()))
        table = f"unreadable, {row['unreadable']}" if row["unreadable"] else " ".join(blocks)
        yield f"  {_name(location, row)}: {table}"
    if location and location.block is not None and not location.holders:
        yield f"  held by no sequence: {drawn(location.block, wrong=True)}"


def _name(location: Location | None, row: SequenceView) -> str:
    """Name a sequence, marked if the sequence is wrong but the block is unknown."""
    wrong = location is not None and location.holders.get(row["name"], 0) is None
    return _marked(f"sequence {row['name']}", wrong)


def _page(location: Location | None, row: SequenceView, at: int, block_size: int) -> str:
    is_wrong = location is not None and location.holders.get(row["name"]) == at
    if location and at < row["given_back"]:
        return _marked("[given back]", is_wrong)
    slot = location.slot if location and is_wrong else None
    stored = enumerate(row["tokens"][at * block_size : (at + 1) * block_size])
    tokens = [_marked(token, position == slot) for position, token in stored]
    if slot is not None and slot >= len(tokens):
        tokens.append(_marked("nothing"))
    drawn = f"[{' '.join(_shorten(tokens, slot))}]"
    holders = row["pages"][at]["holders"]
    drawn += f"x{holders}" if holders > 1 else ""
    return _marked(drawn, is_wrong and slot is None)


def _shorten(tokens: list[str], slot: int | None) -> list[str]:
    """Shorten a long list of tokens to the first, the last, and the one in ``slot``."""
    count = len(tokens)
    if count <= _FIRST + _LAST + 1:
        return tokens
    shown_slots = [at for at in range(count) if at < _FIRST or at >= count - _LAST or at == slot]
    shown = []
    for before, at in zip([-1, *shown_slots], shown_slots, strict=False):
        shown += ["..."] * (at > before + 1) + [tokens[at]]
    return shown


def _marked(text: str, wrong: bool = True) -> str:
    return f">{text}<" if wrong else text


class Difference(AssertionError):
    """Difference between the target's actual and expected behaviour.

    The message is composed when it is read: shrinking raises hundreds of these errors.
    """

    def __init__(self, summary: str, details: Callable[[], str]) -> None:
        super().__init__(summary)
        self.summary = summary
        """Summary in one line."""
        self.extra_paragraphs: list[str] = []
        """Paragraphs at the end of the message, such as the replay command."""
        self.on_refused_step = False
        """True for an error in a step that had to be refused anyway."""
        self.kind = ""
        """Check and kind of difference, from which the digest is made; empty if unknown."""
        self.reported_by = ""
        """Test that already reported this failure in full; empty if none did."""
        self._details = details

    def __str__(self) -> str:
        before = f"Details: see {self.reported_by}, which failed in the same way."
        return "\n\n".join(
            [self.summary, before if self.reported_by else self._details(), *self.extra_paragraphs]
        )


class Divergence(Difference):
    """Difference between a cache and its oracle after ``history``, whose last step shows it."""

    def __init__(
        self,
        finding: Finding,
        history: History,
        oracle: Oracle,
        shown: Snapshot,
        refused: Mapping[int, str],
    ) -> None:
        """``refused`` maps the steps that the cache rightly refused to the reasons."""

        def details() -> str:
            drawn = picture(finding.location, history.spec.num_layers, oracle, shown)
            described = history.describe(refused)
            if options := history.last_options:
                values = ", ".join(f"{name}={value!r}" for name, value in options.items())
                described += f"\nswitches at this step: {values}"
            return f"after step {history.size} of\n{described}\n\n{drawn}"

        super().__init__(finding.summary, details)
        self.history = history
        self.location = finding.location
        self.on_refused_step = finding.on_refused_step
        self.kind = finding.kind
