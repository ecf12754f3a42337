"""A capability of a user's own is one mixin and one object: all that is generic goes by them.

Pins are such a capability, whole in this file: a pin holds the blocks of a sequence, whatever
becomes of the sequence.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest

from pytest_roseinfer import (
    CacheSpec,
    Divergence,
    History,
    Oracle,
    conformance,
    run_history,
    settings,
)
from pytest_roseinfer.adapters.validation import refuse_mistakes
from pytest_roseinfer.capabilities.capability import Capability, Observer, Traits, optional
from pytest_roseinfer.capabilities.freeing import Free
from pytest_roseinfer.capabilities.observation import Finding, invariant, location_of_block
from pytest_roseinfer.capabilities.operation import MOST_SEQUENCES, DrawOption, Operation, register
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.oracle.pages import Absence, State
from pytest_roseinfer.plugin import reference
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import HistoryRunner
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.truncating_caches import CutCache
from tests.histories.drawn import drawn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_roseinfer.capabilities.observation import Observation
    from pytest_roseinfer.capabilities.operation import CacheUnderTest, Writer


# Pins: a method, a trait, a part of the oracle, an operation, an invariant and a condition.


@dataclass(frozen=True)
class PinTraits(Traits):
    """Blocks that a pin holds."""

    covers: Literal["all blocks", "full blocks"] = "all blocks"
    """Blocks of the sequence that a pin holds: all, or only those that are full."""


class PinMethods:
    """The method that pins the blocks of a sequence."""

    pins: ClassVar[PinTraits] = PinTraits()
    """Blocks that a pin holds."""

    @optional
    def pin(self, seq: int, pin: int) -> None:
        """Hold the blocks of a sequence under the name ``pin``, until that is freed.

        A pin reads back as the sequence did, and has a ``table``. Nobody appends to it.
        """


@dataclass(slots=True)
class Pinned(State):
    """The pins, which exist as sequences that no step uses but ``Free``."""

    any_of: ClassVar = ("pin",)
    covers: str = "all blocks"
    pins: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, adapter: type[PinningCache]) -> Pinned:
        return cls(adapter.pins.covers)

    @property
    def absent(self) -> Mapping[int, Absence]:
        return {pin: Absence("pinned", []) for pin in self.pins}

    def on_free(self, seq: int) -> None:
        self.pins.discard(seq)


def pinned(oracle: Oracle) -> Pinned:
    return oracle.ensure_state(Pinned)


@register("Pin")
class Pin(Operation):
    """Hold the blocks of a sequence under a name of their own."""

    seq: int
    child: int

    needs = frozenset({"pin"})
    needs_tokens = True

    def describe(self) -> str:
        return f"pin the blocks of sequence {self.seq} as {self.child}"

    def uses(self) -> list[int]:
        return [self.seq]

    def new_seqs(self) -> list[int]:
        return [self.child]

    def changed_seqs(self) -> list[int]:
        return [self.child]

    def change(self, oracle: Oracle) -> None:
        state, pages = pinned(oracle), oracle.sequences[self.seq]
        if state.covers == "full blocks":
            pages = pages[: oracle.length(self.seq) // oracle.block_size]
        elif unseen := oracle.truncated_on_last[self.seq]:
            oracle.truncated_on_last[self.child] = unseen
        for page in pages:
            page.holders += 1
        oracle.sequences[self.child] = list(pages)
        state.pins.add(self.child)

    def drive(self, cache: CacheUnderTest) -> None:
        cache.adapter.pin(self.seq, self.child)

    @classmethod
    def draw_options(cls, writer: Writer) -> Iterable[DrawOption]:
        if writer.filled and len(writer.oracle.sequences) < MOST_SEQUENCES:
            yield DrawOption(75, 4, lambda: cls(writer.pick(writer.filled), *writer.fresh(1)))


@invariant(rank=5, needs=("pin", "ledger"))
def pins_hold(seen: Observation) -> Finding | None:
    """Pinned blocks must not be free."""
    for layer in range(seen.spec.num_layers):
        free = {*seen.after.ledger(layer).free}
        for pin in pinned(seen.oracle).pins:
            if gone := free.intersection(seen.after.tables_of(layer)[pin]):
                where = location_of_block(seen, layer, min(gone))
                return Finding(f"layer {layer}: block {where.block} is pinned as {pin}, and free")
    return None


class OutlivingPins(Observer):
    """Counts the sequences that are freed while a pin holds their blocks."""

    any_of = ("pin",)
    conditions: ClassVar = {"pin_outlives": "A sequence is freed while a pin holds its blocks."}

    def before(self, step: Operation) -> Mapping[str, int]:
        oracle = self.run.oracle
        pins = pinned(oracle).pins
        if not isinstance(step, Free) or step.seq in pins:
            return {}
        held = [page for pin in pins for page in oracle.sequences[pin]]
        return {"pin_outlives": int(any(page in held for page in oracle.sequences[step.seq]))}


PINS = Capability(
    methods=PinMethods,
    needs={"pin": ("free", "table")},
    states=(Pinned,),
    operations=(Pin,),
    invariants=(pins_hold,),
    observers=(OutlivingPins,),
)


# Caches with pins: two that are right, and ways to get that wrong.


class PinningCache(PinMethods, CutCache):
    """A pin is one more holder of each block."""

    conditions = ("pin_outlives",)

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.pinned: set[int] = set()

    def pin(self, seq: int, pin: int) -> None:
        self.fork(seq, pin)
        self.pinned.add(pin)

    def free(self, seq: int) -> None:
        super().free(seq)
        self.pinned.discard(seq)


class PinningFullBlocks(PinningCache):
    """A partial block is left out."""

    pins = PinTraits(covers="full blocks")

    def pin(self, seq: int, pin: int) -> None:
        super().pin(seq, pin)
        self.truncate(pin, self.lengths[pin] - self.lengths[pin] % self.spec.block_size)


class LosesPins(PinningCache):
    """A sequence that is freed takes the pins of its blocks with it."""

    def free(self, seq: int) -> None:
        blocks, is_pin = self.tables[seq], seq in self.pinned
        super().free(seq)
        if not is_pin:
            for pin in self.pinned:
                self.drop(block for block in self.tables[pin] if block in blocks)


class EvictsPinnedBlocks(PinningCache):
    """Where no block is free, one is taken that only a pin holds."""

    def take(self) -> int:
        held = (block for pin in self.pinned for block in self.tables[pin])
        alone = (block for block in held if self.holders[block] == 1)
        return super().take() if self.unused else next(alone, None) or super().take()


class PinsAPartialBlock(PinningCache):
    """A pin that must leave out a partial block holds it."""

    pins = PinTraits(covers="full blocks")


@pytest.mark.parametrize("adapter", [PinningCache, PinningFullBlocks])
@pytest.mark.usefixtures("short_run")
def test_a_right_cache_passes_and_meets_the_condition(adapter: type[PinningCache]) -> None:
    settings.set_current(settings.Settings(examples=40, seed=1))
    tests = conformance(adapter)()
    for name in filter(lambda name: "option" not in name, tests.shipped()):  # it has no switches
        getattr(tests, name)()
    (target,) = coverage.current().targets.values()
    assert target.counts["pin_outlives"] >= 3
    assert target.invariant_checks["pins_hold"] > 100


@pytest.mark.parametrize(
    ("adapter", "what", "steps"),
    [
        (
            LosesPins,
            "layer 0: block 1 is pinned as 1, and free",
            [
                "append one token to sequence 0",
                "pin the blocks of sequence 0 as 1",
                "free sequence 0",
            ],
        ),
        (
            EvictsPinnedBlocks,
            "accepted a write that does not fit (2 blocks needed, 1 free)",
            [
                "append one token to sequence 0",
                "pin the blocks of sequence 0 as 1",
                "append one token to sequences 0, 2",
            ],
        ),
        (
            PinsAPartialBlock,
            "peek: sequence 1, layer 0, K: expected shape [0, 1, 1], found [1, 1, 1]",
            ["append one token to sequence 0", "pin the blocks of sequence 0 as 1"],
        ),
    ],
)
@pytest.mark.usefixtures("short_run")
def test_a_broken_cache_is_found_and_its_history_is_small(
    adapter: type[PinningCache], what: str, steps: list[str]
) -> None:
    settings.set_current(settings.Settings(examples=60, seed=1, failures_dir=None))
    tests = conformance(adapter)()
    with pytest.raises(Divergence) as failure:
        getattr(tests, next(iter(tests.shipped())))()
    assert failure.value.what == what
    assert [step.describe() for step in failure.value.history.operations] == steps
    assert "sequence 1 is pinned" in str(failure.value)


def test_an_operation_is_drawn_driven_said_and_read_from_json() -> None:
    every: list[Pin] = []

    def check(history: History) -> None:
        assert History.from_json(history.to_json()) == history
        pins = [step for step in history.operations if isinstance(step, Pin)]
        assert ("pin the blocks" in history.describe()) == bool(pins)
        machine = HistoryRunner(PinningCache, history)
        machine.run()
        freed = {step.seq for step in history.operations if isinstance(step, Free)}
        adapter: Any = machine.adapter
        assert adapter.pinned >= {step.child for step in pins} - freed
        every.extend(pins)

    drawn(PinningCache, 20, 1, check)
    assert len(every) > 5
    assert Pin(0, 1).to_json() == {"do": "Pin", "seq": 0, "child": 1}


def test_a_condition_is_counted_and_may_be_named() -> None:
    refuse_mistakes(PinningCache)
    steps = Append((0, 1)), Pin(0, 2), Free(1), Free(0), Free(2)
    assert run_history(PinningCache, History(CacheSpec(), steps))["pin_outlives"] == 1

    class Unpinned(ListCache):
        conditions = ("pin_outlives",)

    with pytest.raises(TypeError, match="conditions names 'pin_outlives', which only path_counts"):
        refuse_mistakes(Unpinned)


def test_a_run_does_not_hold_its_cache() -> None:
    run = HistoryRunner(PinningCache, History(CacheSpec(), (Append((0,)),)))
    assert run.observers
    cache = weakref.ref(run.adapter)
    del run
    assert cache() is None


def test_a_reference_is_generated_for_it() -> None:
    lists, shipped = reference.sections(PinningCache), reference.sections(CutCache)
    added = {name: _added(lists[name], shipped[name]) for name in lists}
    assert added == {
        "capabilities": """
