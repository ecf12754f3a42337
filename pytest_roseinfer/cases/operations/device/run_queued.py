"""Let the device make some of the calls that it was asked for."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.plural import some

_MOST = 8
"""Calls at a time; more follow from one step after the other."""


@operation.register
class RunQueued(operation.Operation):
    count: int
    stream: int = 0
    """Counts round: of a cache with one stream, every number is that one."""

    needs = frozenset({"use_queue"})

    def words(self) -> str:
        calls = some(self.count, "call")
        return f"the device makes the next {calls} of stream {self.stream}"

    def drive(self, cache: operation.Driven) -> None:
        cache.device.run(self.count, self.stream)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> RunQueued:
            return cls(writer.between(1, _MOST), writer.pick((0, 1)))

        if writer.oracle.lives or writer.oracle.sequences:
            yield operation.Move(11, 3, drawn)
