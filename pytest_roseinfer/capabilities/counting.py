"""Paths and conditions, counted by the cache or by the harness."""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities import return_values
from pytest_roseinfer.capabilities.cache_data import (
    HARNESS_CONDITIONS,
    REUSE_CONDITIONS,
    refuse_unobservable_conditions,
)
from pytest_roseinfer.capabilities.capability import (
    Capability,
    Observer,
    RankPolicy,
    Run,
    SnapshotScope,
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
    """Adapter method and attributes for counted paths and conditions."""

    paths: ClassVar[Mapping[str, FastPath]] = {}
    """A ``FastPath`` for each fast path, by its name in ``path_counts``."""
    conditions: ClassVar[Sequence[str]] = ()
    """Names in ``path_counts`` that are not paths and must be met as well. The harness counts some
    itself, which ``path_counts`` leaves out."""
    row_conditions: ClassVar[Mapping[str, str]] = {}
    """Names among ``conditions`` that the cache counts row by row, by the kind of row:
    ``"fresh"``, ``"in_place"``, ``"rollover"``, ``"rollover_shared"``, ``"copy_on_write"``,
    ``"padding"``."""

    @optional
    def path_counts(self) -> Mapping[str, int]:
        """Return how often each path ran and each condition was met since ``make``."""


def conditions_met(oracle: Oracle, step: Operation) -> Counter[str]:
    """Count the conditions that the rows of a step will meet, before the oracle applies it."""
    met = Counter(oracle.conditions_met(step.rows()))
    if padding := step.padding():
        met["padding"] = padding
    return met


@invariant(rank=60, needs=("path_counts",), after=(AFTER_STEP, AFTER_ATTENTION))
def counts(observation: Observation) -> Finding | None:
    """Counted paths and conditions must be declared, and possible in the step that counts them."""
    return next(map(Finding, _mistakes(observation)), None)


def _mistakes(observation: Observation) -> Iterator[str]:
    yield from _check_declared(observation)
    if observation.operation:
        yield from _wrong_paths(observation, observation.operation)
    if not (observation.operation and observation.operation.in_parts):
        yield from _wrong_conditions(observation)
    yield from _ruled_out(observation)


def _twins(observation: Observation) -> set[str]:
    """Return the slow paths that fast ones must equal."""
    return {path.equals for path in observation.declared.paths.values()}


def _check_declared(observation: Observation) -> Iterator[str]:
    declared = {*observation.declared.paths, *_twins(observation), *observation.declared.conditions}
    for name, times in observation.step_counts.items():
        if name not in declared:
            yield f"{name!r} was counted, and is in neither paths nor conditions"
        if times < 0:
            yield f"the count of {name!r} went down by {-times}"


def _wrong_paths(observation: Observation, step: Operation) -> Iterator[str]:
    """Yield paths that were counted though they wrote nothing, or cannot have written this."""
    paths, twins, written = (
        observation.declared.paths,
        _twins(observation),
        observation.outcome.written,
    )
    moved = (paths.keys() | twins) & observation.step_counts.keys()
    copied = observation.outcome.fits and step.copies_blocks(observation.oracle)
    if moved and written is None and not copied:
        yield f"paths {sorted(moved)} were counted though nothing was written"
    if paths and written is not None and not moved and not step.moves_tokens:
        yield "tokens were written and no path was counted"
    if step.in_parts or moved & twins:
        # A slow twin may have written some rows; the other rows may have had one position.
        return
    layers = range(observation.spec.num_layers) if observation.after.tables is not None else ()
    for name in (name for name in moved if paths[name].one_position):
        positions = {at for layer in layers for _, at in observation.slots(layer)}
        if len(positions) > 1:
            yield (
                f"path {name!r} was counted, which writes one position for all rows; these "
                f"rows needed positions {sorted(positions)}"
            )


def _wrong_conditions(observation: Observation) -> Iterator[str]:
    """Yield counts that differ from the conditions met, which a cache counts once per block list.

    A sequence may have one block list for several layers, or one for each.
    """
    names, ran = observation.declared.row_conditions, observation.step_counts
    refused = not (observation.outcome.fits or observation.outcome.written)
    met = (not refused and observation.notes.get(RowConditions)) or Counter[str]()
    counted = {name: ran.get(name, 0) for name in names.values()}
    lists = range(1, observation.spec.num_layers + 1)
    right = [{own_name: met[name] * times for name, own_name in names.items()} for times in lists]
    if names and counted not in right:
        yield f"conditions were counted as {counted}; the rows met {right[0]}"


def _ruled_out(observation: Observation) -> Iterator[str]:
    """Yield paths that ran although the switches rule them out."""
    ran, options = observation.step_counts, observation.outcome.options
    for name, path in observation.declared.paths.items():
        if name in ran and (exclusion := path.describe_exclusion(options)):
            yield f"path {name!r} was counted, {exclusion}"


# Conditions that the harness counts from the oracle, so that no cache has to count them


@invariant(rank=50, needs=("path_counts",), after=(AFTER_STEP, AFTER_ATTENTION))
def own_conditions(observation: Observation) -> Finding | None:
    """A cache must not count the conditions that the harness counts itself."""
    for name in observation.step_counts:
        if (
            name in (*HARNESS_CONDITIONS, *REUSE_CONDITIONS)
            and name in observation.declared.conditions
        ):
            return Finding(f"path_counts() counts {name!r}, which the harness counts itself")
    return None


def harness_conditions_met(oracle: Oracle, step: Operation) -> Counter[str]:
    """Count the harness's conditions that a step will meet, before the oracle applies it."""
    met: Counter[str] = Counter()
    admitted = step.admitted_part(oracle)
    if admitted is not step:
        rows = step.rows()
        met["out_of_room_mid_batch"] = int(bool(rows) and oracle.fits(rows[:1]))
    if admitted:
        for seq, _ in admitted.rows():
            # A new page has no tokens yet, so blocks with a single position never count.
            if at := oracle.count_on_last_page(seq):
                met["last_position"] += at == oracle.block_size - 1
        for seq in admitted.changed_seqs():
            met["name_used_again"] += seq not in oracle.named and oracle.lives[seq] > 0
    return +met


@dataclass(slots=True)
class BlockReuseWhileAbsent:
    """Counter of blocks of absent sequences that other sequences got."""

    tables: Mapping[int, Sequence[int | None]] = field(default_factory=dict)
    """Tables after the latest step."""
    lost_blocks: dict[int, set[int | None]] = field(default_factory=dict)
    """Former blocks of each absent sequence that has no blocks now."""

    def count_met(self, away: Collection[int], tables: Mapping[int, Sequence[int | None]]) -> int:
        """Count the blocks of absent sequences that a sequence got in this step."""
        absent = [seq for seq in away if seq not in tables]
        self.lost_blocks = {
            seq: self.lost_blocks.get(seq, set(self.tables.get(seq, ()))) for seq in absent
        }
        came = _blocks_in(tables) - _blocks_in(self.tables)
        self.tables = tables
        return len(came & set[int | None]().union(*self.lost_blocks.values()))


def _blocks_in(tables: Mapping[int, Sequence[int | None]]) -> set[int | None]:
    return {block for table in tables.values() for block in table}


# Reuse of handles, slots, lists and blocks


@dataclass(slots=True)
class _ReuseCounter:
    """Counter of handles, slots or lists that a cache hands out again after it got them back."""

    now: set[Hashable] = field(default_factory=set)
    """Identities in use after the latest step."""
    ever: dict[Hashable, object] = field(default_factory=dict)
    """Everything handed out so far, by identity; kept alive so that no ``id`` is reused."""

    def count_reused(self, items: Iterable[object]) -> int:
        """Record the items in use now; count those used once, then out of use, and used again."""
        shown = {_identity(item): item for item in items}
        num_reused = sum(each in self.ever and each not in self.now for each in shown)
        self.now = set(shown)
        self.ever.update(shown)
        return num_reused


def _identity(item: object) -> Hashable:
    return item if isinstance(item, int | str) else ("the object", id(item))


class ReuseConditions(Observer):
    """Counter of handles, slots, lists and blocks that are used again."""

    conditions: ClassVar = {name: each.description for name, each in REUSE_CONDITIONS.items()}
    any_of = conditions.keys()

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._handles, self._slots, self._lists = _ReuseCounter(), _ReuseCounter(), _ReuseCounter()
        self._blocks = BlockReuseWhileAbsent()

    def after(self, observation: Observation) -> Mapping[str, int]:
        kept, away = observation.after.containers.values(), observation.oracle.absent
        handles = (each.handle for each in self.run.cache_under_test.open_reservations)
        met = {
            "handle_used_again": self._handles.count_reused(handles),
            "slot_used_again": self._slots.count_reused(
                each for each in kept if isinstance(each, int)
            ),
            "list_used_again": self._lists.count_reused(
                each for each in kept if isinstance(each, list)
            ),
            "block_used_while_absent": self._blocks.count_met(away, observation.after.tables_of(0)),
        }
        return {
            name: times for name, times in met.items() if name in observation.declared.conditions
        }


class RowConditions(Observer):
    """Conditions that the rows of a step meet, for caches that count them row by row."""

    any_of = ("path_counts",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._conditions_met: Counter[str] = Counter()

    def before(self, step: Operation) -> Mapping[str, int]:
        if self.run.declared.row_conditions and (admitted := step.admitted_part(self.run.oracle)):
            self._conditions_met = conditions_met(self.run.oracle, admitted)
        return {}

    def after(self, observation: Observation) -> Mapping[str, int]:  # noqa: ARG002
        self._conditions_met = Counter()
        return {}

    def notes(self, after: Snapshot) -> Counter[str]:  # noqa: ARG002
        return self._conditions_met


class HarnessConditions(Observer):
    """Counter of the conditions that follow from the oracle before a step."""

    any_of = conditions = HARNESS_CONDITIONS

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._met: Counter[str] = Counter()

    def before(self, step: Operation) -> Mapping[str, int]:
        self._met = harness_conditions_met(self.run.oracle, step)
        return {}

    def after(self, observation: Observation) -> Mapping[str, int]:
        """Return the counts; of a refused step, those of running out of room alone."""
        stored = observation.outcome.fits or observation.outcome.written
        names = HARNESS_CONDITIONS if stored else ("out_of_room_mid_batch",)
        return {name: self._met[name] for name in names if name in self.run.declared.conditions}


def _show_counts(run: Run, look: SnapshotScope) -> Mapping[str, Any]:  # noqa: ARG001
    counts = return_values.counts("path_counts()", run.adapter.path_counts())
    return {"counts": Counter({str(name): times for name, times in counts.items()})}


def refuse_uncounted(adapter: type[Any]) -> None:
    """Raise ``TypeError`` for a condition that neither the harness nor the cache counts."""
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
    sharded={"path_counts": RankPolicy.FIRST},
    invariants=(
        counts,
        own_conditions,
    ),
    refuse=(
        refuse_uncounted,
        refuse_unobservable_conditions,
    ),
    observers=(HarnessConditions, RowConditions, ReuseConditions),
    views=(View(("path_counts",), _show_counts),),
)
