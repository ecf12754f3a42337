"""Beams: sequences that take over each other's tokens at once, as after a step of beam search."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pytest_roseinfer.capabilities import operation
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    Prelude,
    RankPolicy,
    optional,
)
from pytest_roseinfer.capabilities.misuse import UNKNOWN_SEQ, Call, MisuseState, misuse
from pytest_roseinfer.capabilities.writes import Append, begin_sequence
from pytest_roseinfer.oracle.pages import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class BeamMethods:
    """Adapter method for beams."""

    @optional
    def reorder(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        """Replace the tokens of each ``seqs[i]`` by those of ``sources[i]``, as after beam search.

        All sequences change at once, or none does. Each source is one of ``seqs``, and may be the
        sequence itself. Where several sequences have one source, one of them takes over its blocks
        (the source itself, or else the first), and the others become forks of it. The tokens of a
        sequence that is no source are dropped, and their blocks are free before a fork is copied.
        """


@operation.register("Reorder")
class Reorder(operation.Operation):
    """Give each of these sequences the tokens of one of them."""

    seqs: tuple[int, ...]
    sources: tuple[int, ...]

    needs = frozenset({"reorder"})
    needs_tokens = True

    def moves(self) -> list[tuple[int, int]]:
        return list(zip(self.seqs, self.sources, strict=True))

    def describe(self) -> str:
        each = ", ".join(f"{seq} those of {source}" for seq, source in self.moves())
        return f"reorder tokens; these sequences get: {each}"

    def uses(self) -> list[int]:
        return list(self.seqs)

    def changed_seqs(self) -> list[int]:
        return list(self.seqs)

    def possible(self, oracle: operation.Oracle) -> bool:
        names = {*self.seqs}
        valid = len(names) == len(self.seqs) and names >= {*self.sources}
        return valid and operation.Operation.possible(self, oracle)

    def dropped(self) -> list[int]:
        """List the sequences whose tokens nobody gets."""
        return [seq for seq in self.seqs if seq not in self.sources]

    def heirs(self) -> dict[int, int]:
        """Return the sequence that takes over the blocks of each source."""
        heirs: dict[int, int] = {}
        for seq, source in self.moves():
            if seq == source or source not in heirs:
                heirs[source] = seq
        return heirs

    def copies(self) -> list[tuple[int, int]]:
        """List the moves that are as forks."""
        heirs = self.heirs()
        return [(seq, source) for seq, source in self.moves() if heirs[source] != seq]

    def forked_seqs(self) -> list[int]:
        return [source for _, source in self.copies()]

    def fits(self, oracle: operation.Oracle) -> bool:
        blocks = oracle.block_counts()
        for seq in self.dropped():
            blocks.truncate(seq, 0)
        return all(blocks.fork(source) for _, source in self.copies())

    def change(self, oracle: operation.Oracle) -> None:
        texts = {source: oracle.text_of(source) for source in self.sources if oracle.texts}
        moved = {source: heir for source, heir in self.heirs().items() if source != heir}
        for seq in self.dropped():
            oracle.release_pages(seq)
        for source in moved:
            oracle.rename(source, _aside(source))
        for source, heir in moved.items():
            oracle.rename(_aside(source), heir)
            oracle.lives[heir] += 1
            if oracle.texts:
                oracle.texts.assign(heir, texts[source])
        for seq, source in self.copies():
            oracle.fork(self.heirs()[source], seq)
            oracle.lives[seq] += 1

    def drive(self, cache: operation.CacheUnderTest) -> None:
        cache.adapter.reorder(self.seqs, self.sources)

    def copies_blocks(self, oracle: operation.Oracle) -> bool:
        return oracle.fork_shares != "blocks"

    @classmethod
    def draw_options(cls, writer: operation.Writer) -> operation.DrawOptions:
        if len(writer.filled) > 1:
            yield operation.DrawOption(145, 4, lambda: _draw_reorder(writer))


def _aside(seq: int) -> int:
    """Return a name for a sequence while others are renamed; no sequence of a history has it."""
    return -NAMES - seq


# Drawing


def _draw_reorder(writer: operation.Writer) -> Reorder:
    """Draw an order of some sequences, or a source for each of them."""
    filled = writer.filled
    seqs = writer.shuffle(filled)[: writer.between(2, len(filled))]
    if writer.between(0, 2):
        return Reorder(tuple(seqs), tuple(writer.pick(seqs) for _ in seqs))
    return Reorder(tuple(seqs), tuple(writer.shuffle(seqs)))


def search_beams(writer: operation.Writer) -> None:
    """Open with steps of beam search; or add no steps.

    The beams have lengths of their own, so that it shows if one keeps its length.
    """
    if not writer.live and writer.pick((True, False)):
        operation.add_while_fitting(writer, _search_beams(writer))


def _search_beams(writer: operation.Writer) -> Iterator[operation.Operation]:
    size = writer.oracle.block_size
    for _ in range(writer.between(2, 3)):
        if not writer.no_more_steps:
            begin_sequence(writer, writer.pick((size + 1, 1, size, 2 * size - 1)))
    for _ in range(2):
        if len(writer.filled) > 1:
            yield _draw_reorder(writer)
            yield Append(tuple(writer.filled), writer.layout())


# Conditions


class BeamConditions(Observer):
    """Counter of reorders that a cache may handle wrongly."""

    any_of = ("reorder",)
    conditions: ClassVar = {
        "beam_taken_twice": "Several sequences get the tokens of one source by ``reorder``; "
        "counted for each source. Required of a cache that defines ``reorder``.",
        "beams_exchanged": "A sequence whose tokens others get by ``reorder`` gets those of one "
        "that also gets others. Required of the same caches.",
        "beam_dropped": "No sequence gets the tokens of a sequence that ``reorder`` changes. "
        "Required of the same caches.",
    }

    def before(self, step: operation.Operation) -> Mapping[str, int]:
        if not (isinstance(step, Reorder) and step.fits(self.run.oracle)):
            return {}
        taken = Counter(step.sources)
        sources = dict(step.moves())
        exchanged = [seq for seq, source in step.moves() if seq != source and seq in taken]
        return {
            "beam_taken_twice": sum(times > 1 for times in taken.values()),
            "beams_exchanged": sum(sources[sources[seq]] != sources[seq] for seq in exchanged),
            "beam_dropped": len(step.dropped()),
        }


# Bad calls


@misuse("reorder")
def reorder_unknown(at: MisuseState) -> Iterator[Call]:
    for seq in at.live[-1:]:
        call = partial(at.adapter.reorder, [seq], [UNKNOWN_SEQ])
        yield "reorder with a source that never was", call


BEAMS = Capability(
    methods=BeamMethods,
    preludes=(Prelude(("reorder",), 7, search_beams),),
    misuse=(reorder_unknown,),
    sharded={"reorder": RankPolicy.SAME},
    observers=(BeamConditions,),
    operations=(Reorder,),
)
