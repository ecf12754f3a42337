"""How drawn histories begin, and how they end where sequences are away."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

from hypothesis import strategies as st

from pytest_roseinfer.cases.operations.lookups.look_up import LookUp
from pytest_roseinfer.cases.operations.operation import Writer
from pytest_roseinfer.cases.operations.sequences.fork import Fork
from pytest_roseinfer.cases.operations.sequences.free import Free
from pytest_roseinfer.cases.operations.sequences.truncate import Truncate
from pytest_roseinfer.cases.operations.writes.append import Append
from pytest_roseinfer.cases.operations.writes.prefill import Prefill
from pytest_roseinfer.cases.way_back import way_back

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.cases.operations.operation import Operation


class Opened(Writer, Protocol):
    """A history that is being drawn."""

    draw: st.DrawFn
    over: bool
    """No step may follow."""

    def take(self, step: Operation) -> None:
        """Add a step."""

    def repeater(self, tokens: int) -> int:
        """Draw a name that no sequence has, and that says again what was said for so long."""

    def parting(self, tokens: int) -> int | None:
        """Draw one that says something else before so many tokens, or None where none does."""


def share_blocks(writer: Opened) -> None:
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
    for length in writer.draw(st.permutations(lengths)):
        if not writer.over:
            start(writer, length)
    for _ in range(writer.between(1, 2)):
        if not writer.over:
            writer.take(Fork.of_any(writer))


def leave_a_text(writer: Opened) -> None:
    """Open with a text that was stored and given up, and perhaps comes again, or with none."""
    # Inside of two blocks there are more places where another text may go another way. Where
    # sequences fork, the room is for what they share.
    comes_again = writer.finds_prompts and "fork" not in writer.adapter.abilities
    blocks = writer.pick((1, 0, 2, 2) if comes_again else (1, 0, 2))
    tokens = min(blocks, writer.oracle.capacity) * writer.oracle.block_size
    if tokens and "free" in writer.adapter.abilities:
        start(writer, tokens)
        writer.take(Free(*writer.live))
        if LookUp.needs <= writer.adapter.abilities and writer.between(0, 1):
            writer.take(LookUp(writer.beginner(), tokens))
        elif comes_again:
            _come_again(writer)


def _come_again(writer: Opened) -> None:
    """Begin with what was left, if there is room; or take all blocks but one; or do nothing."""
    which = writer.between(0, 3)
    if which > 1:
        seq = writer.beginner()
        step = Prefill(seq, writer.count(seq), writer.layout())
        if step.fits(writer.oracle):
            writer.take(step)
    elif which and (others := writer.oracle.pages_free() - 1):
        (seq,) = writer.fresh(1)
        writer.take(Prefill(seq, others * writer.oracle.block_size, writer.layout()))


def may_cut_what_is_found(writer: Opened) -> bool:
    """Return True if a cache may find a block of which its holders may keep a part."""
    parts, needed = writer.oracle.block_size > 1, Truncate.needs | Free.needs
    return writer.finds_prompts and parts and needed <= writer.adapter.abilities


def cut_what_is_found(writer: Opened) -> None:
    """Open with two who hold a full block: one is cut in it and writes, the other lets go of it.

    Who then says what it held must not find what was written. Drawn one by one, these steps hardly
    ever follow each other.
    """
    _take_while_they_fit(writer, _cut_what_is_found(writer))


def _take_while_they_fit(writer: Opened, steps: Iterator[Operation]) -> None:
    for step in steps:
        if writer.over or not step.fits(writer.oracle):
            return
        writer.take(step)


def _cut_what_is_found(writer: Opened) -> Iterator[Operation]:
    size, leaves = writer.oracle.block_size, writer.adapter.match_leaves
    full = writer.pick((1, 2) if writer.oracle.capacity > 3 else (1,)) * size
    (first,) = writer.fresh(1)
    yield Prefill(first, full + leaves, writer.layout())
    second = writer.repeater(full + leaves)
    yield Prefill(second, full + leaves, writer.layout())
    cut, other = writer.draw(st.permutations((first, second)))
    yield Truncate(cut, writer.between(full - size + 1, full - 1))
    write, let_go = Append((cut,), writer.layout()), Free(other)
    yield from writer.pick(((let_go, write), (let_go, write), (write, let_go)))
    yield Prefill(writer.repeater(full + leaves), full + leaves, writer.layout())


def may_evict_in_order(writer: Opened) -> bool:
    """Return True if a cache says which of the blocks that it keeps it gives to others first."""
    abilities, needed = writer.adapter.abilities, Free.needs | Prefill.needs
    return writer.finds_prompts and writer.adapter.evicts != "any" and needed <= abilities


def let_two_texts_go(writer: Opened) -> None:
    """Open with two texts that part in their first block, let go of them, and need one block more.

    One of the two blocks must be given to others then, and it is known which.
    """
    _take_while_they_fit(writer, _let_two_texts_go(writer))


def _let_two_texts_go(writer: Opened) -> Iterator[Operation]:
    size, leaves = writer.oracle.block_size, writer.adapter.match_leaves
    (first,) = writer.fresh(1)
    yield Prefill(first, size + leaves, writer.layout())
    second = writer.parting(size)
    if second is None:
        return
    yield Prefill(second, size + leaves, writer.layout())
    for seq in writer.draw(st.permutations((first, second))):
        yield Free(seq)
    (third,) = writer.fresh(1)
    if others := writer.oracle.pages_free() - 1:
        yield Prefill(third, others * size, writer.layout())


def free_in_flight(writer: Opened) -> None:
    """Open with a sequence that is freed while the device writes to it, or with none."""
    written = writer.pick((0, 1, 2))
    if written and "free" in writer.adapter.abilities:
        (seq,) = writer.fresh(1)
        for _ in range(written):
            writer.take(Append((seq,), writer.layout()))
        writer.take(Free(seq))
        start(writer, writer.pick((1, writer.oracle.block_size)))


def start(writer: Opened, length: int) -> None:
    """Begin a sequence, of its full length if the cache takes prompts."""
    (seq,) = writer.fresh(1)
    if "prefill" in writer.adapter.abilities:
        writer.take(Prefill(seq, length, writer.layout()))
        return
    for _ in range(min(length, 5)):
        writer.take(Append((seq,), writer.layout()))


def end_absences(writer: Opened) -> None:
    """Bring back all that is away, or none, or some on the way; free some on its way or not."""
    for step in islice(way_back(writer), writer.pick((0, None, 1, 2))):
        writer.take(step)
    may_free = writer.oracle.away.stages and Free.needs <= writer.adapter.abilities
    if may_free and writer.between(0, 1):
        writer.take(Free.of_away(writer))