- `test_capability`: A capability of a user's own is one mixin and one object: all that is generic
  goes by them.
""",
        "methods": """
- `pin(seq, pin)` (needs `free`, `table`): Hold the blocks of a sequence under the name `pin`, until
  that is freed. A pin reads back as the sequence did, and has a `table`. Nobody appends to it.
""",
        "attributes": """
- `pins` (default `PinTraits()`): Blocks that a pin holds.
  - `covers` (default `"all blocks"`; else `"full blocks"`): Blocks of the sequence that a pin
    holds: all, or only those that are full.
""",
        "operations": """
- `Pin` (needs `pin`): Hold the blocks of a sequence under a name of their own.
""",
        "conditions": """
- `pin_outlives`: A sequence is freed while a pin holds its blocks.
""",
        "invariants": """
- `pins_hold` (needs `ledger`, `pin`): Pinned blocks must not be free.
""",
    }


def _added(longer: str, shorter: str) -> str:
    """Return the lines of one list that another one does not have."""
    own = [line for line in longer.splitlines() if line not in shorter.splitlines()]
    return "\n".join(["", *own, ""]) if own else ""


def test_what_others_do_not_offer_is_none_of_theirs() -> None:
    assert PINS in PinningCache.capabilities
    assert PINS not in CutCache.capabilities
    assert "pin" in PinningCache.abilities
    assert "pin" not in CutCache.optional


class PinsAlone(PinMethods, ListCache):
    def pin(self, seq: int, pin: int) -> None:
        pass


class PinsBlocks(PinningCache):
    pins = "blocks"  # type: ignore[assignment]


class Misspells(PinMethods, ListCache):
    def pni(self, seq: int, pin: int) -> None:
        pass


class TakesMore(PinningCache):
    def pin(self, seq: int, pin: int, how: str) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (PinsAlone, "PinsAlone defines pin and must then define free, table too"),
        (PinsBlocks, r"PinsBlocks.pins is 'blocks': write PinTraits\(...\)"),
        (Misspells, "Misspells has pni, which the harness does not use: did you mean pin?"),
        (
            TakesMore,
            r"TakesMore.pin takes \(seq, pin, how\), and the harness calls pin\(seq, pin\)",
        ),
    ],
)
def test_a_mistake_is_refused(adapter: type[ListCache], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        refuse_mistakes(adapter)


def test_a_choice_that_there_is_not_is_refused() -> None:
    wrong: Any = "no blocks"
    with pytest.raises(TypeError, match="covers is 'no blocks'; choose one of 'all blocks', 'full"):
        PinTraits(covers=wrong)


def test_what_is_not_offered_may_be_written_out() -> None:
    class Neither(PinMethods, ListCache):
        pin = PinMethods.pin

    refuse_mistakes(Neither)
    assert "pin" not in Neither.abilities


# Capabilities that have a judgement, or a part of the oracle, and nothing else.


@invariant(rank=0)
def three_is_a_crowd(seen: Observation) -> Finding | None:
    """No three tokens may be stored."""
    tokens = sum(map(seen.oracle.length, seen.oracle.sequences))
    return Finding("three is a crowd") if tokens == 3 else None


@invariant(rank=0, needs=("ledger",))
def never_due(_: Observation) -> Finding | None:
    """A list has no ledger."""
    raise AssertionError("a list has no ledger")


class CrowdMethods:
    """A capability without a method, which judges."""


Capability(methods=CrowdMethods, invariants=(three_is_a_crowd, never_due))


class CrowdedCache(CrowdMethods, ListCache):
    pass


def test_an_invariant_is_judged_where_its_needs_are_met() -> None:
    run_history(CrowdedCache, History(CacheSpec(), (Append((0, 1)),)))
    steps = Append((0, 1)), Append((1,))
    with pytest.raises(Divergence, match="three is a crowd"):
        run_history(CrowdedCache, History(CacheSpec(), steps))
    run_history(ListCache, History(CacheSpec(), steps))


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
