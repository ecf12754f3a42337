"""What a cache's own counts must say: the conditions its rows met, the paths it may take."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.cases.history import AppendPadded, Copy, Fork, Reserve, is_write
from pytest_roseinfer.invariants.own_conditions import OWN_CONDITIONS
from pytest_roseinfer.running.snapshot import counts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_roseinfer.cases.history import Operation
    from pytest_roseinfer.invariants.arena import Slot
    from pytest_roseinfer.oracle import Oracle
    from pytest_roseinfer.running.execute import Outcome
    from pytest_roseinfer.running.machine import Machine


def conditions_met(oracle: Oracle, step: Operation) -> Counter[str]:
    """What the rows of a step, about to be done, will find at the end of their sequences."""
    met: Counter[str] = Counter()
    if not is_write(step):
        return met
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
    if isinstance(step, AppendPadded):
        met["padding"] = step.seqs.count(None)
    return met


def check_counts(
    machine: Machine,
    outcome: Outcome,
    before: Counter[str],
    met: Counter[str],
    slots: list[list[Slot]],
) -> None:
    """What was counted in the last step is declared and could have happened in it."""
    ran = _ran_since(machine, before)
    _check_declared(machine, ran)
    _check_paths(machine, outcome, ran, slots)
    if not isinstance(machine.done[-1], Copy):  # which may be written token by token
        _check_conditions(machine, ran, met if outcome.fits else Counter())
    _check_switches(machine, ran, outcome.options)
    machine.counts.update(ran)


def check_counts_of_attention(machine: Machine, before: Counter[str]) -> None:
    """What attention counted is declared, and no row's condition: it writes nothing."""
    ran = _ran_since(machine, before)
    _check_declared(machine, ran)
    _check_conditions(machine, ran, Counter())
    _check_switches(machine, ran, machine.options)
    machine.counts.update(ran)


def _ran_since(machine: Machine, before: Counter[str]) -> dict[str, int]:
    after = counts_of(machine)
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def _twins(machine: Machine) -> set[str]:
    return {path.equals for path in machine.adapter.paths.values()}


def _check_declared(machine: Machine, ran: Mapping[str, int]) -> None:
    declared = {*machine.adapter.paths, *_twins(machine), *machine.adapter.conditions}
    for name, times in ran.items():
        if name in OWN_CONDITIONS and name in machine.adapter.conditions:
            machine.fail(f"path_counts() counts {name!r}, which the harness counts itself")
        if name not in declared:
            machine.fail(f"path {name!r} ran and is not declared")
        if times < 0:
            machine.fail(f"the count of {name!r} went down by {-times}")


def _check_paths(
    machine: Machine, outcome: Outcome, ran: Mapping[str, int], slots: list[list[Slot]]
) -> None:
    """Paths were counted if tokens were written, and can write where these belong."""
    step, paths, twins = machine.done[-1], machine.adapter.paths, _twins(machine)
    moved = (paths.keys() | twins) & ran.keys()
    copies = isinstance(step, Reserve) or (
        isinstance(step, Fork) and machine.adapter.fork_shares != "blocks"
    )
    if moved and outcome.written is None and not (copies and outcome.fits):
        machine.fail(f"paths {sorted(moved)} were counted though nothing was written")
    if outcome.written is not None and not moved:
        machine.fail("tokens were written and no path was counted")
    if isinstance(step, Copy) or moved & twins:
        # A copy is written token by token; and where a slow twin took some of the rows,
        # those that were left may have had one position.
        return
    positions = {at for layer in slots for _, at in layer}
    for name in moved:
        if paths[name].one_position and len(positions) > 1:
            machine.fail(
                f"path {name!r} was counted, which writes one position for all rows; these "
                f"rows needed positions {sorted(positions)}"
            )


def _check_conditions(machine: Machine, ran: Mapping[str, int], expected: Counter[str]) -> None:
    """Conditions were counted as met, once for each of the lists a sequence has."""
    names = machine.adapter.row_conditions
    counted = {name: ran.get(name, 0) for name in names.values()}
    lists = range(1, machine.spec.num_layers + 1)
    right = [{own: expected[name] * times for name, own in names.items()} for times in lists]
    if names and counted not in right:
        machine.fail(f"conditions were counted as {counted}; the rows met {right[0]}")


def _check_switches(machine: Machine, ran: Mapping[str, int], options: Mapping[str, Any]) -> None:
    """No path ran that the switches rule out."""
    for name, path in machine.adapter.paths.items():
        for switches in path.never_with if name in ran else ():
            if all(options.get(switch) == value for switch, value in switches.items()):
                machine.fail(f"path {name!r} was counted, which {_said(switches)} rules out")


def _said(switches: Mapping[str, Any]) -> str:
    return " with ".join(_each(switches))


def _each(switches: Mapping[str, Any]) -> Iterator[str]:
    for name, value in switches.items():
        yield f"{name}={value!r}"
