"""An operation, or an invariant, that registers itself is used: nothing else knows of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, given, seed
from hypothesis import settings as hypothesis_settings

from pytest_roseinfer import CacheSpec, Divergence, History, run_history
from pytest_roseinfer.capabilities.observation import INVARIANTS, Finding, invariant
from pytest_roseinfer.capabilities.operation import OPERATIONS, Move, Operation, register
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.histories.strategies import histories
from pytest_roseinfer.run.machine import Machine
from tests.plugin.caches.list_cache import ListCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pytest_roseinfer.capabilities.observation import Observation
    from pytest_roseinfer.capabilities.operation import Driven, Writer


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """What a test registers is gone after it."""
    operations, invariants = dict(OPERATIONS), list(INVARIANTS)
    yield
    OPERATIONS.clear()
    OPERATIONS.update(operations)
    INVARIANTS[:] = invariants


def new_operation() -> type[Operation]:
    @register
    class Forget(Operation):
        """Leave the cache alone."""

        seqs: tuple[int, ...]

        def words(self) -> str:
            return f"think of {self.seqs}"

        def drive(self, cache: Driven) -> None:
            cache.adapter.thoughts.append(self.seqs)

        @classmethod
        def moves(cls, writer: Writer) -> Iterable[Move]:
            if writer.live:
                yield Move(1, 2, lambda: cls(tuple(writer.live)))

    return Forget


class ThinkingCache(ListCache):
    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.thoughts: list[tuple[int, ...]] = []


def test_a_new_operation_is_drawn_driven_said_and_read_from_json() -> None:
    kind = new_operation()
    drawn: Counter[type[Operation]] = Counter()

    @seed(1)
    @hypothesis_settings(max_examples=20, deadline=None, database=None, phases=[Phase.generate])
    @given(histories(ThinkingCache))
    def run(history: History) -> None:
        drawn.update(map(type, history.operations))
        assert History.from_json(history.to_json()) == history
        assert ("think of" in history.words()) == any(
            isinstance(step, kind) for step in history.operations
        )
        machine = Machine(ThinkingCache, history)
        machine.run()
        thoughts = [step.seqs for step in history.operations if isinstance(step, kind)]  # type: ignore[attr-defined]
        assert machine.adapter.thoughts == thoughts  # type: ignore[attr-defined]

    run()
    assert drawn[kind] > 5


def test_a_new_invariant_is_judged_where_its_needs_are_met() -> None:
    def odd(seen: Observation) -> Finding | None:
        tokens = sum(map(seen.oracle.length, seen.oracle.sequences))
        return Finding("three is a crowd") if tokens == 3 else None

    def needy(_: Observation) -> Finding | None:
        raise AssertionError("a list has no ledger")

    invariant(rank=0)(odd)
    invariant(rank=0, needs=("ledger",))(needy)
    run_history(ListCache, History(CacheSpec(), (Append((0, 1)),)))
    with pytest.raises(Divergence, match="three is a crowd"):
        run_history(ListCache, History(CacheSpec(), (Append((0, 1)), Append((1,)))))
