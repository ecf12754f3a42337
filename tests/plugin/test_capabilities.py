"""A capability of a user's own is one mixin and one object: all that is generic goes by them."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, History, Oracle, run_history
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.capabilities.capability import Capability, Observer, optional
from pytest_roseinfer.capabilities.observation import Finding, invariant
from pytest_roseinfer.capabilities.operation import Move, Operation, register
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.oracle.pages import State
from pytest_roseinfer.run.machine import Machine
from tests.plugin.caches.list_cache import ListCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_roseinfer.capabilities.observation import Observation
    from pytest_roseinfer.capabilities.operation import Driven, Writer


class MarkingMethods:
    """A capability that no shipped cache has."""

    marks: str = "sequences"

    @optional
    def mark(self, seqs: Sequence[int]) -> None:
        """Mark these sequences."""

    @optional
    def marked(self) -> Sequence[int]:
        """Return the sequences that were marked."""


@register("mark")
class Mark(Operation):
    seqs: tuple[int, ...]

    needs = frozenset({"mark"})

    def words(self) -> str:
        return f"mark sequences {self.seqs}"

    def drive(self, cache: Driven) -> None:
        cache.adapter.mark(self.seqs)

    @classmethod
    def moves(cls, writer: Writer) -> Iterable[Move]:
        if writer.live:
            yield Move(10, 2, lambda: cls(tuple(writer.live)))


@invariant(rank=0)
def three_is_a_crowd(seen: Observation) -> Finding | None:
    tokens = sum(map(seen.oracle.length, seen.oracle.sequences))
    return Finding("three is a crowd") if tokens == 3 else None


@invariant(rank=0, needs=("ledger",))
def never_due(_: Observation) -> Finding | None:
    raise AssertionError("a list has no ledger")


def refuse_marks(adapter: type[Any]) -> None:
    if adapter.marks != "sequences":
        raise TypeError(f"{adapter.__name__}.marks is {adapter.marks!r}: write 'sequences'")


class MarkedTwice(Observer):
    """Counts the steps that mark a sequence again."""

    any_of = ("mark",)
    conditions: ClassVar = {"marked_twice": "A sequence is marked that was marked before."}

    def before(self, step: Operation) -> Mapping[str, int]:
        again = isinstance(step, Mark) and {*step.seqs}.intersection(self.run.adapter.marked())
        return {"marked_twice": int(bool(again))}


MARKING = Capability(
    methods=MarkingMethods,
    needs={"mark": ("marked",)},
    operations=(Mark,),
    observers=(MarkedTwice,),
    refuse=(refuse_marks,),
)


class CrowdMethods:
    """A capability without a method, which judges."""


Capability(methods=CrowdMethods, invariants=(three_is_a_crowd, never_due))


class MarkingCache(MarkingMethods, ListCache):
    conditions = ("marked_twice",)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.those: list[tuple[int, ...]] = []

    def mark(self, seqs: Sequence[int]) -> None:
        self.those.append(tuple(seqs))

    def marked(self) -> Sequence[int]:
        return [seq for seqs in self.those for seq in seqs]


class CrowdedCache(CrowdMethods, ListCache):
    pass


def test_an_operation_is_drawn_driven_said_and_read_from_json() -> None:
    drawn: Counter[type[Operation]] = Counter()

    @seed(1)
    @hypothesis_settings(max_examples=20, deadline=None, database=None, phases=[Phase.generate])
    @given(histories(MarkingCache))
    def run(history: History) -> None:
        drawn.update(map(type, history.operations))
        assert History.from_json(history.to_json()) == history
        marks = [step.seqs for step in history.operations if isinstance(step, Mark)]
        assert ("mark sequences" in history.words()) == bool(marks)
        machine = Machine(MarkingCache, history)
        machine.run()
        adapter: Any = machine.adapter
        assert adapter.those == marks

    run()
    assert drawn[Mark] > 5
    assert Mark((0,)).to_json() == {"do": "mark", "seqs": (0,)}


def test_a_condition_is_counted_and_may_be_named() -> None:
    refuse_mistakes(MarkingCache)
    steps = Append((0, 1)), Mark((0,)), Mark((1,)), Mark((1, 0))
    counts = run_history(MarkingCache, History(CacheSpec(), steps))
    assert counts["marked_twice"] == 1

    class Unmarked(ListCache):
        conditions = ("marked_twice",)

    with pytest.raises(TypeError, match="conditions names 'marked_twice', which only path_counts"):
        refuse_mistakes(Unmarked)


def test_an_invariant_is_judged_where_its_needs_are_met() -> None:
    run_history(CrowdedCache, History(CacheSpec(), (Append((0, 1)),)))
    steps = Append((0, 1)), Append((1,))
    with pytest.raises(Divergence, match="three is a crowd"):
        run_history(CrowdedCache, History(CacheSpec(), steps))
    run_history(ListCache, History(CacheSpec(), steps))


def test_what_others_do_not_offer_is_none_of_theirs() -> None:
    assert MARKING in MarkingCache.capabilities
    assert MARKING not in ListCache.capabilities
    assert {"mark", "marked"} <= MarkingCache.abilities
    assert "mark" not in ListCache.optional


class MarksAlone(MarkingMethods, ListCache):
    def mark(self, seqs: Sequence[int]) -> None:
        pass


class MarksBlocks(MarkingCache):
    marks = "blocks"


class Misspells(MarkingMethods, ListCache):
    def marekd(self) -> None:
        pass


class TakesMore(MarkingCache):
    def mark(self, seqs: Sequence[int], how: str) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (MarksAlone, "MarksAlone defines mark and must then define marked too"),
        (MarksBlocks, "MarksBlocks.marks is 'blocks': write 'sequences'"),
        (Misspells, "Misspells has marekd, which nothing asks for: did you mean marked?"),
        (TakesMore, r"TakesMore.mark takes \(seqs, how\), and the harness calls mark\(seqs\)"),
    ],
)
def test_a_mistake_is_refused(adapter: type[ListCache], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        refuse_mistakes(adapter)


def test_what_is_not_offered_may_be_written_out() -> None:
    class Neither(MarkingMethods, ListCache):
        mark = MarkingMethods.mark

    refuse_mistakes(Neither)
    assert "mark" not in Neither.abilities


class KeepingMethods:
    """A capability whose caches let nobody write to a page that somebody has."""

    keeps_pages: bool = False


class KeptPages(State):
    where: ClassVar = {"keeps_pages": True}

    def keeps(self, seq: int, at: int) -> bool:  # noqa: ARG002
        return True


Capability(methods=KeepingMethods, states=(KeptPages,))


class KeepingCache(KeepingMethods, ListCache):
    keeps_pages = True


class LaxCache(KeepingMethods, ListCache):
    pass


@pytest.mark.parametrize(("adapter", "needed"), [(KeepingCache, 1), (LaxCache, 0), (ListCache, 0)])
def test_a_state_is_a_part_of_the_oracle(adapter: type[ListCache], needed: int) -> None:
    oracle = Oracle.of(adapter, CacheSpec())
    oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
    assert oracle.pages_needed([(0, 1)]) == needed
