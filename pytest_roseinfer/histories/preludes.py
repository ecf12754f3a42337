"""Preludes of drawn histories, their last steps, and names whose texts repeat prefixes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities.forks import Fork
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.operation import MAX_SEQUENCES, Writer, add_while_fitting
from pytest_roseinfer.capabilities.writes import Append, Prefill

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.texts import Texts

# Absent sequences at the end of a history, and batches at its start


def end_absences_in_order(writer: Writer) -> Iterator[Operation]:
    """Yield steps that bring back absent sequences, and free live ones if there is no room.

    Each step must be applied before the next one is taken.
    """
    ways = [each.return_steps for each in writer.adapter.capabilities if each.return_steps]
    while steps := [step for way in ways for step in way(writer.oracle)]:
        fitting = [step for step in steps if step.fits(writer.oracle)]
        if fitting:
            yield fitting[0]
        elif writer.live and "free" in writer.adapter.abilities:
            yield Free(writer.live[-1])
        else:
            return


_ONE_BY_ONE = 4
"""Most tokens that a sequence gets one by one, for a cache without ``prefill``."""


def append_in_batches(writer: Writer) -> None:
    """Begin with batches of sequences at one position of a block; some add one elsewhere.

    Two of them share blocks, if the cache shares any. Random steps rarely keep this many sequences
    alive, since prompts and cached blocks fill the pool.
    """
    add_while_fitting(writer, _append_in_batches(writer))


def _append_in_batches(writer: Writer) -> Iterator[Operation]:
    size, abilities = writer.oracle.block_size, writer.adapter.abilities
    length = writer.pick((2 * size - 1, 2 * size, size + writer.adapter.prefixes.recomputed_tokens))
    if Prefill.needs <= abilities:
        (first,) = writer.fresh(1)
        yield Prefill(first, length, writer.layout())
        yield _sharing_with(writer, first, length)
        third, other = writer.fresh(2)
        if length % size:  # less than a block, so that the first's blocks keep exactly two holders
            yield Prefill(third, length % size, writer.layout())
        alike = [*dict.fromkeys([*writer.live, third])]
    else:
        length = min(length, _ONE_BY_ONE)
        seqs = writer.fresh(3)
        for _ in range(length):
            yield Append(seqs, writer.layout())
        if Fork.needs <= abilities:
            yield Fork.draw_for_any(writer)
        alike, (other,) = writer.live, writer.fresh(1)
    begins_first = (length + 1) % size == 0  # else it would be at the position of the others
    if not begins_first:
        yield _batch(writer, alike)
    for _ in range(4):
        yield _batch(writer, [*alike, other])
    if Free.needs <= abilities:
        yield Free(other)
    for _ in range(3 + begins_first):
        if Fork.needs <= abilities and len(writer.live) < MAX_SEQUENCES:
            (child,) = writer.fresh(1)
            yield Fork(writer.pick(alike), child)
            alike = [*alike, child]
        yield _batch(writer, alike)


def _sharing_with(writer: Writer, first: int, length: int) -> Operation:
    """Return a step that begins a copy of the first sequence, with its blocks if possible."""
    if Fork.needs <= writer.adapter.abilities and (
        not writer.reuses_prefixes or writer.between(0, 1)
    ):
        return Fork(first, *writer.fresh(1))
    second = writer.name_with_prefix(length) if writer.reuses_prefixes else writer.fresh(1)[0]
    return Prefill(second, length, writer.layout())


def _batch(writer: Writer, seqs: Sequence[int]) -> Append:
    return Append(tuple(writer.shuffle(seqs)), writer.layout())


def end_absences(writer: Writer) -> None:
    """Bring back all, some or no absent sequences; then free an absent one or not."""
    for step in islice(end_absences_in_order(writer), writer.pick((0, None, 1, 2))):
        writer.take(step)
    may_free = writer.oracle.absent and Free.needs <= writer.adapter.abilities
    if may_free and writer.between(0, 1):
        writer.take(Free.draw_for_absent(writer))


# Names and lengths of sequences that may reuse a prefix


_MATCHING_WEIGHT = 4
"""Weight of a name whose prefix was stored in the same namespace; 1 if only in others."""
_DIVERGING_WEIGHT = 3
"""Factor to the weight of a name whose text diverges within a stored text."""


@dataclass(slots=True)
class PrefixCandidates:
    """Texts that the sequences of a history have stored so far, each up to its longest prefix."""

    oracle: Oracle
    least: int
    """Fewest tokens that a lookup can find: a block, or one."""
    _longest: dict[int, int] = field(default_factory=dict)
    """Number of tokens stored so far, by text."""

    @property
    def texts(self) -> Texts:
        assert self.oracle.texts
        return self.oracle.texts

    def note(self) -> None:
        """Record the present lengths of all texts."""
        for seq in self.oracle.sequences:
            text, length = self.oracle.text_of(seq), self.oracle.length(seq)
            self._longest[text] = max(length, self._longest.get(text, 0))

    def names(self, new: int, vacant: Sequence[int]) -> list[int]:
        """List names whose text repeats a prefix, each as often as its weight.

        ``new`` and the names after it have one text each. A name has the highest weight if it may
        find a prefix in its namespace, and its text diverges within a stored text.
        """
        names = self._unused_texts(new, vacant)
        return [name for name in names for _ in range(self._listing_weight(name))]

    def names_with_prefix(
        self, new: int, vacant: Sequence[int], tokens: int, text: int | None = None
    ) -> list[int]:
        """List names whose text repeats ``tokens`` tokens or more of a stored text.

        Only of ``text``, unless it is None.
        """

        def length(name: int) -> int:
            if text is None:
                return self.common_prefix_length(name)
            return self._common(name).get(text, 0)

        return [name for name in self._unused_texts(new, vacant) if length(name) >= tokens]

    def names_without_prefix(self, new: int, vacant: Sequence[int], tokens: int) -> list[int]:
        """List names whose text differs from all stored ones within its first ``tokens`` tokens."""
        return [
            name
            for name in self._unused_texts(new, vacant)
            if self.common_prefix_length(name) < tokens
        ]

    def _unused_texts(self, new: int, vacant: Sequence[int]) -> list[int]:
        return [*range(new, new + len(self.texts.initial_branches)), *vacant]

    def _listing_weight(self, seq: int) -> int:
        common = self._common(seq)
        again = max(common.values(), default=0)
        if again < self.least:
            return 0
        space, own_text, last = self.texts.namespace, self.oracle.text_of(seq), self.least - 1
        within = any(
            common[text] >= self.least
            for text in common
            if space(text, last) == space(own_text, last)
        )
        return (_MATCHING_WEIGHT if within else 1) * (
            _DIVERGING_WEIGHT if self._diverges_inside(seq) else 1
        )

    def _diverges_inside(self, seq: int) -> bool:
        """Return True for a text that diverges before the end of each text closest to it."""
        common = self._common(seq)
        again = max(common.values(), default=0)
        return all(again < self._longest[text] for text in common if common[text] == again)

    def common_prefix_length(self, seq: int) -> int:
        """Count the first tokens of a new sequence that repeat a stored text of any namespace."""
        return max(self._common(seq).values(), default=0)

    def _common(self, seq: int) -> dict[int, int]:
        """Count the first tokens that a new sequence has in common with each stored text."""
        own_text, owner = self.oracle.text_of(seq), self.texts.owner

        def common(text: int, length: int) -> int:
            return bisect_left(
                range(length), 1, key=lambda at: owner(own_text, at) != owner(text, at)
            )

        return {text: common(text, length) for text, length in self._longest.items()}

    def lengths(self, seq: int) -> list[int]:
        """List lengths of a new sequence around the ends of its repeated prefix and nearby blocks.

        If its text diverges there, all are longer than the prefix.
        """
        size, again = self.oracle.block_size, self.common_prefix_length(seq)
        if again < self.least:
            return []
        last = again - again % size
        ends = {size, last, again, last + size}
        least = again + 1 if self._diverges_inside(seq) else 1
        near = {end + more for end in ends if end for more in (-1, 0, 1)}
        return sorted(length for length in near if length >= least)
