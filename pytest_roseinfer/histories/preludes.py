"""The fixed first steps of drawn histories, their last steps, and repeated prefixes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.operation import MOST_SEQUENCES, Writer, take_while_they_fit
from pytest_roseinfer.capabilities.writes import Append, Prefill

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.texts import Texts

# The steps that bring back what is away at the end of a history.


def way_back(writer: Writer) -> Iterator[Operation]:
    """Yield steps, each to be done before the next, that make room as far as they can."""
    ways = [each.way_back for each in writer.adapter.capabilities if each.way_back]
    while steps := [step for way in ways for step in way(writer.oracle)]:
        fitting = [step for step in steps if step.fits(writer.oracle)]
        if fitting:
            yield fitting[0]
        elif writer.live and "free" in writer.adapter.abilities:
            yield Free(writer.live[-1])
        else:
            return


_ONE_BY_ONE = 4
"""Most tokens that a sequence gets one by one, where a cache takes no prompts."""


def append_in_batches(writer: Writer) -> None:
    """Open with batches of sequences at one position of their blocks, some with one elsewhere.

    Two of them share blocks, where a cache lets them. Drawn one by one, so many sequences hardly
    ever live at a time where prompts, and what is kept of them, take the blocks.
    """
    take_while_they_fit(writer, _append_in_batches(writer))


def _append_in_batches(writer: Writer) -> Iterator[Operation]:
    size, abilities = writer.oracle.block_size, writer.adapter.abilities
    length = writer.pick((2 * size - 1, 2 * size, size + writer.adapter.prefixes.recomputed_tokens))
    if Prefill.needs <= abilities:
        (first,) = writer.fresh(1)
        yield Prefill(first, length, writer.layout())
        yield _sharing_with(writer, first, length)
        third, other = writer.fresh(2)
        if length % size:  # less than a block, so that two hold those of the first
            yield Prefill(third, length % size, writer.layout())
        alike = [*dict.fromkeys([*writer.live, third])]
    else:
        length = min(length, _ONE_BY_ONE)
        seqs = writer.fresh(3)
        for _ in range(length):
            yield Append(seqs, writer.layout())
        if Fork.needs <= abilities:
            yield Fork.of_any(writer)
        alike, (other,) = writer.live, writer.fresh(1)
    begins_first = (length + 1) % size == 0  # else it would stand where the others do
    if not begins_first:
        yield _batch(writer, alike)
    for _ in range(4):
        yield _batch(writer, [*alike, other])
    if Free.needs <= abilities:
        yield Free(other)
    for _ in range(3 + begins_first):
        if Fork.needs <= abilities and len(writer.live) < MOST_SEQUENCES:
            (child,) = writer.fresh(1)
            yield Fork(writer.pick(alike), child)
            alike = [*alike, child]
        yield _batch(writer, alike)


def _sharing_with(writer: Writer, first: int, length: int) -> Operation:
    """Return a step that begins a sequence like the first, with its blocks if any are shared."""
    if Fork.needs <= writer.adapter.abilities and (
        not writer.finds_prompts or writer.between(0, 1)
    ):
        return Fork(first, *writer.fresh(1))
    second = writer.repeater(length) if writer.finds_prompts else writer.fresh(1)[0]
    return Prefill(second, length, writer.layout())


def _batch(writer: Writer, seqs: Sequence[int]) -> Append:
    return Append(tuple(writer.shuffled(seqs)), writer.layout())


def end_absences(writer: Writer) -> None:
    """Bring back all that is away, or none, or some on the way; free some on its way or not."""
    for step in islice(way_back(writer), writer.pick((0, None, 1, 2))):
        writer.take(step)
    may_free = writer.oracle.absent and Free.needs <= writer.adapter.abilities
    if may_free and writer.between(0, 1):
        writer.take(Free.of_away(writer))


# Draws how sequences begin that may find what was said before: under which name, and how far.


_MAY_FIND = 4
"""How often a name is listed under which something is in its namespace, and not in others alone."""
_PARTS = 3
"""How much more often one is whose text goes another way inside of what was said."""


@dataclass(slots=True)
class SaidBefore:
    """What the sequences of a history have said so far, each as far as any of them said it."""

    oracle: Oracle
    least: int
    """The fewest tokens that a cache finds again: a block, or one."""
    _longest: dict[int, int] = field(default_factory=dict)
    """How many tokens of each text were said."""

    @property
    def texts(self) -> Texts:
        assert self.oracle.texts
        return self.oracle.texts

    def note(self) -> None:
        """Take what the sequences say by now."""
        for seq in self.oracle.sequences:
            text, length = self.oracle.text_of(seq), self.oracle.length(seq)
            self._longest[text] = max(length, self._longest.get(text, 0))

    def names(self, new: int, vacant: Sequence[int]) -> list[int]:
        """List names under which a new sequence would begin as another did.

        Those from ``new`` on have a text each. Most often listed is one that may find something,
        and goes another way inside of what was said.
        """
        names = self._unused(new, vacant)
        return [name for name in names for _ in range(self._often(name))]

    def repeating(self, new: int, vacant: Sequence[int], tokens: int) -> list[int]:
        """List names under which a new sequence would say again what was said for so long."""
        return [name for name in self._unused(new, vacant) if self.again(name) >= tokens]

    def parting(self, new: int, vacant: Sequence[int], tokens: int) -> list[int]:
        """List names under which a new sequence would say something else before so many tokens."""
        return [name for name in self._unused(new, vacant) if self.again(name) < tokens]

    def _unused(self, new: int, vacant: Sequence[int]) -> list[int]:
        return [*range(new, new + len(self.texts.drawn)), *vacant]

    def _often(self, seq: int) -> int:
        common = self._common(seq)
        again = max(common.values(), default=0)
        if again < self.least:
            return 0
        space, own = self.texts.namespace, self.oracle.text_of(seq)
        within = any(common[text] >= self.least for text in common if space(text) == space(own))
        return (_MAY_FIND if within else 1) * (_PARTS if self._parts(seq) else 1)

    def _parts(self, seq: int) -> bool:
        """Return True for a text that goes another way inside of what was said, however near."""
        common = self._common(seq)
        again = max(common.values(), default=0)
        return all(again < self._longest[text] for text in common if common[text] == again)

    def again(self, seq: int) -> int:
        """Count the first tokens of a new sequence that were said before, in any namespace."""
        return max(self._common(seq).values(), default=0)

    def _common(self, seq: int) -> dict[int, int]:
        """Count the first tokens that a new sequence has in common with each text that was said."""
        own, owner = self.oracle.text_of(seq), self.texts.owner

        def common(text: int, said: int) -> int:
            return bisect_left(range(said), 1, key=lambda at: owner(own, at) != owner(text, at))

        return {text: common(text, said) for text, said in self._longest.items()}

    def lengths(self, seq: int) -> list[int]:
        """List lengths of a new sequence around the end of what was said, and of blocks there.

        One that goes another way there is longer than that.
        """
        size, again = self.oracle.block_size, self.again(seq)
        if again < self.least:
            return []
        last = again - again % size
        ends = {size, last, again, last + size}
        least = again + 1 if self._parts(seq) else 1
        near = {end + more for end in ends if end for more in (-1, 0, 1)}
        return sorted(length for length in near if length >= least)
