"""Writes of tokens: appends, padded batches, prompts, and writes to room reserved before."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Large,
    Observer,
    Prelude,
    RankPolicy,
    Ranks,
    Run,
    Walk,
    optional,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.misuse import (
    OTHER_UNKNOWN_SEQ,
    UNKNOWN_SEQ,
    Call,
    MisuseState,
    misuse,
)
from pytest_roseinfer.capabilities.operation import MAX_SEQUENCES, DrawOption
from pytest_roseinfer.capabilities.return_values import reservation
from pytest_roseinfer.oracle.pages import State, Written, padding_token
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.observation import Observation
    from pytest_roseinfer.capabilities.operation import DrawOptions, Operation, Writer


class WriteMethods:
    """Adapter methods that write, besides ``append``."""

    cancels_reservations: ClassVar[bool] = False
    """True if ``free`` may be called for a sequence with reserved tokens that are not written, as
    when a request is cancelled before its step has run. Its reservations, which have no other
    sequence, are not filled then."""

    @optional
    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Begin a new sequence with a whole prompt."""

    @optional
    def reserve(self, seqs: Sequence[int], counts: Sequence[int]) -> object:
        """Reserve room for ``counts[i]`` more tokens of ``seqs[i]``, to be written later.

        The result is passed to ``fill``, which writes all of that room. Until then no step uses the
        sequences. ``begin_with`` is called first for a sequence that begins with a stored prefix.
        """

    @optional
    def fill(self, reservation: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the tokens of a reservation."""

    @optional
    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append ``counts[i]`` tokens to ``seqs[i]``; tokens of one sequence are contiguous."""

    @optional
    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append as ``append`` does, and ignore padding rows, whose sequence is None."""


@dataclass(slots=True)
class Reservations(State):
    """Reserved tokens, which count as stored but are not written yet."""

    any_of: ClassVar = ("reserve",)
    open: list[Written] = field(default_factory=list)

    def unwritten(self, seq: int) -> int:
        return sum(count for each in self.open for name, count in each.rows if name == seq)

    def on_free(self, seq: int) -> None:
        self.open = [each for each in self.open if seq not in dict(each.rows)]

    def cancellable(self) -> list[int]:
        """List the sequences whose reservations are for themselves alone."""
        names = {frozenset(dict(each.rows)) for each in self.open}
        alone = {seq for seqs in names if len(seqs) == 1 for seq in seqs}
        return sorted(alone - {seq for seqs in names if len(seqs) > 1 for seq in seqs})


def reservations(oracle: operation.Oracle) -> list[Written]:
    """Return the tokens of each open reservation, the oldest first."""
    state = oracle.state(Reservations)
    return state.open if state else []


@operation.register("Append")
class Append(operation.Write):
    """Append one token to each of these sequences, in this order; new names begin sequences."""

    seqs: tuple[int, ...]
    layout: str = "plain"

    def rows(self) -> operation.Rows:
        return [(seq, 1) for seq in self.seqs]

    def describe(self) -> str:
        seqs = f"sequence{'s' * (len(self.seqs) != 1)} {', '.join(map(str, self.seqs))}"
        return f"append one token to {seqs}{self.describe_layout()}"

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.append(self.seqs, cache.key, cache.value)

    def first(self, rows: int) -> operation.Operation:
        return Append(self.seqs[:rows], self.layout)

    def reversed(self) -> operation.Operation:
        return Append(self.seqs[::-1], self.layout)

    def halves(self) -> list[operation.Operation]:
        at = len(self.seqs) // 2
        return [Append(half, self.layout) for half in (self.seqs[:at], self.seqs[at:]) if half]

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> Append:
            live = len(writer.live)
            min_count, max_count = (0, int(live < operation.MAX_SEQUENCES)) if live else (1, 3)
            if live and writer.reuses_prefixes and writer.between(0, 1):
                max_count = 0
            return cls(
                writer.batch(writer.fresh(writer.between(min_count, max_count))), writer.layout()
            )

        few = writer.reuses_prefixes and not writer.live
        yield operation.DrawOption(0, 1 if few else 3, draw_step)
        if writer.live:
            yield operation.DrawOption(60, 3, lambda: cls(tuple(writer.live), writer.layout()))


@operation.register("AppendMany")
class AppendMany(operation.Write):
    """Append several tokens to each of these sequences."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    layout: str = "plain"

    needs = frozenset({"append_many"})

    def rows(self) -> operation.Rows:
        return list(zip(self.seqs, self.counts, strict=True))

    def first(self, rows: int) -> operation.Operation:
        return AppendMany(self.seqs[:rows], self.counts[:rows], self.layout)

    def describe(self) -> str:
        each = ", ".join(f"{count} to sequence {seq}" for seq, count in self.rows())
        return f"append tokens: {each}{self.describe_layout()}"

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.append_many(self.seqs, self.counts, cache.key, cache.value)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        yield operation.DrawOption(10, 1, lambda: cls(*writer.rows(), writer.layout()))


@operation.register("AppendPadded")
class AppendPadded(operation.Write):
    """Append one token to each of these sequences; None stands for a padding row."""

    seqs: tuple[int | None, ...]
    layout: str = "plain"

    needs = frozenset({"append_padded"})

    def rows(self) -> operation.Rows:
        return [(seq, 1) for seq in self.seqs if seq is not None]

    def padding(self) -> int:
        return self.seqs.count(None)

    def first(self, rows: int) -> operation.Operation:
        refused = [at for at, seq in enumerate(self.seqs) if seq is not None][rows]
        return AppendPadded(self.seqs[:refused], self.layout)

    def describe(self) -> str:
        rows = ["padding" if seq is None else str(seq) for seq in self.seqs]
        return f"append one token to rows {', '.join(rows)}{self.describe_layout()}"

    def inputs(self, tokens: operation.Tokens) -> operation.Tokens:
        remaining = iter(tokens)
        return [
            padding_token(row) if seq is None else next(remaining)
            for row, seq in enumerate(self.seqs)
        ]

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.append_padded(self.seqs, cache.key, cache.value)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> AppendPadded:
            seqs: list[int | None] = list(writer.batch(writer.fresh(1)))
            for _ in range(writer.between(1, 3)):
                seqs.insert(writer.between(0, len(seqs)), None)
            return cls(tuple(seqs), writer.layout())

        yield operation.DrawOption(20, 1, draw_step)


@operation.register("Prefill")
class Prefill(operation.Write):
    """Begin a new sequence with a whole prompt."""

    seq: int
    count: int
    layout: str = "plain"

    needs = frozenset({"prefill"})

    def rows(self) -> operation.Rows:
        return [(self.seq, self.count)]

    def describe(self) -> str:
        tokens = format_count(self.count, "token")
        return f"prefill sequence {self.seq} with {tokens}{self.describe_layout()}"

    def new_seqs(self) -> list[int]:
        return [self.seq]

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.prefill(self.seq, cache.key, cache.value)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        def draw_step() -> Prefill:
            seq = writer.name_reusing_prefix()
            return cls(seq, writer.count(seq), writer.layout())

        if len(writer.oracle.sequences) < operation.MAX_SEQUENCES:
            yield operation.DrawOption(50, 3 if writer.reuses_prefixes else 2, draw_step)


@operation.register("Reserve")
class Reserve(operation.Operation):
    """Reserve room for several tokens of these sequences, which a ``Fill`` writes later.

    The oracle counts them as stored from now on, and records which are not written yet.
    """

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    layout: str = "plain"

    needs = frozenset({"reserve", "fill"})

    def rows(self) -> operation.Rows:
        return list(zip(self.seqs, self.counts, strict=True))

    def describe(self) -> str:
        each = ", ".join(f"{count} of sequence {seq}" for seq, count in self.rows())
        return f"reserve room for tokens: {each}"

    def change(self, oracle: operation.Oracle) -> None:
        tokens = oracle.new_tokens(self.rows())
        written = Written(self.rows(), tokens, self.layout)
        oracle.ensure_state(Reservations).open.append(written)
        oracle.append(self.rows(), tokens)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        handle = cache.adapter.reserve(self.seqs, self.counts)
        cache.open_reservations.append(operation.OpenReservation(handle, cache.options, self.seqs))

    def copies_blocks(self, oracle: operation.Oracle) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        yield operation.DrawOption(30, 1, lambda: cls(*writer.rows(), writer.layout()))


@operation.register("Fill")
class Fill(operation.Operation):
    """Write the tokens of the oldest reservation that is still open."""

    needs = frozenset({"reserve", "fill"})

    def describe(self) -> str:
        return "fill the oldest reservation"

    def possible(self, oracle: operation.Oracle) -> bool:
        return bool(reservations(oracle))

    def written(self, oracle: operation.Oracle) -> operation.Written:
        return reservations(oracle)[0]

    def change(self, oracle: operation.Oracle) -> None:
        filled = reservations(oracle).pop(0)
        oracle.slide_written(filled.rows)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        handle, cache.planned_options, _ = cache.open_reservations.pop(0)
        try:
            cache.adapter.fill(handle, cache.key, cache.value)
        except Exception as error:
            if wrong := reservation(handle, error):
                raise wrong from error
            raise

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if reservations(writer.oracle):
            yield operation.DrawOption(40, 2, cls)


@operation.register("Cancel")
class Cancel(operation.Operation):
    """Free a sequence with reserved tokens that are not written, which are never filled."""

    seq: int

    needs = frozenset({"reserve", "fill", "free"})

    def describe(self) -> str:
        return f"cancel sequence {self.seq}, whose reserved tokens are not written"

    def possible(self, oracle: operation.Oracle) -> bool:
        state = oracle.state(Reservations)
        return state is not None and self.seq in state.cancellable()

    def changed_seqs(self) -> list[int]:
        return [self.seq]

    def change(self, oracle: operation.Oracle) -> None:
        oracle.free(self.seq)

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.open_reservations = [
            each for each in cache.open_reservations if self.seq not in each.seqs
        ]
        cache.adapter.free(self.seq)

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        state = writer.oracle.state(Reservations)
        if writer.adapter.cancels_reservations and state and (seqs := state.cancellable()):
            yield operation.DrawOption(81, 3, lambda: cls(writer.pick(seqs)))


# Kinds of batches that a test of batched writes must cover


FEWEST_ROWS = 3
"""Fewest rows of a counted batch: a smaller one has no row between the first and the last."""
MIXED_LENGTHS = "mixed lengths"
"""Sequences of different lengths."""
ONE_POSITION = "one position"
"""Rows that all begin at one position of their blocks; blocks of one token do not count."""
MIXED_POSITIONS = "mixed positions"
"""Rows that begin at different positions of their blocks."""
BOUNDARY = "boundary"
"""A row that fills its block, or begins one after the sequence's first."""
SHARED_TWICE = "shared twice"
"""A sequence with a block of refcount 2."""
LAST_SHARED = "last block shared"
"""A sequence whose last block has refcount 2."""


def batch_kinds(oracle: operation.Oracle, rows: operation.Rows) -> Iterator[str]:
    """Yield the kinds of a batch of ``FEWEST_ROWS`` or more that is about to be appended."""
    size, lengths = oracle.block_size, [oracle.length(seq) for seq, _ in rows]
    if len({*lengths}) > 1:
        yield MIXED_LENGTHS
    if size > 1:
        yield ONE_POSITION if len({length % size for length in lengths}) == 1 else MIXED_POSITIONS
    if any(length and length % size in (0, size - 1) for length in lengths):
        yield BOUNDARY
    blocks = oracle.block_counts()
    holders = [of_group for seq, _ in rows for of_group in blocks.holders_of(seq)]
    if any(2 in of_group for of_group in holders):
        yield SHARED_TWICE
    if any(of_group[-1:] == [2] for of_group in holders):
        yield LAST_SHARED


class BatchKinds(Observer):
    """Counter of the batches of several rows that were stored, by kind."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.counts: Counter[str] = Counter()
        self._kinds: list[str] = []

    def before(self, step: Operation) -> Mapping[str, int]:
        rows = step.rows()
        counted = len(rows) >= FEWEST_ROWS and not step.in_parts
        self._kinds = [*batch_kinds(self.run.oracle, rows)] if counted else []
        return {}

    def after(self, observation: Observation) -> Mapping[str, int]:
        if observation.outcome.fits:
            self.counts.update(self._kinds)
        return {}


def begin_sequence(writer: operation.Writer, length: int) -> None:
    """Begin a sequence of this length; of at most 5 tokens if the cache has no ``prefill``."""
    (seq,) = writer.fresh(1)
    if "prefill" in writer.adapter.abilities:
        writer.take(Prefill(seq, length, writer.layout()))
        return
    for _ in range(min(length, 5)):
        writer.take(Append((seq,), writer.layout()))


def share_blocks(writer: operation.Writer) -> None:
    """Open with sequences, some of them with shared blocks; or add no steps.

    Their last blocks are partial, full, or just begun, or there is one of each, so that a batch of
    all of them meets most conditions at once.
    """
    size = writer.oracle.block_size
    partial, full, begun = [size - 1 or 1], [size], [size + 1]
    mixed = sorted([*partial, *full, *begun])
    lengths = writer.pick(([], partial, full, begun, mixed, mixed))
    if not lengths:
        return
    for length in writer.shuffle(lengths):
        if not writer.no_more_steps:
            begin_sequence(writer, length)
    for _ in range(writer.between(1, 2)):
        if not writer.no_more_steps:
            writer.take(Fork.draw_for_any(writer))


def cancel_reserved(writer: operation.Writer) -> None:
    """Open with a prompt that is cancelled before it is written, and its name used again.

    Or add no steps. The blocks of the prompt hold nothing then, and no later text is found there.
    """
    able = Cancel.needs <= writer.adapter.abilities and writer.adapter.cancels_reservations
    if able and writer.pick((False, False, True)):
        operation.add_while_fitting(writer, _cancel_reserved(writer))


def _cancel_reserved(writer: operation.Writer) -> Iterator[operation.Operation]:
    size, (seq,) = writer.oracle.block_size, writer.fresh(1)
    yield Reserve((seq,), (writer.pick((size, size + 1, 2 * size)),), writer.layout())
    yield Cancel(seq)
    yield Reserve((seq,), (writer.pick((1, size)),), writer.layout())
    yield Fill()


# Writes that need all free blocks, so that freed and cached blocks are overwritten


def draw_long_writes(writer: Writer) -> DrawOptions:
    """Yield a way to draw a write that needs all free blocks, if any block is free."""
    free = writer.oracle.pages_free()

    def draw_step() -> Operation:
        if "prefill" in writer.adapter.abilities:
            (seq,) = writer.fresh(1)
            return Prefill(seq, free * writer.oracle.block_size)
        return Append(writer.fresh(min(free, MAX_SEQUENCES)))

    if free:
        yield DrawOption(110, 3, draw_step)


def _fill(ranks: Ranks, handles: list[Any], key: torch.Tensor, value: torch.Tensor) -> None:
    heads = ranks.heads(key, value)
    ranks.each(lambda at, cache: cache.fill(handles[at], *heads[at]))


# Bad calls


@misuse("prefill")
def prefill_twice(at: MisuseState) -> Iterator[Call]:
    for seq in at.live[-1:]:
        call = partial(at.adapter.prefill, seq, at.tokens(1), at.tokens(1))
        yield "prefill of a sequence that has tokens", call


@misuse()
def append_twice(at: MisuseState) -> Iterator[Call]:
    for seq in at.live[-1:]:
        call = partial(at.adapter.append, [seq, seq], at.tokens(2), at.tokens(2))
        yield "append to one sequence twice", call


@misuse()
def append_of_another_shape(at: MisuseState) -> Iterator[Call]:
    new = at.tokens(2)
    call = partial(at.adapter.append, [UNKNOWN_SEQ, OTHER_UNKNOWN_SEQ], new, new[:, :, :0])
    yield "append of values without heads", call


@misuse()
def append_one_row_short(at: MisuseState) -> Iterator[Call]:
    new = at.tokens(2)
    call = partial(at.adapter.append, [UNKNOWN_SEQ, OTHER_UNKNOWN_SEQ], new, new[:, :1])
    yield "append of two keys and one value", call


@misuse()
def append_of_integers(at: MisuseState) -> Iterator[Call]:
    new = at.tokens(2).int()
    yield (
        "append of integers",
        partial(at.adapter.append, [UNKNOWN_SEQ, OTHER_UNKNOWN_SEQ], new, new),
    )


# Steps of walks and of large histories


def _walk(at: Walk) -> Iterator[Operation]:
    live = [*at.oracle.sequences]
    yield from (Append((seq,)) for seq in (*live, *at.names))
    if len(live) > 1:
        yield Append(tuple(live))
        yield Append(tuple(live[::-1]))


def _large(at: Large) -> Iterator[Operation]:
    """Append one token or several to all rows, directly or with a reservation.

    The last rows are new sequences, and one with a full block.
    """
    first, *others = at.names
    new = range(at.fresh(), min(at.fresh() + 2, at.max_names))
    at.names = [*new[:1], *others, *new[1:], first]
    names, counts = tuple(at.names), _counts(at)
    yield Append(names)
    yield AppendMany(names[::-1], counts)
    yield AppendPadded((*names[:40], None, *names[40:], None))
    yield Reserve(names, counts[::-1])
    yield Fill()
    yield Append(names[:-1])


ONE_BY_ONE = 8
"""Most tokens that a sequence of a large history gets in steps of one token."""


def _counts(at: Large) -> tuple[int, ...]:
    """Return a number of tokens for each row, at most a block and one, which it can get twice."""
    max_count = at.block_size + 1
    if longest := at.adapter.max_tokens:
        max_count = min(max_count, (longest - ONE_BY_ONE) // 2)
    return tuple(1 + row % max_count for row in range(len(at.names)))


def written(counts: Mapping[int, int], can: frozenset[str]) -> Iterator[Operation]:
    """Yield the fewest steps that begin sequences with these numbers of tokens."""
    if "prefill" in can:
        yield from (Prefill(seq, count) for seq, count in counts.items())
    elif "append_many" in can:
        yield AppendMany(tuple(counts), tuple(counts.values()))
    elif Reserve.needs <= can:
        yield Reserve(tuple(counts), tuple(counts.values()))
        yield Fill()
    else:
        for done in range(max(counts.values())):
            yield Append(tuple(seq for seq, count in counts.items() if done < count))


WRITES = Capability(
    methods=WriteMethods,
    preludes=(
        Prelude(("fork",), 30, share_blocks),
        Prelude(("reserve",), 31, cancel_reserved),
    ),
    walk=_walk,
    large=_large,
    misuse=(
        prefill_twice,
        append_twice,
        append_of_another_shape,
        append_one_row_short,
        append_of_integers,
    ),
    sharded={
        "append_many": RankPolicy.WRITE,
        "append_padded": RankPolicy.WRITE,
        "prefill": RankPolicy.WRITE,
        "reserve": RankPolicy.EACH,
        "fill": _fill,
    },
    states=(Reservations,),
    observers=(BatchKinds,),
    finishing_steps=lambda oracle: [Fill()] * len(reservations(oracle)),
    needs={"reserve": ("fill",), "fill": ("reserve",)},
    operations=(
        Append,
        AppendMany,
        AppendPadded,
        Prefill,
        Reserve,
        Fill,
        Cancel,
    ),
)
