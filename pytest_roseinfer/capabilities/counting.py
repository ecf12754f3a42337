"""Counted paths and conditions: what a cache counts, and what the harness counts itself."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import answers
from pytest_roseinfer.capabilities.cache_data import (
    OWN_CONDITIONS,
    USED_AGAIN,
    refuse_what_is_not_shown,
)
from pytest_roseinfer.capabilities.capability import (
    Across,
    Capability,
    Look,
    Observer,
    Run,
    View,
    counted_conditions,
    optional,
)
from pytest_roseinfer.capabilities.observation import (
    AFTER_ATTENTION,
    AFTER_STEP,
    Finding,
    Observation,
    invariant,
)
from pytest_roseinfer.words import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import FastPath
    from pytest_roseinfer.capabilities.observation import Snapshot
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle


class CountingMethods:
    """The method that shows counted paths and conditions."""

    paths: ClassVar[Mapping[str, FastPath]] = {}
    """A ``FastPath`` for each fast path, by its name in ``path_counts``."""
    conditions: ClassVar[Sequence[str]] = ()
    """Names in ``path_counts`` that are not paths and must be met as well. The harness counts some
    itself, which ``path_counts`` leaves out."""
    row_conditions: ClassVar[Mapping[str, str]] = {}
    """The name among ``conditions`` that counts rows of a kind, for each kind that is counted row
    by row: ``"fresh"``, ``"in_place"``, ``"rollover"``, ``"rollover_shared"``,
    ``"copy_on_write"``, ``"padding"``."""

    @optional
    def path_counts(self) -> Mapping[str, int]:
        """Return how often each path ran and each condition was met since ``make``."""


def conditions_met(oracle: Oracle, step: Operation) -> Counter[str]:
    """Count the conditions that the rows of a step will meet, before it is done."""
    met = Counter(oracle.conditions_met(step.rows()))
    if padding := step.padding():
        met["padding"] = padding
    return met


@invariant(rank=60, needs=("path_counts",), after=(AFTER_STEP, AFTER_ATTENTION))
def counts(seen: Observation) -> Finding | None:
    """Counted paths and conditions must be declared, and possible in the step that counts them."""
    return next(map(Finding, _mistakes(seen)), None)


def _mistakes(seen: Observation) -> Iterator[str]:
    yield from _undeclared(seen)
    if seen.operation:
        yield from _wrong_paths(seen, seen.operation)
    if not (seen.operation and seen.operation.in_parts):
        yield from _wrong_conditions(seen)
    yield from _ruled_out(seen)


def _twins(seen: Observation) -> set[str]:
    """Return the slow paths that others must equal."""
    return {path.equals for path in seen.declared.paths.values()}


def _undeclared(seen: Observation) -> Iterator[str]:
    declared = {*seen.declared.paths, *_twins(seen), *seen.declared.conditions}
    for name, times in seen.ran.items():
        if name not in declared:
            yield f"{name!r} was counted, and is in neither paths nor conditions"
        if times < 0:
            yield f"the count of {name!r} went down by {-times}"


def _wrong_paths(seen: Observation, step: Operation) -> Iterator[str]:
    """Say which paths were counted that wrote nothing, or cannot have written this."""
    paths, twins, written = seen.declared.paths, _twins(seen), seen.outcome.written
    moved = (paths.keys() | twins) & seen.ran.keys()
    copied = seen.outcome.fits and step.copies_blocks(seen.oracle)
    if moved and written is None and not copied:
        yield f"paths {sorted(moved)} were counted though nothing was written"
    if paths and written is not None and not moved:
        yield "tokens were written and no path was counted"
    if step.in_parts or moved & twins:
        # Where a slow twin took some of the rows, those that were left may have had one position.
        return
    layers = range(seen.spec.num_layers) if seen.after.tables is not None else ()
    for name in (name for name in moved if paths[name].one_position):
        positions = {at for layer in layers for _, at in seen.slots(layer)}
        if len(positions) > 1:
            yield (
                f"path {name!r} was counted, which writes one position for all rows; these "
                f"rows needed positions {sorted(positions)}"
            )


def _wrong_conditions(seen: Observation) -> Iterator[str]:
    """Say where counts differ from the conditions met, once for each block list of a sequence."""
    names, ran = seen.declared.row_conditions, seen.ran
    met = seen.notes.get(RowConditions) or Counter[str]()
    counted = {name: ran.get(name, 0) for name in names.values()}
    lists = range(1, seen.spec.num_layers + 1)
    right = [{own: met[name] * times for name, own in names.items()} for times in lists]
    if names and counted not in right:
        yield f"conditions were counted as {counted}; the rows met {right[0]}"


def _ruled_out(seen: Observation) -> Iterator[str]:
    """Say which paths ran that the switches rule out."""
    ran, options = seen.ran, seen.outcome.options
    for name, path in seen.declared.paths.items():
        for switches in path.never_with if name in ran else ():
            if all(options.get(switch) == value for switch, value in switches.items()):
                said = " with ".join(f"{name}={value!r}" for name, value in switches.items())
                yield f"path {name!r} was counted, which {said} rules out"


# Conditions the harness counts itself: the oracle shows them, so no cache has to count them.


@invariant(rank=50, needs=("path_counts",), after=(AFTER_STEP, AFTER_ATTENTION))
def own_conditions(seen: Observation) -> Finding | None:
    """A cache must leave out of its counts what the harness counts itself."""
    for name in seen.ran:
        if name in (*OWN_CONDITIONS, *USED_AGAIN) and name in seen.declared.conditions:
            return Finding(f"path_counts() counts {name!r}, which the harness counts itself")
    return None


def own_conditions_met(oracle: Oracle, step: Operation) -> Counter[str]:
    """Count the conditions that a step will meet, which is about to be done."""
    met: Counter[str] = Counter()
    admitted = step.admitted(oracle)
    if admitted is not step:
        rows = step.rows()
        met["out_of_room_mid_batch"] = int(bool(rows) and oracle.fits(rows[:1]))
    if admitted:
        for seq, _ in admitted.rows():
            # A page holds a token at least, so blocks of one position, always last, do not count.
            if at := oracle.on_last(seq):
                met["last_position"] += at == oracle.block_size - 1
        for seq in admitted.changed():
            met["name_used_again"] += seq not in oracle.named and oracle.lives[seq] > 0
    return +met


@dataclass(slots=True)
class UsedWhileAway:
    """Counts how often others got the blocks of sequences that were to come back."""

    tables: Mapping[int, Sequence[int | None]] = field(default_factory=dict)
    """As they were after the latest step."""
    given_up: dict[int, set[int | None]] = field(default_factory=dict)
    """For each sequence that is away and has no blocks: those that it had."""

    def met(self, away: Collection[int], tables: Mapping[int, Sequence[int | None]]) -> int:
        """Count the blocks that came to somebody in this step."""
        gone = [seq for seq in away if seq not in tables]
        self.given_up = {seq: self.given_up.get(seq, set(self.tables.get(seq, ()))) for seq in gone}
        came = _held(tables) - _held(self.tables)
        self.tables = tables
        return len(came & set[int | None]().union(*self.given_up.values()))


def _held(tables: Mapping[int, Sequence[int | None]]) -> set[int | None]:
    return {block for table in tables.values() for block in table}


# Counts how often a cache gives out again what it had given out and got back.


@dataclass(slots=True)
class _GivenOut:
    """Things of one kind."""

    now: set[Hashable] = field(default_factory=set)
    ever: dict[Hashable, object] = field(default_factory=dict)
    """Holding them keeps new things from getting the identity of one that is gone."""

    def again(self, things: Iterable[object]) -> int:
        """Take the things that are given out now; count those that are so once more."""
        shown = {_identity(thing): thing for thing in things}
        again = sum(each in self.ever and each not in self.now for each in shown)
        self.now = set(shown)
        self.ever.update(shown)
        return again


def _identity(thing: object) -> Hashable:
    return thing if isinstance(thing, int | str) else ("the object", id(thing))


class UsedAgain(Observer):
    """Counts how often handles, slots, lists and blocks are used again."""

    conditions: ClassVar = {name: each.description for name, each in USED_AGAIN.items()}
    any_of = conditions.keys()

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._handles, self._slots, self._lists = _GivenOut(), _GivenOut(), _GivenOut()
        self._blocks = UsedWhileAway()

    def after(self, seen: Observation) -> Mapping[str, int]:
        kept, away = seen.after.kept.values(), seen.oracle.absent
        handles = (handle for handle, _ in self.run.driven.reserved)
        met = {
            "handle_used_again": self._handles.again(handles),
            "slot_used_again": self._slots.again(each for each in kept if isinstance(each, int)),
            "list_used_again": self._lists.again(each for each in kept if isinstance(each, list)),
            "block_used_while_absent": self._blocks.met(away, seen.after.tables_of(0)),
        }
        return {name: times for name, times in met.items() if name in seen.declared.conditions}


class RowConditions(Observer):
    """Knows the conditions that the rows of a step meet, where a cache counts them row by row."""

    any_of = ("path_counts",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._met: Counter[str] = Counter()

    def before(self, step: Operation) -> Mapping[str, int]:
        if self.run.declared.row_conditions and (admitted := step.admitted(self.run.oracle)):
            self._met = conditions_met(self.run.oracle, admitted)
        return {}

    def after(self, seen: Observation) -> Mapping[str, int]:  # noqa: ARG002
        self._met = Counter()
        return {}

    def notes(self, after: Snapshot) -> Counter[str]:  # noqa: ARG002
        return self._met


class OwnConditions(Observer):
    """Counts the conditions that the oracle shows before a step."""

    any_of = conditions = OWN_CONDITIONS

    def before(self, step: Operation) -> Mapping[str, int]:
        met = own_conditions_met(self.run.oracle, step)
        return {name: met[name] for name in OWN_CONDITIONS if name in self.run.declared.conditions}


def _show_counts(run: Run, look: Look) -> Mapping[str, Any]:  # noqa: ARG001
    counts = answers.counts("path_counts()", run.adapter.path_counts())
    return {"counts": Counter({str(name): times for name, times in counts.items()})}


def refuse_uncounted(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a condition that the harness does not count, nor the cache."""
    if "path_counts" in adapter.abilities:
        return
    counted = counted_conditions(adapter)
    for name in adapter.conditions:
        if name not in counted:
            raise TypeError(
                f"{adapter.__name__}.conditions names {name!r}, which only path_counts() could "
                f"count, and that is not defined{did_you_mean(name, counted)}"
            )


COUNTING = Capability(
    methods=CountingMethods,
    sharded={"path_counts": Across.FIRST},
    invariants=(
        counts,
        own_conditions,
    ),
    refuse=(
        refuse_uncounted,
        refuse_what_is_not_shown,
    ),
    observers=(OwnConditions, RowConditions, UsedAgain),
    views=(View(("path_counts",), _show_counts),),
)
