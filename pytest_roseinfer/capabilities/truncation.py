"""Truncation of sequences to their first tokens, one at a time or several at once."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Prelude,
    RankPolicy,
    Traits,
    optional,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.writes import AppendMany, Prefill
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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


# Prelude


_SHARERS = 4
"""Number of sequences of the prelude that share blocks."""
_FILLING_WRITES = 4
"""Most writes that take the blocks that are not to be free."""


def cut_with_little_room(writer: operation.Writer) -> None:
    """Open with a cut of up to three sequences while 0, 1 or 2 blocks are free; or add no steps.

    Two of the sequences share all blocks, so that a block is free once both have left it. The third
    is cut within a block that a fourth one holds, so that it may need a copy. If groups of layers
    share a pool, each needs a copy, and the pool may have room for one of them only.
    """
    size, adapter = writer.oracle.block_size, writer.adapter
    can_share = adapter.fork_shares != "nothing" and adapter.prefixes.shares == "exact"
    needed = Fork.needs | Truncate.needs | Prefill.needs
    num_groups = len(writer.oracle.windows.groups)
    if size == 1 or not can_share or not needed <= adapter.abilities:
        return
    if writer.between(0, 4 if num_groups == 1 else 2):
        return
    operation.add_while_fitting(writer, _share_two_prompts(writer))
    if len(writer.live) < _SHARERS:
        return
    first, third, second, _ = writer.live
    _fill_up(writer, writer.pick((0, 0, 1, 2) if num_groups == 1 else (1, 1, 2, 0)))
    frees = [(first, size), (second, size), (third, size - 1)]
    copies = [(first, 2 * size - 1), (third, size - 1)]
    if num_groups == 1:
        cuts = writer.pick((frees, frees[1:], copies, writer.shuffle(frees)))
    else:  # each group has room for its own copies
        copies = copies[writer.oracle.pages_free() < num_groups :]
        cuts = writer.pick((copies, copies, copies, frees))
    rows = [cut for cut in cuts if writer.oracle.allows_truncation(*cut)]
    if rows and TruncateMany.needs <= adapter.abilities:
        writer.take(TruncateMany(*zip(*rows, strict=True)))
    else:
        for cut in rows:
            writer.take(Truncate(*cut))


def _share_two_prompts(writer: operation.Writer) -> Iterator[operation.Operation]:
    """Begin a sequence of two blocks and one of a block, and fork both."""
    size = writer.oracle.block_size
    for blocks in (2, 1):
        (seq,) = writer.fresh(1)
        yield Prefill(seq, blocks * size, writer.layout())
    for parent in tuple(writer.live):
        yield Fork(parent, *writer.fresh(1))


def _fill_up(writer: operation.Writer, free: int) -> None:
    """Write until this number of blocks is free, or as near to it as a few writes come.

    With windows, a longer sequence may take a block in one group only.
    """
    oracle, can = writer.oracle, writer.adapter.abilities
    size, filler = oracle.block_size, None
    for _ in range(_FILLING_WRITES):
        counts = [blocks * size for blocks in range(1, oracle.pages_free() + 1)]
        steps: list[operation.Operation] = []
        if len(oracle.sequences) < operation.MAX_SEQUENCES:
            (seq,) = writer.fresh(1)
            steps += (Prefill(seq, count) for count in counts)
        if filler is not None and AppendMany.needs <= can:
            steps += (AppendMany((filler,), (count,)) for count in counts)
        left = {step: oracle.pages_free_after(*step.rows()[0]) for step in steps}
        enough = [step for step, blocks in left.items() if free <= blocks < oracle.pages_free()]
        if not enough:
            return
        step = min(enough, key=lambda each: left[each])
        ((filler, _),) = step.rows()
        writer.take(step)


TRUNCATION = Capability(
    methods=TruncationMethods,
    preludes=(Prelude(("truncate", "truncate_many"), 5, cut_with_little_room),),
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
