"""One token to each of some sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_roseinfer.cases.operations import operation


@operation.register
@dataclass(frozen=True, slots=True)
class Append(operation.Write):
    """One token to each of some sequences, in this order; unseen names start empty."""

    seqs: tuple[int, ...]
    layout: str = "plain"

    def rows(self) -> operation.Rows:
        return [(seq, 1) for seq in self.seqs]

    def words(self) -> str:
        seqs = f"sequence{'s' * (len(self.seqs) != 1)} {', '.join(map(str, self.seqs))}"
        return f"append one token to {seqs}{self.laid_out()}"

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.append(self.seqs, cache.key, cache.value)

    def reversed(self) -> operation.Operation:
        return replace(self, seqs=self.seqs[::-1])

    def halves(self) -> list[operation.Operation]:
        at = len(self.seqs) // 2
        return [replace(self, seqs=half) for half in (self.seqs[:at], self.seqs[at:]) if half]

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> Append:
            live = writer.live
            most = (0 if len(live) >= operation.MOST_SEQUENCES else 1) if live else 3
            fresh = writer.fresh(writer.between(0 if live else 1, most))
            return cls(writer.batch(fresh), writer.layout())

        yield operation.Move(0, 3, drawn)
        if writer.live:
            yield operation.Move(6, 3, lambda: cls(tuple(writer.live), writer.layout()))
