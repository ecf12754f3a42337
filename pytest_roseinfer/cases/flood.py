"""Steps that need every block that is left, so that what was given back or found is overwritten."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations.operation import MOST_SEQUENCES, Move
from pytest_roseinfer.cases.operations.writes.append import Append
from pytest_roseinfer.cases.operations.writes.prefill import Prefill

if TYPE_CHECKING:
    from pytest_roseinfer.cases.operations.operation import Moves, Operation, Writer


def floods(writer: Writer) -> Moves:
    """List a way to draw such a step, if any block is left."""
    free = writer.oracle.pages_free()

    def drawn() -> Operation:
        if "prefill" in writer.adapter.abilities:
            (seq,) = writer.fresh(1)
            return Prefill(seq, free * writer.oracle.block_size)
        return Append(writer.fresh(min(free, MOST_SEQUENCES)))

    if free:
        yield Move(11, 3, drawn)
