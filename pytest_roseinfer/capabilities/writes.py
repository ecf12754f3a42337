"""Writing tokens: single ones, many, padded batches, prompts, and room that is reserved first."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.answers import reservation
from pytest_roseinfer.capabilities.capability import (
    Across,
    Capability,
    Large,
    Observer,
    Prelude,
    Ranks,
    Run,
    Walk,
    optional,
)
from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.misuse import NEVER, NEVER_EITHER, Call, Situation, misuse
from pytest_roseinfer.capabilities.operation import MOST_SEQUENCES, Move
from pytest_roseinfer.oracle.pages import State, Written, padding_token
from pytest_roseinfer.words import some

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from pytest_roseinfer.capabilities.observation import Observation
    from pytest_roseinfer.capabilities.operation import Moves, Operation, Writer


class WriteMethods:
    """The methods that write more than a token of each sequence."""

    @optional
    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Begin a new sequence with a whole prompt."""

    @optional
    def reserve(self, seqs: Sequence[int], counts: Sequence[int]) -> object:
        """Make room for ``counts[i]`` more tokens of ``seqs[i]``, to be written later.

        What it returns is passed to ``fill``, which writes all of that room. Until then the
        sequences are left alone. A sequence that is to begin with blocks that a lookup found is
        begun by ``begin_with`` first.
        """

    @optional
    def fill(self, reservation: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the tokens that room was made for."""

    @optional
    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append ``counts[i]`` tokens to ``seqs[i]``; a sequence's tokens lie together."""

    @optional
    def append_padded(
        self, seqs: Sequence[int | None], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Append as ``append`` does, but for padding rows, whose sequence is None."""


@dataclass(slots=True)
class Reservations(State):
    """The tokens that count as stored, since there is room for them, but are not written yet."""

    any_of: ClassVar = ("reserve",)
    open: list[Written] = field(default_factory=list)

    def unwritten(self, seq: int) -> int:
        return sum(count for due in self.open for name, count in due.rows if name == seq)


def reservations(oracle: operation.Oracle) -> list[Written]:
    """Return the tokens of each open reservation, the oldest first."""
    state = oracle.state(Reservations)
    return state.open if state else []


@operation.register("Append")
class Append(operation.Write):
    """Append one token to each of some sequences, in this order; unseen names start empty."""

    seqs: tuple[int, ...]
    layout: str = "plain"

    def rows(self) -> operation.Rows:
        return [(seq, 1) for seq in self.seqs]

    def words(self) -> str:
        seqs = f"sequence{'s' * (len(self.seqs) != 1)} {', '.join(map(str, self.seqs))}"
        return f"append one token to {seqs}{self.laid_out()}"

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.append(self.seqs, cache.key, cache.value)

    def first(self, rows: int) -> operation.Operation:
        return Append(self.seqs[:rows], self.layout)

    def reversed(self) -> operation.Operation:
        return Append(self.seqs[::-1], self.layout)

    def halves(self) -> list[operation.Operation]:
        at = len(self.seqs) // 2
        return [Append(half, self.layout) for half in (self.seqs[:at], self.seqs[at:]) if half]

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> Append:
            live = len(writer.live)
            least, most = (0, int(live < operation.MOST_SEQUENCES)) if live else (1, 3)
            if live and writer.finds_prompts and writer.between(0, 1):
                most = 0
            return cls(writer.batch(writer.fresh(writer.between(least, most))), writer.layout())

        few = writer.finds_prompts and not writer.live
        yield operation.Move(0, 1 if few else 3, drawn)
        if writer.live:
            yield operation.Move(60, 3, lambda: cls(tuple(writer.live), writer.layout()))


@operation.register("AppendMany")
class AppendMany(operation.Write):
    """Append several tokens to each of some sequences."""

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    layout: str = "plain"

    needs = frozenset({"append_many"})

    def rows(self) -> operation.Rows:
        return list(zip(self.seqs, self.counts, strict=True))

    def first(self, rows: int) -> operation.Operation:
        return AppendMany(self.seqs[:rows], self.counts[:rows], self.layout)

    def words(self) -> str:
        each = ", ".join(f"{count} to sequence {seq}" for seq, count in self.rows())
        return f"append tokens: {each}{self.laid_out()}"

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.append_many(self.seqs, self.counts, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        yield operation.Move(10, 1, lambda: cls(*writer.rows(), writer.layout()))


@operation.register("AppendPadded")
class AppendPadded(operation.Write):
    """Append one token to each of some sequences, with padding rows where a sequence is None."""

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

    def words(self) -> str:
        rows = ["padding" if seq is None else str(seq) for seq in self.seqs]
        return f"append one token to rows {', '.join(rows)}{self.laid_out()}"

    def inputs(self, tokens: operation.Tokens) -> operation.Tokens:
        coming = iter(tokens)
        return [
            padding_token(row) if seq is None else next(coming) for row, seq in enumerate(self.seqs)
        ]

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.append_padded(self.seqs, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> AppendPadded:
            seqs: list[int | None] = list(writer.batch(writer.fresh(1)))
            for _ in range(writer.between(1, 3)):
                seqs.insert(writer.between(0, len(seqs)), None)
            return cls(tuple(seqs), writer.layout())

        yield operation.Move(20, 1, drawn)


@operation.register("Prefill")
class Prefill(operation.Write):
    """Begin a new sequence with a whole prompt."""

    seq: int
    count: int
    layout: str = "plain"

    needs = frozenset({"prefill"})

    def rows(self) -> operation.Rows:
        return [(self.seq, self.count)]

    def words(self) -> str:
        tokens = some(self.count, "token")
        return f"prefill sequence {self.seq} with {tokens}{self.laid_out()}"

    def begins(self) -> list[int]:
        return [self.seq]

    def drive(self, cache: operation.Driven) -> None:
        cache.adapter.prefill(self.seq, cache.key, cache.value)

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        def drawn() -> Prefill:
            seq = writer.beginner()
            return cls(seq, writer.count(seq), writer.layout())

        if len(writer.oracle.sequences) < operation.MOST_SEQUENCES:
            yield operation.Move(50, 3 if writer.finds_prompts else 2, drawn)


@operation.register("Reserve")
class Reserve(operation.Operation):
    """Reserve room for several tokens of some sequences, which a ``Fill`` writes later.

    The oracle takes them as stored from now on, and knows which are not written yet.
    """

    seqs: tuple[int, ...]
    counts: tuple[int, ...]
    layout: str = "plain"

    needs = frozenset({"reserve", "fill"})

    def rows(self) -> operation.Rows:
        return list(zip(self.seqs, self.counts, strict=True))

    def words(self) -> str:
        each = ", ".join(f"{count} of sequence {seq}" for seq, count in self.rows())
        return f"reserve room for tokens: {each}"

    def change(self, oracle: operation.Oracle) -> None:
        tokens = oracle.new_tokens(self.rows())
        written = Written(self.rows(), tokens, self.layout)
        oracle.begun(Reservations).open.append(written)
        oracle.append(self.rows(), tokens)

    def drive(self, cache: operation.Driven) -> None:
        handle = cache.adapter.reserve(self.seqs, self.counts)
        cache.reserved.append((handle, cache.options))

    def copies_blocks(self, oracle: operation.Oracle) -> bool:  # noqa: ARG002
        return True

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        yield operation.Move(30, 1, lambda: cls(*writer.rows(), writer.layout()))


@operation.register("Fill")
class Fill(operation.Operation):
    """Write the tokens of the oldest reservation that is still open."""

    needs = frozenset({"reserve", "fill"})

    def words(self) -> str:
        return "write the tokens that room was reserved for first"

    def possible(self, oracle: operation.Oracle) -> bool:
        return bool(reservations(oracle))

    def written(self, oracle: operation.Oracle) -> operation.Written:
        return reservations(oracle)[0]

    def change(self, oracle: operation.Oracle) -> None:
        due = reservations(oracle).pop(0)
        oracle.slide_written(due.rows)

    def drive(self, cache: operation.Driven) -> None:
        handle, cache.planned_with = cache.reserved.pop(0)
        try:
            cache.adapter.fill(handle, cache.key, cache.value)
        except Exception as error:
            if wrong := reservation(handle, error):
                raise wrong from error
            raise

    @classmethod
    def moves(cls, writer: operation.Writer) -> operation.Moves:
        if reservations(writer.oracle):
            yield operation.Move(40, 2, cls)


# Kinds of batches that show what a write of several rows does wrong, by what the rows find.


FEWEST_ROWS = 3
"""Rows of a batch that is counted; in a smaller one, the first and the last are all."""
MIXED_LENGTHS = "mixed lengths"
"""Sequences of different lengths."""
ONE_POSITION = "one position"
"""Rows that all begin at one position of their blocks, which hold more tokens than one."""
MIXED_POSITIONS = "mixed positions"
"""Rows that begin at different positions of their blocks."""
BOUNDARY = "boundary"
"""A row that fills its block, or begins one after the sequence's first."""
SHARED_TWICE = "shared twice"
"""A sequence with a block that two hold."""
LAST_SHARED = "last block shared"
"""A sequence whose last block two hold."""


def batch_kinds(oracle: operation.Oracle, rows: operation.Rows) -> Iterator[str]:
    """Yield the kinds of a batch of at least ``FEWEST_ROWS`` that is about to be appended."""
    size, lengths = oracle.block_size, [oracle.length(seq) for seq, _ in rows]
    if len({*lengths}) > 1:
        yield MIXED_LENGTHS
    if size > 1:
        yield ONE_POSITION if len({length % size for length in lengths}) == 1 else MIXED_POSITIONS
    if any(length and length % size in (0, size - 1) for length in lengths):
        yield BOUNDARY
    blocks = oracle.blocks()
    holders = [of_group for seq, _ in rows for of_group in blocks.holders_of(seq)]
    if any(2 in of_group for of_group in holders):
        yield SHARED_TWICE
    if any(of_group[-1:] == [2] for of_group in holders):
        yield LAST_SHARED


class BatchKinds(Observer):
    """Counts the batches of several rows that were stored, by their kinds."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.counts: Counter[str] = Counter()
        self._kinds: list[str] = []

    def before(self, step: Operation) -> Mapping[str, int]:
        rows = step.rows()
        counted = len(rows) >= FEWEST_ROWS and not step.in_parts
        self._kinds = [*batch_kinds(self.run.oracle, rows)] if counted else []
        return {}

    def after(self, seen: Observation) -> Mapping[str, int]:
        if seen.outcome.fits:
            self.counts.update(self._kinds)
        return {}


def start(writer: operation.Writer, length: int) -> None:
    """Begin a sequence, of its full length if the cache takes prompts."""
    (seq,) = writer.fresh(1)
    if "prefill" in writer.adapter.abilities:
        writer.take(Prefill(seq, length, writer.layout()))
        return
    for _ in range(min(length, 5)):
        writer.take(Append((seq,), writer.layout()))


def share_blocks(writer: operation.Writer) -> None:
    """Open with sequences of which some share blocks, or with none.

    Their last block is partial, full or begun, or there is one of each, so that a batch of
    all of them meets most conditions at once.
    """
    size = writer.oracle.block_size
    partial, full, begun = [size - 1 or 1], [size], [size + 1]
    mixed = sorted([*partial, *full, *begun])
    lengths = writer.pick(([], partial, full, begun, mixed, mixed))
    if not lengths:
        return
    for length in writer.shuffled(lengths):
        if not writer.over:
            start(writer, length)
    for _ in range(writer.between(1, 2)):
        if not writer.over:
            writer.take(Fork.of_any(writer))


# Steps that need every block that is left, so that what was given back or found is overwritten.


def floods(writer: Writer) -> Moves:
    """List a way to draw such a step, if any block is left."""
    free = writer.oracle.pages_free()

    def drawn() -> Operation:
        if "prefill" in writer.adapter.abilities:
            (seq,) = writer.fresh(1)
            return Prefill(seq, free * writer.oracle.block_size)
        return Append(writer.fresh(min(free, MOST_SEQUENCES)))

    if free:
        yield Move(110, 3, drawn)


def _fill(ranks: Ranks, handles: list[Any], key: torch.Tensor, value: torch.Tensor) -> None:
    heads = ranks.heads(key, value)
    ranks.each(lambda at, cache: cache.fill(handles[at], *heads[at]))


# Calls that must be refused.


@misuse("prefill")
def prefill_twice(at: Situation) -> Iterator[Call]:
    for seq in at.live[-1:]:
        call = partial(at.adapter.prefill, seq, at.tokens(1), at.tokens(1))
        yield "prefill of a sequence that has tokens", call


@misuse()
def append_twice(at: Situation) -> Iterator[Call]:
    for seq in at.live[-1:]:
        call = partial(at.adapter.append, [seq, seq], at.tokens(2), at.tokens(2))
        yield "append to one sequence twice", call


@misuse()
def append_of_another_shape(at: Situation) -> Iterator[Call]:
    new = at.tokens(2)
    call = partial(at.adapter.append, [NEVER, NEVER_EITHER], new, new[:, :, :0])
    yield "append of values without heads", call


@misuse()
def append_one_row_short(at: Situation) -> Iterator[Call]:
    new = at.tokens(2)
    call = partial(at.adapter.append, [NEVER, NEVER_EITHER], new, new[:, :1])
    yield "append of two keys and one value", call


@misuse()
def append_of_integers(at: Situation) -> Iterator[Call]:
    new = at.tokens(2).int()
    yield "append of integers", partial(at.adapter.append, [NEVER, NEVER_EITHER], new, new)


# Every step of a small history, and the steps of a large one.


def _walk(at: Walk) -> Iterator[Operation]:
    live = [*at.oracle.sequences]
    yield from (Append((seq,)) for seq in (*live, *at.names))
    if len(live) > 1:
        yield Append(tuple(live))
        yield Append(tuple(live[::-1]))


def _large(at: Large) -> Iterator[Operation]:
    """Append to all rows, one token or several, at once or where room was reserved.

    The last rows are new ones, and one with a full block.
    """
    first, *others = at.names
    new = range(at.fresh(), min(at.fresh() + 2, at.most_names))
    at.names = [*new[:1], *others, *new[1:], first]
    names, counts = tuple(at.names), _counts(at)
    yield Append(names)
    yield AppendMany(names[::-1], counts)
    yield AppendPadded((*names[:40], None, *names[40:], None))
    yield Reserve(names, counts[::-1])
    yield Fill()
    yield Append(names[:-1])


ONE_BY_ONE = 8
"""No sequence of a large history gets more tokens in steps that bring one."""


def _counts(at: Large) -> tuple[int, ...]:
    """Return a number of tokens for each row, up to a block and one, which it can get twice."""
    most = at.block_size + 1
    if longest := at.adapter.most_tokens:
        most = min(most, (longest - ONE_BY_ONE) // 2)
    return tuple(1 + row % most for row in range(len(at.names)))


def written(counts: Mapping[int, int], can: frozenset[str]) -> Iterator[Operation]:
    """Begin sequences with so many tokens, in as few steps as there can be."""
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
    preludes=(Prelude(("fork",), 30, share_blocks),),
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
        "append_many": Across.WRITE,
        "append_padded": Across.WRITE,
        "prefill": Across.WRITE,
        "reserve": Across.EACH,
        "fill": _fill,
    },
    states=(Reservations,),
    observers=(BatchKinds,),
    endings=lambda oracle: [Fill()] * len(reservations(oracle)),
    needs={"reserve": ("fill",), "fill": ("reserve",)},
    operations=(
        Append,
        AppendMany,
        AppendPadded,
        Prefill,
        Reserve,
        Fill,
    ),
)
