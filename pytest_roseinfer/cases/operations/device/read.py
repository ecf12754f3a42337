"""Read what is stored, whatever the device has not done yet.

What the cache promises to wait for by itself is read first, then the device finishes, and
everything is looked at.
"""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation


@operation.register
class Read(operation.Operation):
    needs = frozenset({"use_queue"})
    looks = True

    def words(self) -> str:
        return "read everything"

    def drive(self, cache: operation.Driven) -> None:
        """The machine looks at the cache."""

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if writer.live:
            yield operation.Move(12, 1, cls)
