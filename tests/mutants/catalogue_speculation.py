"""Bugs in storing drafts, choosing what a request gets at their places, and rolling back."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, Mutant

_ROWS = "roseinfer.decode.step"
_FLIGHT = "roseinfer.engine.in_flight"
_RUNNER = "roseinfer.engine.runner"
_SPECULATION = "roseinfer.engine.speculation"
_SEQUENCE = "roseinfer.kv.sequence"


def _mutant(name: str, wrong: str, module: str, function: str, find: str, replace: str) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


MUTANTS = (
    _mutant(
        "last-draft-taken-unseen",
        "Of drafts of which all others are right the last is accepted, whatever it is.",
        _FLIGHT,
        "TokensInFlight._verify",
        "wrong = (at for at, draft in enumerate(drafts) if tokens[first + at] != draft)",
        "wrong = (at for at, draft in enumerate(drafts[:-1]) if tokens[first + at] != draft)",
    ),
    _mutant(
        "rolled-back-one-short",
        "The cache keeps one token of those that are rolled back.",
        _SEQUENCE,
        "CachedSequence.roll_back",
        "self.cut(kv, most)",
        """
        kept, self.stored = min(self.stored, most), min(self.stored, most + 1)
        self.cut(kv, self.stored)
        self.stored = kept
        """,
    ),
    _mutant(
        "row-of-another-draft",
        "Tokens are read as if each request had one row, though some have one for each draft too.",
        _RUNNER,
        "StepRunner._choose",
        "rows = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]",
        "rows = [*range(len(sizes))]",
    ),
    _mutant(
        "slot-left-with-its-room",
        "What a slot reserved counts as stored when drafts are stored behind it.",
        _SPECULATION,
        "Speculation._leave_slot",
        "session.roll_back(self._kv, session.stored)",
        "",
    ),
    _mutant(
        "drafts-at-one-position",
        "All rows of a request's drafts have the position of the first.",
        _ROWS,
        "MultiTokenDecode._upload",
        "flat += [len(tokens) + length - session.stored, *fields._replace(length=length)]",
        "flat += [len(tokens) + length - session.stored, *fields._replace(length=session.stored)]",
    ),
    _mutant(
        "rows-of-the-step-before",
        "Rows that a step does not need keep the drafts of the step before, and store them again.",
        _ROWS,
        "MultiTokenDecode._upload",
        """
        for row in range(self._taken, before):
            ...
        """,
        """
        for row in range(before, before):
            ...
        """,
    ),
    _mutant(
        "drafts-in-one-groups-blocks",
        "Drafts go to the blocks of the first group of layers in every group.",
        _ROWS,
        "MultiTokenDecode._upload",
        "table = rows.padded_block_table(session, width)",
        """
        table = rows.padded_block_table(
            type(session)(session.block_lists[:1] * len(session.block_lists)), width
        )
        """,
    ),
)
