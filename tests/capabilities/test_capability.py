"""A capability defined by a user: one mixin and one object, which generic code reads.

Pins are such a capability, whole in this file: a pin holds the blocks of a sequence, even after
the sequence is freed.
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
from pytest_roseinfer.capabilities.operation import MAX_SEQUENCES, DrawOption, Operation, register
from pytest_roseinfer.capabilities.writes import Append
from pytest_roseinfer.oracle.pages import Absence, State
from pytest_roseinfer.plugin import reference
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.machine import HistoryRunner
from tests.capabilities.caches.list_cache import ListCache
from tests.capabilities.caches.truncating_caches import CutCache
from tests.histories.drawn_histories import check_drawn_histories

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

        A pin reads back as the sequence did, and has a ``table``. It is never appended to.
        """


@dataclass(slots=True)
class Pinned(State):
    """The pins, which exist as sequences that only ``Free`` uses."""

    any_of: ClassVar = ("pin",)
    covers: str = "all blocks"
    pins: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, adapter: type[PinningCache], spec: object) -> Pinned:  # noqa: ARG003
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
        elif truncated := oracle.truncated_on_last[self.seq]:
            oracle.truncated_on_last[self.child] = truncated
        for page in pages:
            page.holders += 1
        oracle.sequences[self.child] = list(pages)
        state.pins.add(self.child)

    def drive(self, cache: CacheUnderTest) -> None:
        cache.adapter.pin(self.seq, self.child)

    @classmethod
    def draw_options(cls, writer: Writer) -> Iterable[DrawOption]:
        if writer.filled and len(writer.oracle.sequences) < MAX_SEQUENCES:
            yield DrawOption(75, 4, lambda: cls(writer.pick(writer.filled), *writer.fresh(1)))


@invariant(rank=5, needs=("pin", "ledger"))
def pins_hold(observation: Observation) -> Finding | None:
    """Pinned blocks must not be free."""
    for layer in range(observation.spec.num_layers):
        free = {*observation.after.ledger(layer).free}
        for pin in pinned(observation.oracle).pins:
            if freed_blocks := free.intersection(observation.after.tables_of(layer)[pin]):
                location = location_of_block(observation, layer, min(freed_blocks))
                return Finding(
                    f"layer {layer}: block {location.block} is pinned as {pin}, and free"
                )
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


# Caches with pins: two right ones, and broken ones.


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
    """Pins full blocks only."""

    pins = PinTraits(covers="full blocks")

    def pin(self, seq: int, pin: int) -> None:
        super().pin(seq, pin)
        self.truncate(pin, self.lengths[pin] - self.lengths[pin] % self.spec.block_size)


class LosesPins(PinningCache):
    """Frees the pinned blocks of a sequence together with the sequence."""

    def free(self, seq: int) -> None:
        blocks, is_pin = self.tables[seq], seq in self.pinned
        super().free(seq)
        if not is_pin:
            for pin in self.pinned:
                self.drop(block for block in self.tables[pin] if block in blocks)


class EvictsPinnedBlocks(PinningCache):
    """Takes a block that only a pin holds where no block is free."""

    def take(self) -> int:
        held = (block for pin in self.pinned for block in self.tables[pin])
        alone = (block for block in held if self.holders[block] == 1)
        return super().take() if self.unused else next(alone, None) or super().take()


class PinsAPartialBlock(PinningCache):
    """Pins a partial block, which its trait excludes."""

    pins = PinTraits(covers="full blocks")


@pytest.mark.sampled_cases
@pytest.mark.parametrize("adapter", [PinningCache, PinningFullBlocks])
@pytest.mark.usefixtures("short_run")
def test_right_cache_with_pins_passes_and_meets_their_condition(
    adapter: type[PinningCache],
) -> None:
    settings.set_current(settings.Settings(examples=40, seed=1))
    tests = conformance(adapter)()
    for name in filter(lambda name: "option" not in name, tests.shipped()):  # it has no options
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
                "append one token to sequences 0, 1",
                "pin the blocks of sequence 1 as 2",
                "append one token to sequences 1, 3",
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
def test_cache_with_broken_pins_fails_with_a_short_history(
    adapter: type[PinningCache], what: str, steps: list[str]
) -> None:
    settings.set_current(settings.Settings(examples=60, seed=7, failures_dir=None))
    tests = conformance(adapter)()
    with pytest.raises(Divergence) as failure:
        getattr(tests, next(iter(tests.shipped())))()
    assert failure.value.summary == what
    assert [step.describe() for step in failure.value.history.operations] == steps
    pinned = steps[1].split()[-1]
    assert f"sequence {pinned} is pinned" in str(failure.value)


def test_operation_is_drawn_executed_described_and_saved() -> None:
    drawn_pins: list[Pin] = []

    def check(history: History) -> None:
        assert History.from_json(history.to_json()) == history
        pins = [step for step in history.operations if isinstance(step, Pin)]
        assert ("pin the blocks" in history.describe()) == bool(pins)
        machine = HistoryRunner(PinningCache, history)
        machine.run()
        freed = {step.seq for step in history.operations if isinstance(step, Free)}
        adapter: Any = machine.adapter
        assert adapter.pinned >= {step.child for step in pins} - freed
        drawn_pins.extend(pins)

    check_drawn_histories(PinningCache, 20, 1, check)
    assert len(drawn_pins) > 5
    assert Pin(0, 1).to_json() == {"do": "Pin", "seq": 0, "child": 1}


