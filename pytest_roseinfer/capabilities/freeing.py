"""Freeing a sequence."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Across, Capability, Large, optional
from pytest_roseinfer.capabilities.misuse import NEVER, Call, Situation, misuse

if TYPE_CHECKING:
    from collections.abc import Iterator


class FreeingMethods:
    """The method that frees a sequence."""

    @optional
    def free(self, seq: int) -> None:
        """Forget a sequence; its name is used again for new ones.

        It may be preempted, or anywhere between ``swap_out`` and ``finish_swap_in``. All that it
        held is free then, in swap space too, and what was returned for it is passed to no other
        call.
        """


@operation.register("Free")
class Free(operation.Operation):
    """Free a sequence, whose name may be used again."""

    seq: int

    needs = frozenset({"free"})

    def words(self) -> str:
        return f"free sequence {self.seq}"

    def possible(self, oracle: operation.Oracle) -> bool:
        return self.seq in oracle.named

    def changed(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.free(self.seq)

    def drive(self, cache: operation.Driven) -> None:
        cache.moving.pop(self.seq, None)
        cache.adapter.free(self.seq)

    @classmethod
    def of_away(cls, writer: operation.Writer) -> Free:
        """Draw one that is on its way back, as few are, or else any that is away."""
        return cls(writer.pick(writer.oracle.hidden or [*writer.oracle.absent]))

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.oracle.absent:
            yield operation.Move(80, 2, lambda: cls.of_away(writer))
        if writer.live:
            # Where the next batch may find no room, freeing lets the history go on.
            times = 8 if writer.oracle.pages_free() < 2 else 2
            yield operation.Move(80, times, lambda: cls(writer.pick(writer.live)))


# Calls that must be refused.


@misuse("free")
def free_unknown(at: Situation) -> Iterator[Call]:
    yield "free of a sequence that never was", partial(at.adapter.free, NEVER)


@misuse("free")
def free_twice(at: Situation) -> Iterator[Call]:
    for seq in at.freed()[-1:]:
        yield "free of a sequence that was freed", partial(at.adapter.free, seq)


def _large(at: Large) -> Iterator[operation.Operation]:
    yield Free(at.names.pop(len(at.names) // 2))


FREEING = Capability(
    methods=FreeingMethods,
    walk=lambda at: map(Free, at.oracle.sequences),
    large=_large,
    misuse=(free_unknown, free_twice),
    sharded={"free": Across.SAME},
    operations=(Free,),
)
