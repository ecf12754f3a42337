"""Cutting sequences down to their first tokens, one at a time or several at once."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Across, Capability, Traits, optional
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec


@dataclass(frozen=True)
class TruncationTraits(Traits):
    """The ways to cut a block that others hold, and to refuse a cut."""

    copies: bool = False
    """True if ``truncate`` copies the kept part of a block that others hold; False if that stays
    shared until it is written to. A sequence that alone holds a block keeps it. Blocks that are
    given back make room for the copy, and for those of later rows."""
    errors: tuple[type[BaseException], ...] = ()
    """Errors of which ``truncate`` raises one, changing nothing, where ``can_truncate`` returns
    False."""


class TruncationMethods:
    """The methods that cut sequences."""

    truncation: ClassVar[TruncationTraits] = TruncationTraits()
    """The ways to cut a block that others hold, and to refuse a cut."""

    @optional
    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence, which may be none or all of them.

        One that is cut to nothing is not freed: it reads back as empty, and can be appended to.
        ``match_prefix`` no longer finds what was cut off a block that it alone held.
        """

    @optional
    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        """Truncate ``seqs[i]`` to ``lengths[i]``, one after the other; all of them or none."""

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:  # noqa: ARG003
        """Return False if a cache built so cannot cut ``stored`` tokens to ``length``.

        Nothing but these numbers may matter.
        """
        return True


class _Cut(operation.Operation):
    """An operation that cuts sequences."""

    __slots__ = ()

    def refusal(self, oracle: operation.Oracle) -> operation.Refusal:
        if self.allowed(oracle):
            return operation.Operation.refusal(self, oracle)
        return operation.Refusal("truncation.errors", "it must refuse", "it cannot be trimmed")

    def copies_blocks(self, oracle: operation.Oracle) -> bool:  # noqa: ARG002
        return True


@operation.register("Truncate")
class Truncate(_Cut):
    """Cut a sequence down to its first tokens."""

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
        return oracle.may_cut(self.seq, self.length)

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.cuts_fit([(self.seq, self.length)])

    def change(self, oracle: operation.Oracle) -> None:
        oracle.cut(self.seq, self.length)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.truncate(self.seq, self.length)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> Truncate:
            seq = writer.pick(writer.live)
            return cls(seq, writer.length(seq))

        if writer.live:
            yield operation.Move(101, 4, drawn)


@operation.register("TruncateMany")
class TruncateMany(_Cut):
    """Cut several sequences down to their first tokens: all of them, or none."""

    seqs: tuple[int, ...]
    lengths: tuple[int, ...]

    needs = frozenset({"truncate_many"})
    least = 0

    def cuts(self) -> list[tuple[int, int]]:
        return list(zip(self.seqs, self.lengths, strict=True))

    def words(self) -> str:
        each = ", ".join(f"sequence {seq} to {length}" for seq, length in self.cuts())
        return f"cut down to so many tokens: {each}"

    def uses(self) -> list[int]:
        return list(self.seqs)

    def changed(self) -> list[int]:
        return list(self.seqs)

    def fitted(self, oracle: operation.Oracle) -> operation.Operation:
        lengths = (min(length, oracle.length(seq)) for seq, length in self.cuts())
        return TruncateMany(self.seqs, tuple(lengths))

    def allowed(self, oracle: operation.Oracle) -> bool:
        return all(oracle.may_cut(*cut) for cut in self.cuts())

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.cuts_fit(self.cuts())

    def change(self, oracle: operation.Oracle) -> None:
        for cut in self.cuts():
            oracle.cut(*cut)

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.truncate_many(self.seqs, self.lengths)

    def reversed(self) -> operation.Operation:
        return TruncateMany(self.seqs[::-1], self.lengths[::-1])

    def halves(self) -> list[operation.Operation]:
        at = len(self.seqs) // 2
        parts = (slice(at), slice(at, None))
        return [
            TruncateMany(self.seqs[part], self.lengths[part]) for part in parts if self.seqs[part]
        ]

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> TruncateMany:
            seqs = writer.batch(())
            return cls(seqs, tuple(map(writer.length, seqs)))

        if writer.live:
            yield operation.Move(112, 2, drawn)


TRUNCATION = Capability(
    methods=TruncationMethods,
    renamed={
        "trimmable": "can_truncate(spec, stored, length)",
        "truncate_copies": "truncation = TruncationTraits(copies=...)",
        "untrimmable_errors": "truncation = TruncationTraits(errors=...)",
    },
    walk=lambda at: [Truncate(seq, at.oracle.length(seq) - 1) for seq in at.filled],
    sharded={"truncate": Across.SAME, "truncate_many": Across.SAME},
    operations=(
        Truncate,
        TruncateMany,
    ),
)