def test_condition_of_a_capability_is_counted() -> None:
    refuse_mistakes(PinningCache)
    steps = Append((0, 1)), Pin(0, 2), Free(1), Free(0), Free(2)
    assert run_history(PinningCache, History(CacheSpec(), steps))["pin_outlives"] == 1

    class Unpinned(ListCache):
        conditions = ("pin_outlives",)

    with pytest.raises(TypeError, match="conditions names 'pin_outlives', which only path_counts"):
        refuse_mistakes(Unpinned)


def test_finished_run_releases_its_cache() -> None:
    run = HistoryRunner(PinningCache, History(CacheSpec(), (Append((0,)),)))
    assert run.observers
    cache = weakref.ref(run.adapter)
    del run
    assert cache() is None


def test_reference_of_a_capability_is_generated() -> None:
    sections, shipped = reference.sections(PinningCache), reference.sections(CutCache)
    added = {name: _added(sections[name], shipped[name]) for name in sections}
    assert added == {
        "capabilities": """
- `test_capability`: A capability defined by a user: one mixin and one object, which generic code
  reads.
""",
        "methods": """
- `pin(seq, pin)` (needs `free`, `table`): Hold the blocks of a sequence under the name `pin`, until
  that is freed. A pin reads back as the sequence did, and has a `table`. It is never appended to.
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
    """Return the lines of the longer list that the shorter one does not have."""
    own = [line for line in longer.splitlines() if line not in shorter.splitlines()]
    return "\n".join(["", *own, ""]) if own else ""


def test_capability_belongs_only_to_adapters_that_offer_it() -> None:
    assert PINS in PinningCache.capabilities
    assert PINS not in CutCache.capabilities
    assert "pin" in PinningCache.abilities
    assert "pin" not in CutCache.optional


class PinsWithoutFree(PinMethods, ListCache):
    def pin(self, seq: int, pin: int) -> None:
        pass


class PinsWithAStringTrait(PinningCache):
    pins = "blocks"  # type: ignore[assignment]


class MisspeltPin(PinMethods, ListCache):
    def pni(self, seq: int, pin: int) -> None:
        pass


class PinWithAnExtraParameter(PinningCache):
    def pin(self, seq: int, pin: int, how: str) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (PinsWithoutFree, "PinsWithoutFree defines pin and must then define free, table too"),
        (PinsWithAStringTrait, r"PinsWithAStringTrait.pins is 'blocks': write PinTraits\(...\)"),
        (MisspeltPin, "MisspeltPin has pni, which the harness does not use: did you mean pin?"),
        (
            PinWithAnExtraParameter,
            r"PinWithAnExtraParameter.pin takes \(seq, pin, how\), and the harness calls "
            r"pin\(seq, pin\)",
        ),
    ],
)
def test_invalid_adapter_with_pins_is_refused(adapter: type[ListCache], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        refuse_mistakes(adapter)


def test_unknown_choice_of_a_trait_is_refused() -> None:
    wrong: Any = "no blocks"
    with pytest.raises(TypeError, match="covers is 'no blocks'; choose one of 'all blocks', 'full"):
        PinTraits(covers=wrong)


def test_adapter_may_name_a_method_it_does_not_offer() -> None:
    class Neither(PinMethods, ListCache):
        pin = PinMethods.pin

    refuse_mistakes(Neither)
    assert "pin" not in Neither.abilities


# Capabilities with only an invariant, or only a part of the oracle.


@invariant(rank=0)
def fewer_than_three_tokens(observation: Observation) -> Finding | None:
    """Three tokens must not be stored at once."""
    tokens = sum(map(observation.oracle.length, observation.oracle.sequences))
    return Finding("three is a crowd") if tokens == 3 else None


@invariant(rank=0, needs=("ledger",))
def invariant_without_its_need(_: Observation) -> Finding | None:
    """Must not run for a cache without a ledger."""
    raise AssertionError("a list has no ledger")


class CrowdMethods:
    """A capability with an invariant and no method."""


Capability(methods=CrowdMethods, invariants=(fewer_than_three_tokens, invariant_without_its_need))


class CrowdedCache(CrowdMethods, ListCache):
    pass


def test_invariant_is_checked_where_its_needs_are_met() -> None:
    run_history(CrowdedCache, History(CacheSpec(), (Append((0, 1)),)))
    steps = Append((0, 1)), Append((1,))
    with pytest.raises(Divergence, match="three is a crowd"):
        run_history(CrowdedCache, History(CacheSpec(), steps))
    run_history(ListCache, History(CacheSpec(), steps))


class KeepingMethods:
    """A capability whose caches do not allow writes to a page that is held."""

    keeps_pages: bool = False


class KeptPages(State):
    required_attributes: ClassVar = {"keeps_pages": True}

    def keeps(self, seq: int, at: int) -> bool:  # noqa: ARG002
        return True


Capability(methods=KeepingMethods, states=(KeptPages,))


class KeepingCache(KeepingMethods, ListCache):
    keeps_pages = True


class LaxCache(KeepingMethods, ListCache):
    pass


@pytest.mark.parametrize(("adapter", "needed"), [(KeepingCache, 1), (LaxCache, 0), (ListCache, 0)])
def test_state_changes_the_pages_that_an_append_needs(
    adapter: type[ListCache], needed: int
) -> None:
    oracle = Oracle.of(adapter, CacheSpec())
    oracle.append([(0, 1)], oracle.new_tokens([(0, 1)]))
    assert oracle.pages_needed([(0, 1)]) == needed
