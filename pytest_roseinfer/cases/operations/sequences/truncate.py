"""Cut a sequence down to its first tokens."""

from __future__ import annotations

from pytest_roseinfer.cases.operations import operation
from pytest_roseinfer.plural import some


@operation.register
class Truncate(operation.Operation):
    seq: int
    length: int

    needs = frozenset({"truncate"})
    least = 0

    def words(self) -> str:
        return f"cut sequence {self.seq} down to {some(self.length, 'token')}"

    def uses(self) -> list[int]:
        return [self.seq]

    def changed(self) -> list[int]:
        return [self.seq]

    def fitted(self, oracle: operation.Oracle) -> operation.Operation:
        return Truncate(self.seq, min(self.length, oracle.length(self.seq)))

    def allowed(self, oracle: operation.Oracle) -> bool:
        return oracle.may_truncate(self.seq, self.length)

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.truncate_fits([(self.seq, self.length)])

    def change(self, oracle: operation.Oracle) -> None:
        oracle.truncate(self.seq, self.length)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.truncate(self.seq, self.length)

    def copies_blocks(self, fork_shares: str) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> Truncate:
            seq = writer.pick(writer.live)
            return cls(seq, writer.length(seq))

        if writer.live:
            yield operation.Move(10, 4, drawn)
