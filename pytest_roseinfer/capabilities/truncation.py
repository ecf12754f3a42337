"""Truncation of sequences to their first tokens, one at a time or several at once."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import Capability, RankPolicy, Traits, optional
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec


@dataclass(frozen=True)
class TruncationTraits(Traits):
    """Copies of shared blocks at truncation, and errors of refused truncations."""

    copies: bool = False
    """True if ``truncate`` copies the kept part of a shared block at once; False if the block stays
    shared until it is written to. A block with a single holder is never copied. Blocks that the
    truncation frees make room for the copy, and for those of later rows."""
    errors: tuple[type[BaseException], ...] = ()
    """Errors of ``truncate``: it raises one of them, and changes nothing, if ``can_truncate``
    returns False."""


class TruncationMethods:
    """Adapter methods for truncation."""

    truncation: ClassVar[TruncationTraits] = TruncationTraits()
    """Copies of shared blocks at truncation, and errors of refused truncations."""

    @optional
    def truncate(self, seq: int, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence; 0 and its full length are allowed.

        A sequence of length 0 is not freed: it reads back as empty, and can be appended to.
        ``match_prefix`` no longer finds tokens that were cut off a block with a single holder.
        """

    @optional
    def truncate_many(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        """Truncate ``seqs[i]`` to ``lengths[i]``, one after the other; all of them or none."""

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:  # noqa: ARG003
        """Return False if a cache of this spec cannot truncate ``stored`` tokens to ``length``.

        The result may depend only on these arguments.
        """
        return True


class _Truncation(operation.Operation):
    """An operation that truncates sequences."""

    __slots__ = ()

    def refusal(self, oracle: operation.Oracle) -> operation.Refusal:
        if self.allowed(oracle):
            return operation.Operation.refusal(self, oracle)
        return operation.Refusal("truncation.errors", "it must refuse", "it cannot be truncated")

    def copies_blocks(self, oracle: operation.Oracle) -> bool:  # noqa: ARG002
        return True


@operation.register("Truncate")
class Truncate(_Truncation):
    """Truncate a sequence to its first tokens."""

    seq: int
    length: int

    needs = frozenset({"truncate"})
    least = 0

    def describe(self) -> str:
        return f"truncate sequence {self.seq} to {format_count(self.length, 'token')}"

    def uses(self) -> list[int]:
        return [self.seq]

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def fill_in_numbers(self, oracle: operation.Oracle) -> operation.Operation:
        return Truncate(self.seq, min(self.length, oracle.length(self.seq)))

    def allowed(self, oracle: operation.Oracle) -> bool:
        return oracle.allows_truncation(self.seq, self.length)

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.truncations_fit([(self.seq, self.length)])

    def change(self, oracle: operation.Oracle) -> None:
        oracle.truncate(self.seq, self.length)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.truncate(self.seq, self.length)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> Truncate:
            seq = writer.pick(writer.live)
            return cls(seq, writer.length(seq))

        if writer.live:
            yield operation.DrawOption(101, 4, draw_step)


@operation.register("TruncateMany")
class TruncateMany(_Truncation):
    """Truncate several sequences to their first tokens: all of them, or none."""

    seqs: tuple[int, ...]
    lengths: tuple[int, ...]

    needs = frozenset({"truncate_many"})
    least = 0

    def truncations(self) -> list[tuple[int, int]]:
        return list(zip(self.seqs, self.lengths, strict=True))

    def describe(self) -> str:
        each = ", ".join(f"sequence {seq} to {length}" for seq, length in self.truncations())
        return f"truncate to these lengths: {each}"

    def uses(self) -> list[int]:
        return list(self.seqs)

    def changed_seqs(self) -> list[int]:
        return list(self.seqs)

    def fill_in_numbers(self, oracle: operation.Oracle) -> operation.Operation:
        lengths = (min(length, oracle.length(seq)) for seq, length in self.truncations())
        return TruncateMany(self.seqs, tuple(lengths))

    def allowed(self, oracle: operation.Oracle) -> bool:
        return all(oracle.allows_truncation(*cut) for cut in self.truncations())

    def fits(self, oracle: operation.Oracle) -> bool:
        return oracle.truncations_fit(self.truncations())

    def change(self, oracle: operation.Oracle) -> None:
        for cut in self.truncations():
            oracle.truncate(*cut)

    def drive(self, cache: operation.CacheUnderTest) -> None:
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
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> TruncateMany:
            seqs = writer.batch(())
            return cls(seqs, tuple(map(writer.length, seqs)))

        if writer.live:
            yield operation.DrawOption(112, 2, draw_step)


TRUNCATION = Capability(
    methods=TruncationMethods,
    renamed={
        "trimmable": "can_truncate(spec, stored, length)",
        "truncate_copies": "truncation = TruncationTraits(copies=...)",
        "untrimmable_errors": "truncation = TruncationTraits(errors=...)",
    },
    walk=lambda at: [Truncate(seq, at.oracle.length(seq) - 1) for seq in at.filled],
    sharded={"truncate": RankPolicy.SAME, "truncate_many": RankPolicy.SAME},
    operations=(
        Truncate,
        TruncateMany,
    ),
)
