"""Truncation of sequences to their first tokens, one at a time or several at once."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Prelude,
    RankPolicy,
    Traits,
    Walk,
    optional,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.writes import AppendMany, Prefill
from pytest_roseinfer.oracle.pages import State
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec


@dataclass(frozen=True)
class TruncationTraits(Traits):
    """Copies of shared blocks, possible lengths, and errors of truncations that are refused."""

    copies: bool = False
    """True if ``truncate`` copies the kept part of a shared block at once; False if the block stays
    shared until it is written to. A block with a single holder is never copied. Blocks that the
    truncation frees make room for the copy, and for those of later rows."""
    errors: tuple[type[BaseException], ...] = ()
    """Errors of ``truncate``: it raises one of them, and changes nothing, if ``can_truncate``
    returns False, or if the sequence has no checkpoint at the length."""
    lengths: Literal["any", "checkpoints"] = "any"
    """Lengths that a sequence can be truncated to: ``"any"``, or those of its ``"checkpoints"``,
    which its writes record; 0 and its full length always."""


class TruncationMethods:
    """Adapter methods for truncation."""

    truncation: ClassVar[TruncationTraits] = TruncationTraits()
    """Copies of shared blocks, possible lengths, and errors of truncations that are refused."""

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

    @classmethod
    def checkpoints(
        cls,
        spec: CacheSpec,  # noqa: ARG003
        recorded: Sequence[int],
        begin: int,  # noqa: ARG003
        end: int,
    ) -> Iterable[int]:
        """Return the lengths at which a sequence has checkpoints after a write of one call.

        The write extends it from ``begin`` tokens to ``end``; those ``recorded`` before are listed
        in ascending order. A fork begins with the checkpoints of its parent, a truncation drops
        those of the tokens that it cuts off, and a preempted sequence loses all.
        """
        return (*recorded, end)


@dataclass(slots=True)
class Checkpoints(State):
    """Lengths that sequences can be truncated to, for caches that record some while they write."""

    required_attributes: ClassVar = {"truncation.lengths": "checkpoints"}

    record: Callable[[Sequence[int], int, int], Iterable[int]]
    """Function of the recorded lengths and of a write's first and last length, which returns the
    lengths that are recorded after it."""
    recorded: dict[int, set[int]] = field(default_factory=dict)
    """Lengths of the checkpoints of each sequence."""
    ever: set[int] = field(default_factory=set)
    """Lengths of all checkpoints so far: a careless cache may take one that is gone for a present
    one of another sequence."""

    @classmethod
    def of(cls, adapter: Any, spec: Any) -> Checkpoints:
        return cls(partial(adapter.checkpoints, spec))

    def on_write(self, seq: int, begin: int, end: int) -> None:
        earlier = sorted(self.recorded.get(seq, ()))
        self.recorded[seq] = {*self.record(earlier, begin, end)}
        self.ever |= self.recorded[seq]

    def on_fork(self, parent: int, child: int, shared: int) -> None:  # noqa: ARG002
        self.recorded[child] = {*self.recorded.get(parent, ())}

    def on_cut(self, seq: int, length: int) -> None:
        self.recorded[seq] = {each for each in self.recorded.get(seq, ()) if each <= length}

    def on_release(self, seq: int) -> None:
        self.recorded.pop(seq, None)

    def allows_truncation(self, seq: int, length: int) -> bool:
        return length in self.recorded.get(seq, ())

    def lengths_to_try(self, seq: int) -> Collection[int]:  # noqa: ARG002
        return self.ever


def refuse_checkpoints(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a cache whose checkpoints cannot be judged."""
    if adapter.truncation.lengths != "checkpoints":
        return
    trait = f"{adapter.__name__}.truncation.lengths is 'checkpoints'"
    if not adapter.abilities & (Truncate.needs | TruncateMany.needs):
        raise TypeError(f"{trait}: define truncate or truncate_many")
    if not adapter.truncation.errors:
        raise TypeError(f"{trait}: list the errors of other lengths in truncation.errors")
    for method in ("use_tokens", "swap_out"):
        if method in adapter.abilities:
            raise TypeError(f"{trait}, which cannot be judged with {method} yet: leave out one")
    if "fork" in adapter.abilities and "prefill" not in adapter.abilities:
        raise TypeError(
            f"{trait}: define prefill, since forks are compared with copies that are one write"
        )


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
        for cut in sorted(self.truncations()):  # equal new texts, whatever the order of the rows
            oracle.truncate(*cut)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.truncate_many(self.seqs, self.lengths)

    def reversed(self) -> operation.Operation:
        return TruncateMany(self.seqs[::-1], self.lengths[::-1])

    def halves(self) -> list[operation.Operation]:
        at, in_order = len(self.seqs) // 2, sorted(self.truncations())
        halves = (tuple(zip(*half, strict=True)) for half in (in_order[:at], in_order[at:]) if half)
        return [TruncateMany(seqs, lengths) for seqs, lengths in halves]

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> TruncateMany:
            seqs = writer.batch(())
            return cls(seqs, tuple(map(writer.length, seqs)))

        if writer.live:
            yield operation.DrawOption(112, 2, draw_step)


