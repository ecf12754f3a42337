"""Bugs in storing drafts, choosing what a request gets at their places, and rolling back."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_ROWS = "roseinfer.decode.token_rows"
_FLIGHT = "roseinfer.engine.flight"
_RUNNER = "roseinfer.engine.runner"
_SPECULATION = "roseinfer.engine.speculation"
_SEQUENCE = "roseinfer.kv.sequence"


def _mutant(name: str, wrong: str, module: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "last-draft-taken-unseen",
        "Of drafts of which all others are right the last is accepted, whatever it is.",
        _FLIGHT,
        "enumerate(drafts) if tokens[first + at] != draft",
        "enumerate(drafts[:-1]) if tokens[first + at] != draft",
    ),
    _mutant(
        "rolled-back-one-short",
        "The cache keeps one token of those that are rolled back.",
        _SEQUENCE,
        "        self.cut(kv, most)\n",
        "        kept, self.stored = min(self.stored, most), min(self.stored, most + 1)\n"
        "        self.cut(kv, self.stored)\n"
        "        self.stored = kept\n",
    ),
    _mutant(
        "row-of-another-draft",
        "Tokens are read as if each request had one row, though some have one for each draft too.",
        _RUNNER,
        "rows = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]",
        "rows = [*range(len(sizes))]",
    ),
    _mutant(
        "slot-left-with-its-room",
        "What a slot reserved counts as stored when drafts are stored behind it.",
        _SPECULATION,
        "        session.roll_back(self._kv, session.stored)\n",
        "",
    ),
    _mutant(
        "drafts-at-one-position",
        "All rows of a request's drafts have the position of the first.",
        _ROWS,
        "*fields._replace(length=length)]",
        "*fields._replace(length=session.stored)]",
    ),
    _mutant(
        "rows-of-the-step-before",
        "Rows that a step does not need keep the drafts of the step before, and store them again.",
        _ROWS,
        "        for row in range(self._taken, before):\n",
        "        for row in range(before, before):\n",
    ),
    _mutant(
        "drafts-in-one-groups-blocks",
        "Drafts go to the blocks of the first group of layers in every group.",
        _ROWS,
        "rows.table_of(session, width)",
        "rows.table_of(type(session)(session.block_lists[:1] * len(session.block_lists)), width)",
    ),
)
