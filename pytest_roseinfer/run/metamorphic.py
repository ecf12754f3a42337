"""Two histories that must end alike, run on two caches and compared without the oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities.observation import Finding, Location, find_change
from pytest_roseinfer.capabilities.payload import same_bits
from pytest_roseinfer.capabilities.prefixes import BeginWith, Collisions, looked_up
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.oracle.pages import Windows
from pytest_roseinfer.run.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.histories.history import History

Checked = Counter[str]
"""How often each invariant was checked."""


def check_permuted(adapter: type[KVCacheAdapter], history: History) -> Checked:
    """Appending to sequences in another order changes no sequence."""
    history = roomy(adapter, history)
    turned = _with(history, (step.reversed() for step in history.operations))
    return _check_alike(adapter, history, turned, "its batches in reverse order")


def check_split(adapter: type[KVCacheAdapter], history: History) -> Checked:
    """Two appends of half the rows each do what one of all rows does."""
    history = roomy(adapter, history)
    split = _with(history, (half for step in history.operations for half in step.halves()))
    return _check_alike(adapter, history, split, "its batches split in two")


def check_copied(adapter: type[KVCacheAdapter], history: History) -> Checked:
    """A fork behaves as a sequence of its own with the same tokens."""
    history = roomy(adapter, history)
    oracle = _plain(adapter, history, history.spec.num_blocks)
    steps: list[Operation] = []
    for step in history.operations:
        steps.append(step.unshared(oracle))
        step.apply(oracle)
    return _check_alike(adapter, history, _with(history, steps), "copies in place of its forks")


def check_every_option(adapter: type[KVCacheAdapter], history: History) -> Checked:
    """The same history under every setting of every switch ends in the same bits."""
    choices = adapter.option_choices
    usual = {name: values[0] for name, values in choices.items()}
    alone = [{name: value} for name, values in choices.items() for value in values[1:]]
    settings = [*alone, {name: values[-1] for name, values in choices.items()}]
    specs = [replace(history.spec, options={**usual, **options}) for options in ({}, *settings)]
    steps = _allowed_by_all(adapter, specs, history)
    first, *others = (_run(adapter, _with(replace(history, spec=spec), steps)) for spec in specs)
    checked = Counter(first.checked)
    for options, machine in zip(settings, others, strict=True):
        checked.update(machine.checked)
        _compare(first, machine, f"options {options}")
        if "use_queue" not in machine.can:  # else free blocks are poisoned at other times
            _compare_arenas(first, machine, f"options {options}")
    return checked


ROOMY = frozenset({check_permuted.__name__, check_split.__name__, check_copied.__name__})
"""The checks that make a history roomy before they run it."""


def _allowed_by_all(
    adapter: type[KVCacheAdapter], specs: list[CacheSpec], history: History
) -> list[Operation]:
    """Keep the steps that change no switches and that caches of all these specs allow.

    What is about a sequence that others of these steps would have changed is left out, too.
    """

    def can_truncate(stored: int, length: int) -> bool:
        return all(adapter.can_truncate(spec, stored, length) for spec in specs)

    oracle = replace(Oracle.of(adapter, history.spec), can_truncate=can_truncate)
    shows_room = "ledger" in adapter.abilities
    steps = []
    for step in history.operations:
        possible = step.possible(oracle) and step.allowed(oracle)
        if "set_options" in step.needs or not possible:
            continue
        if step.apply(oracle) or shows_room:
            steps.append(step)
    return steps


def roomy(adapter: type[KVCacheAdapter], history: History) -> History:
    """Keep what is admitted, on a cache so large that forks would fit as copies too.

    It changes nothing more in what it returned.
    """
    spec = history.spec
    oracle = Oracle.of(adapter, spec, history.texts)
    steps: list[Operation] = []
    for step in history.operations:
        if admitted := step.admitted(oracle):
            admitted.change(oracle)
            steps.append(admitted)
    endless = _plain(adapter, history, 1 << 40)
    blocks = 1
    for step in steps:
        rows = step.unshared(endless).rows()
        if isinstance(step, BeginWith):  # of which all may be found
            rows = [(step.seq, looked_up(endless)[step.seq])]
        blocks += endless.pages_needed(rows)
        step.apply(endless)
        if isinstance(step, BeginWith):
            endless.append(rows, endless.new_tokens(rows))
    # Groups of layers with different windows may share one pool.
    blocks *= max(1, len({*spec.windows}))
    return _with(replace(history, spec=replace(spec, num_blocks=blocks)), steps)


def _plain(adapter: type[KVCacheAdapter], history: History, capacity: int) -> Oracle:
    """Return the oracle of a cache without windows, whose forks share all of their blocks."""
    return replace(
        Oracle.of(adapter, history.spec, history.texts),
        capacity=capacity,
        fork_shares="blocks",
        truncate_copies=False,
        windows=Windows(),
    )


def _with(history: History, steps: Iterable[Operation]) -> History:
    return replace(history, operations=tuple(steps))


def _run(adapter: type[KVCacheAdapter], history: History) -> Machine:
    machine = Machine(adapter, history, attends=False)
    machine.run()
    return machine


def _check_alike(
    adapter: type[KVCacheAdapter], history: History, other: History, difference: str
) -> Checked:
    one = _run(adapter, history)
    checked = Counter(one.checked)
    if other != history:
        two = _run(adapter, other)
        _compare(one, two, difference)
        checked.update(two.checked)
    return checked


def _compare(one: Machine, other: Machine, difference: str) -> None:
    if one.payload.tolerance:
        return  # each is as near to what was written as it must be, and they need be no nearer
    finds_some = any(
        run.declared.prefixes.finds == "some" or ((met := run.observer(Collisions)) and met.any)
        for run in (one, other)
    )
    for seq in one.oracle.readable:
        if finds_some and one.oracle.length(seq) != other.oracle.length(seq):
            continue  # it began with more of its text, and each was compared with what it says
        for layer in range(one.spec.num_layers):
            pairs = zip(one.adapter.peek(seq, layer), other.adapter.peek(seq, layer), strict=True)
            if not all(same_bits(a.contiguous(), b.contiguous()) for a, b in pairs):
                what = f"sequence {seq}, layer {layer} differs from the run without {difference}"
                other.fail(Finding(what, Location(layer, {seq: None})))


def _compare_arenas(one: Machine, other: Machine, difference: str) -> None:
    scratch = list(one.adapter.scratch_blocks)
    expected, found = one.look().arena, other.look(copies=False)
    if expected is None or found.arena is None or one.payload.tolerance:
        return
    if one.oracle.finds_blocks:  # options may change what is kept for later
        return
    for was, now in zip(expected, found.arena, strict=True):
        was[:, scratch] = now[:, scratch]
    if change := find_change(other.observation(found), expected, found.arena):
        what = f"the whole cache differs from the run without {difference}"
        other.fail(Finding(what, change[0]))
