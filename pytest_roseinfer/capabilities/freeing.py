"""Freeing of sequences."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Capability, Large, RankPolicy, optional
from pytest_roseinfer.capabilities.misuse import UNKNOWN_SEQ, Call, MisuseState, misuse

if TYPE_CHECKING:
    from collections.abc import Iterator


class FreeingMethods:
    """Adapter method that frees sequences."""

    @optional
    def free(self, seq: int) -> None:
        """Free a sequence; its name may be used again.

        It may be preempted, or anywhere between ``swap_out`` and ``finish_swap_in``. All its blocks
        become free, those in swap space too, and no handle that was returned for it is passed to
        another call.
        """


@operation.register("Free")
class Free(operation.Operation):
    """Free a sequence, whose name may be used again."""

    seq: int

    needs = frozenset({"free"})

    def describe(self) -> str:
        return f"free sequence {self.seq}"

    def possible(self, oracle: operation.Oracle) -> bool:
        return self.seq in oracle.absent or self.seq in oracle.usable

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.free(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.swap_handles.pop(self.seq, None)
        cache.loads.pop(self.seq, None)
        cache.adapter.free(self.seq)

    @classmethod
    def draw_for_absent(cls, writer: operation.Writer) -> Free:
        """Draw a sequence that is being swapped in, which is rare; else any absent one."""
        absent = writer.oracle.absent
        coming = [seq for seq in writer.oracle.hidden if seq in absent]
        return cls(writer.pick(coming or [*absent]))

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if writer.oracle.absent:
            yield operation.DrawOption(80, 2, lambda: cls.draw_for_absent(writer))
        if writer.live:
            # When room is short, freeing lets the history go on.
            times = 8 if writer.oracle.pages_free() < 2 else 2
            yield operation.DrawOption(80, times, lambda: cls(writer.pick(writer.live)))


# Bad calls


@misuse("free")
def free_unknown(at: MisuseState) -> Iterator[Call]:
    yield "free of a sequence that never was", partial(at.adapter.free, UNKNOWN_SEQ)


@misuse("free")
def free_twice(at: MisuseState) -> Iterator[Call]:
    for seq in at.freed()[-1:]:
        yield "free of a sequence that was freed", partial(at.adapter.free, seq)


def _large(at: Large) -> Iterator[operation.Operation]:
    yield Free(at.names.pop(len(at.names) // 2))


FREEING = Capability(
    methods=FreeingMethods,
    walk=lambda at: map(Free, at.oracle.sequences),
    large=_large,
    misuse=(free_unknown, free_twice),
    sharded={"free": RankPolicy.SAME},
    operations=(Free,),
)
