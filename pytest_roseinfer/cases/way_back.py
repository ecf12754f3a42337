"""The steps that bring back what is away at the end of a history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations.away.resume import Resume
from pytest_roseinfer.cases.operations.away.swap_in import SwapIn
from pytest_roseinfer.cases.operations.away.swapped_in import SwappedIn
from pytest_roseinfer.cases.operations.away.swapped_out import SwappedOut
from pytest_roseinfer.cases.operations.sequences.free import Free
from pytest_roseinfer.oracle.away import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.cases.operations.operation import Operation, Writer

_NEXT = {Stage.LEAVING: SwappedOut, Stage.OUT: SwapIn, Stage.COMING: SwappedIn}


def way_back(writer: Writer) -> Iterator[Operation]:
    """Yield steps, each to be done before the next, that make room as far as they can."""
    away = writer.oracle.away
    while away.stages:
        steps = [_next(writer, seq, stage) for seq, stage in away.stages.items()]
        fitting = [step for step in steps if step.fits(writer.oracle)]
        if fitting:
            yield fitting[0]
        elif writer.live and "free" in writer.adapter.abilities:
            yield Free(writer.live[-1])
        else:
            return


def _next(writer: Writer, seq: int, stage: Stage) -> Operation:
    if stage is Stage.PREEMPTED:
        return Resume(seq, len(writer.oracle.away.tokens[seq]))
    return _NEXT[stage](seq)