# Preludes


def cut_to_checkpoints(writer: operation.Writer) -> None:
    """Open with a cut to a length that is a checkpoint of other tokens; or add no steps.

    They are tokens that were cut off before, those of a fork, or those of a freed sequence of the
    same name. Random steps rarely write past such a length at once.
    """
    adapter, needed = writer.adapter, Truncate.needs | Prefill.needs | AppendMany.needs
    if adapter.truncation.lengths == "any" or not needed <= adapter.abilities:
        return
    ways = {_cut_twice: Truncate.needs, _cut_forks: Fork.needs, _cut_next_of_name: Free.needs}
    able = [way for way, needs in ways.items() if needs <= adapter.abilities]
    if writer.between(0, 1):
        operation.add_while_fitting(writer, writer.pick(able)(writer))


def _cut_twice(writer: operation.Writer) -> Iterator[operation.Operation]:
    (seq,) = writer.fresh(1)
    length, more = _lengths(writer)
    yield Prefill(seq, length, writer.layout())
    yield AppendMany((seq,), (more,), writer.layout())
    yield Truncate(seq, length)
    yield AppendMany((seq,), (more + 1,), writer.layout())
    yield Truncate(seq, length + more)


def _cut_forks(writer: operation.Writer) -> Iterator[operation.Operation]:
    (parent,) = writer.fresh(1)
    length, more = _lengths(writer)
    yield Prefill(parent, length, writer.layout())
    yield Fork(parent, *writer.fresh(1))
    shorter, longer = writer.shuffle(tuple(writer.live))
    yield AppendMany((shorter,), (more,), writer.layout())
    yield AppendMany((longer,), (more + 1,), writer.layout())
    yield Truncate(longer, length + more)


def _cut_next_of_name(writer: operation.Writer) -> Iterator[operation.Operation]:
    (seq,) = writer.fresh(1)
    length, more = _lengths(writer)
    yield Prefill(seq, length, writer.layout())
    yield Free(seq)
    yield Prefill(seq, length + more, writer.layout())
    yield Truncate(seq, length)


def _lengths(writer: operation.Writer) -> tuple[int, int]:
    """Draw the tokens of a first write, and those of a second one; some end a block."""
    size = writer.oracle.block_size
    return writer.pick((size, 1, size + 1)), writer.pick((size, 1, 2))


_SHARERS = 4
"""Number of sequences of the prelude that share blocks."""
_FILLING_WRITES = 6
"""Most writes that take the blocks that are not to be free."""


def cut_with_little_room(writer: operation.Writer) -> None:
    """Open with a cut of up to three sequences while 0, 1 or 2 blocks are free; or add no steps.

    Two of the sequences share all blocks, so that a block is free once both have left it. The third
    is cut within a block that a fourth one holds, so that it may need a copy. If groups of layers
    share a pool, each needs a copy, and the pool may have room for one of them only.
    """
    size, adapter = writer.oracle.block_size, writer.adapter
    can_share = adapter.fork_shares != "nothing" and adapter.prefixes.shares != "none"
    needed = Fork.needs | Truncate.needs | Prefill.needs
    if _shares_equal_prefixes(writer):  # single cuts have preludes of their own
        needed |= TruncateMany.needs
    num_groups = len(writer.oracle.windows.groups)
    if size == 1 or not can_share or not needed <= adapter.abilities or writer.live:
        return
    if _can_share_in_one_group(writer) and writer.between(0, 1):
        _cut_shared_by_one_group(writer)
        return
    if writer.between(0, 4 if num_groups == 1 else 1):
        return
    operation.add_while_fitting(writer, _share_two_prompts(writer))
    if len(writer.live) < _SHARERS:
        return
    first, third, second, fourth = writer.live
    free = writer.pick((0, 0, 1, 2) if num_groups == 1 else (1, 1, 2))
    _fill_up(writer, free, fourth if _shares_equal_prefixes(writer) else None)
    frees = [(first, size), (second, size), (third, size - 1)]
    copies = [(first, 2 * size - 1), (third, size - 1)]
    if num_groups == 1:
        half_way = [frees[0], frees[2], frees[1]]  # the copy comes before a block is free
        cuts = writer.pick((frees, half_way, half_way, frees[1:], copies))
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
    (first,) = writer.fresh(1)
    yield Prefill(first, 2 * size, writer.layout())
    (third,) = writer.fresh(1)
    if _shares_equal_prefixes(writer):  # only forks share a known number of blocks
        yield Fork(first, third)
        yield Truncate(third, size)
    else:
        yield Prefill(third, size, writer.layout())
    for parent in (first, third):
        yield Fork(parent, *writer.fresh(1))


