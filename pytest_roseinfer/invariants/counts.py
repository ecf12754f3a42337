"""What a cache's own counts must say: the conditions its rows met, the paths it may take."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_roseinfer.findings.finding import Finding
from pytest_roseinfer.invariants.invariant import ATTENTION, OPERATION, invariant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.oracle import Oracle
    from pytest_roseinfer.running.observation import Observation


def conditions_met(oracle: Oracle, step: Operation) -> Counter[str]:
    """Count what the rows of a step will find at the end of their sequences, before it is done."""
    met: Counter[str] = Counter()
    leaving: Counter[int] = Counter()
    for seq, _ in step.rows():
        pages = oracle.sequences.get(seq)
        last = pages[-1] if pages else None
        if last is None:
            met["fresh"] += 1
        elif len(last.tokens) == oracle.block_size:
            met["rollover_shared" if last.holders > 1 else "rollover"] += 1
        elif last.holders - leaving[id(last)] > 1:
            leaving[id(last)] += 1
            met["copy_on_write"] += 1
        else:
            met["in_place"] += 1
    if padding := step.padding():
        met["padding"] = padding
    return met


@invariant(rank=6, needs=("path_counts",), after=(OPERATION, ATTENTION))
def counts(seen: Observation) -> Finding | None:
    """What was counted in a step is declared and could have happened in it."""
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
            yield f"path {name!r} ran and is not declared"
        if times < 0:
            yield f"the count of {name!r} went down by {-times}"


def _wrong_paths(seen: Observation, step: Operation) -> Iterator[str]:
    """Paths were counted if tokens were written, and can write where these belong."""
    paths, twins, written = seen.declared.paths, seen.declared.twins, seen.outcome.written
    moved = (paths.keys() | twins) & seen.ran.keys()
    copied = seen.outcome.fits and step.copies_blocks(seen.declared.fork_shares)
    if moved and written is None and not copied:
        yield f"paths {sorted(moved)} were counted though nothing was written"
    if written is not None and not moved:
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
    """Conditions were counted as met, once for each of the block lists a sequence has."""
    names, met, ran = seen.declared.row_conditions, seen.outcome.met, seen.ran
    counted = {name: ran.get(name, 0) for name in names.values()}
    lists = range(1, seen.spec.num_layers + 1)
    right = [{own: met[name] * times for name, own in names.items()} for times in lists]
    if names and counted not in right:
        yield f"conditions were counted as {counted}; the rows met {right[0]}"


def _ruled_out(seen: Observation) -> Iterator[str]:
    """No path ran that the switches rule out."""
    ran, options = seen.ran, seen.outcome.options
    for name, path in seen.declared.paths.items():
        for switches in path.never_with if name in ran else ():
            if all(options.get(switch) == value for switch, value in switches.items()):
                said = " with ".join(f"{name}={value!r}" for name, value in switches.items())
                yield f"path {name!r} was counted, which {said} rules out"
