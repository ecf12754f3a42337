"""Bugs in storing, verifying and rolling back drafts."""

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
        "last-draft-accepted-unverified",
        "The last draft is accepted without verification if all others are right.",
        _FLIGHT,
        "TokensInFlight._verify",
        "wrong = (at for at, draft in enumerate(drafts) if tokens[first + at] != draft)",
        "wrong = (at for at, draft in enumerate(drafts[:-1]) if tokens[first + at] != draft)",
    ),
    _mutant(
        "rolled-back-one-short",
        "A rollback keeps one token too many in the cache.",
        _SEQUENCE,
        "CachedSequence.roll_back",
        "self.cut(kv, most)",
        """
        kept, self.num_stored = min(self.num_stored, most), min(self.num_stored, most + 1)
        self.cut(kv, self.num_stored)
        self.num_stored = kept
        """,
    ),
    _mutant(
        "row-of-another-draft",
        "Tokens are read as if each request had one row, though drafts have their own.",
        _RUNNER,
        "StepRunner._choose",
        "rows = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]",
        "rows = [*range(len(sizes))]",
    ),
    _mutant(
        "reserved-room-counted-as-stored",
        "Reserved room of a slot counts as stored when drafts are appended.",
        _SPECULATION,
        "Speculation._leave_slot",
        "session.roll_back(self._kv, session.stored)",
        "",
    ),
    _mutant(
        "drafts-at-one-position",
        "All drafts of a request have the position of the first.",
        _ROWS,
        "MultiTokenDecode._upload",
        "flat += [len(tokens) + length - session.stored, *fields._replace(length=length)]",
        "flat += [len(tokens) + length - session.stored, *fields._replace(length=session.stored)]",
    ),
    _mutant(
        "rows-of-the-previous-step",
        "Unused rows keep the drafts of the previous step, and store them again.",
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
        "Every group of layers stores drafts in the blocks of the first group.",
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
