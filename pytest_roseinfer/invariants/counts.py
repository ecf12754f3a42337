"""What a cache counts in a step must be declared, and must be possible in that step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_roseinfer.findings.finding import Finding
from pytest_roseinfer.invariants.invariant import ATTENTION, OPERATION, Observation, invariant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle


def conditions_met(oracle: Oracle, step: Operation) -> Counter[str]:
    """Count the conditions that the rows of a step will meet, before it is done."""
    met = Counter(oracle.conditions_met(step.rows()))
    if padding := step.padding():
        met["padding"] = padding
    return met


@invariant(rank=6, needs=("path_counts",), after=(OPERATION, ATTENTION))
def counts(seen: Observation) -> Finding | None:
    return next(map(Finding, _mistakes(seen)), None)


def _mistakes(seen: Observation) -> Iterator[str]:
    yield from _undeclared(seen)
    if seen.operation:
        yield from _wrong_paths(seen, seen.operation)
    if not (seen.operation and seen.operation.in_parts):
        yield from _wrong_conditions(seen)
    yield from _ruled_out(seen)


def _undeclared(seen: Observation) -> Iterator[str]:
    declared = {*seen.declared.paths, *seen.declared.twins, *seen.declared.conditions}
    for name, times in seen.ran.items():
        if name not in declared:
            yield f"{name!r} was counted, and is in neither paths nor conditions"
        if times < 0:
            yield f"the count of {name!r} went down by {-times}"


def _wrong_paths(seen: Observation, step: Operation) -> Iterator[str]:
    """Say which paths were counted that wrote nothing, or cannot have written this."""
    paths, twins, written = seen.declared.paths, seen.declared.twins, seen.outcome.written
    moved = (paths.keys() | twins) & seen.ran.keys()
    copied = seen.outcome.fits and step.copies_blocks(seen.declared.fork_shares)
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
    names, met, ran = seen.declared.row_conditions, seen.outcome.met, seen.ran
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
