"""What a cache's own counts must say: the conditions its rows met, the paths it may take."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.history import AppendPadded, is_write

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_roseinfer.history import Operation
    from pytest_roseinfer.machine import Machine
    from pytest_roseinfer.model import Oracle


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


def check_conditions(machine: Machine, ran: Mapping[str, int], expected: Counter[str]) -> None:
    """Conditions were counted as met, once for each of the lists a sequence has."""
    names = machine.adapter.row_conditions
    counted = {name: ran.get(name, 0) for name in names.values()}
    lists = range(1, machine.spec.num_layers + 1)
    right = [{own: expected[name] * times for name, own in names.items()} for times in lists]
    if names and counted not in right:
        machine.fail(f"conditions were counted as {counted}; the rows met {right[0]}")


def check_switches(machine: Machine, ran: Mapping[str, int], options: Mapping[str, Any]) -> None:
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