def _can_share_in_one_group(writer: operation.Writer) -> bool:
    """Return True if groups share a pool, and a cut of a block and a part is allowed."""
    oracle, can = writer.oracle, writer.adapter.abilities
    return (
        len(oracle.windows.groups) > 1
        and oracle.windows.shared_pool
        and AppendMany.needs <= can
        and oracle.can_truncate(2 * oracle.block_size, oracle.block_size - 1)
    )


def _cut_shared_by_one_group(writer: operation.Writer) -> None:
    """Cut a sequence, with no block free, whose blocks a fork shares in one group of layers only.

    The fork has gone on until the blocks left a window. So one group frees the block that the copy
    in the other group takes.
    """
    size, oracle = writer.oracle.block_size, writer.oracle
    parent, child = writer.fresh(2)
    window = writer.pick(oracle.windows.sizes)
    steps = (
        Prefill(parent, 2 * size, writer.layout()),
        Fork(parent, child),
        AppendMany((child,), (window,), writer.layout()),
        AppendMany((child,), (1,), writer.layout()),  # some caches free at the next write
    )
    operation.add_while_fitting(writer, iter(steps))
    if {parent, child} <= {*writer.live} and oracle.allows_truncation(parent, size - 1):
        # A new sequence takes a block in each group, and a longer one mostly in one only.
        counts = (count for count in range(1, size + 1) if _is_even_after(writer, child, count))
        if oracle.pages_free() % len(oracle.windows.groups) and (count := next(counts, 0)):
            writer.take(AppendMany((child,), (count,)))
        _fill_up(writer, 0, None)
        writer.take(Truncate(parent, size - 1))


def _is_even_after(writer: operation.Writer, seq: int, count: int) -> bool:
    """Return True if new sequences can take all blocks that a write of a sequence leaves."""
    oracle = writer.oracle
    return oracle.pages_free_after(seq, count) % len(oracle.windows.groups) == 0


def _shares_equal_prefixes(writer: operation.Writer) -> bool:
    """Return True if a new sequence may take no block, since others have its tokens."""
    return bool(writer.adapter.prefixes.shares == "equal prefixes")


def _fill_up(writer: operation.Writer, free: int, filler: int | None) -> None:
    """Write until this number of blocks is free, or as near to it as a few writes come.

    Extend ``filler``, or begin new sequences if it is None. With windows, a longer sequence may
    take a block in one group only, and a new one takes one in each: no block is left if the
    others are as many for each group.
    """
    oracle, can = writer.oracle, writer.adapter.abilities
    each_time = 1 if free else len(oracle.windows.groups)
    size, fillers = oracle.block_size, [] if filler is None else [filler]
    for _ in range(_FILLING_WRITES):
        counts = [blocks * size for blocks in range(1, oracle.pages_free() + 1)]
        steps: list[operation.Operation] = []
        if filler is None and len(oracle.sequences) < operation.MAX_SEQUENCES:
            (seq,) = writer.fresh(1)
            steps += (Prefill(seq, count) for count in counts)
        if AppendMany.needs <= can:
            steps += (AppendMany((seq,), (count,)) for seq in fillers for count in counts)
        left = {step: oracle.pages_free_after(*step.rows()[0]) for step in steps}
        enough = [step for step, blocks in left.items() if free <= blocks < oracle.pages_free()]
        if not enough:
            return
        step = min(enough, key=lambda each: (left[each] % each_time, left[each]))
        fillers += step.new_seqs()
        writer.take(step)


def _walk(at: Walk) -> Iterator[operation.Operation]:
    for seq in at.filled:
        last = at.oracle.length(seq) - 1
        yield from (Truncate(seq, each) for each in {last, *at.oracle.lengths_to_try(seq)})


TRUNCATION = Capability(
    methods=TruncationMethods,
    preludes=(
        Prelude(("truncate",), 4, cut_to_checkpoints),
        Prelude(("truncate", "truncate_many"), 5, cut_with_little_room),
    ),
    renamed={
        "trimmable": "can_truncate(spec, stored, length)",
        "truncate_copies": "truncation = TruncationTraits(copies=...)",
        "untrimmable_errors": "truncation = TruncationTraits(errors=...)",
    },
    walk=_walk,
    states=(Checkpoints,),
    refuse=(refuse_checkpoints,),
    sharded={"truncate": RankPolicy.SAME, "truncate_many": RankPolicy.SAME},
    operations=(
        Truncate,
        TruncateMany,
    ),
)
