"""Metamorphic checks: variants of a history that must end with equal contents."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from pytest_roseinfer.capabilities.observation import Finding, Location, find_change
from pytest_roseinfer.capabilities.payload import same_bits
from pytest_roseinfer.capabilities.prefixes import BeginWith, Collisions, pending_prefixes
from pytest_roseinfer.capabilities.truncation import Truncate, TruncateMany
from pytest_roseinfer.oracle.oracle import Oracle
from pytest_roseinfer.oracle.pages import Windows
from pytest_roseinfer.run.machine import HistoryRunner

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.histories.history import History

Checked = Counter[str]
"""Number of checks of each invariant."""


def check_permuted(adapter: type[KVCacheAdapter], history: History) -> Checked:
    """Check that the order of rows in batches does not change any sequence."""
    history = roomy(adapter, history)
    in_reverse = [[step.reversed()] for step in history.operations]
    return _check_alike(adapter, history, in_reverse, "its batches in reverse order")


def check_split(adapter: type[KVCacheAdapter], history: History) -> Checked:
    """Check that two batches of half the rows each equal one batch of all rows."""
    history = roomy(adapter, history)
    halves = [step.halves() for step in history.operations]
    return _check_alike(adapter, history, halves, "its batches split in two")


def check_copied(adapter: type[KVCacheAdapter], history: History) -> Checked:
    """Check that a fork behaves like a copy of its parent that shares no blocks."""
    history = roomy(adapter, history)
    oracle, of_copies = (_plain(adapter, history, history.spec.num_blocks) for _ in range(2))
    steps: list[Operation] = []
    copied: list[list[Operation]] = []
    for step in history.operations:
        copy = step.without_sharing(oracle)
        # A copy is one write, so it may lack checkpoints that a fork has from its parent.
        truncates = isinstance(step, (Truncate, TruncateMany))
        if truncates and not (step.allowed(oracle) and copy.allowed(of_copies)):
            continue
        steps.append(step)
        copied.append([copy])
        step.apply(oracle)
        copy.apply(of_copies)
    history = _with(history, steps)
    return _check_alike(adapter, history, copied, "copies in place of its forks")


def check_every_option(adapter: type[KVCacheAdapter], history: History) -> Checked:
    """Check that a history ends with the same bits under every value of each switch."""
    if adapter.lookahead_blocks:  # else switches may change which steps find no room
        history = roomy(adapter, history)
    choices = adapter.option_choices
    usual = {name: values[0] for name, values in choices.items()}
    alone = [{name: value} for name, values in choices.items() for value in values[1:]]
    settings = [*alone, {name: values[-1] for name, values in choices.items()}]
    specs = [replace(history.spec, options={**usual, **options}) for options in ({}, *settings)]
    steps = _keep_common_steps(adapter, specs, history)
    first, *others = (_run(adapter, _with(replace(history, spec=spec), steps)) for spec in specs)
    checked = Counter(first.invariant_checks)
    for options, machine in zip(settings, others, strict=True):
        checked.update(machine.invariant_checks)
        _compare(first, machine, f"options {options}")
        if "use_queue" not in machine.features:  # with queues, poisoning times differ
            _compare_arenas(first, machine, f"options {options}")
    return checked


ROOMY = frozenset({check_permuted.__name__, check_split.__name__, check_copied.__name__})
"""Names of the checks that run ``roomy(history)`` instead of the history."""


def _keep_common_steps(
    adapter: type[KVCacheAdapter], specs: list[CacheSpec], history: History
) -> list[Operation]:
    """Keep the steps that change no switches and that caches of all these specs allow.

    Later steps that depend on an omitted step are left out too.
    """
    oracles = [Oracle.of(adapter, spec) for spec in specs]
    shows_room = "ledger" in adapter.abilities
    steps = []
    for step in history.operations:
        possible = all(step.possible(each) and step.allowed(each) for each in oracles)
        if "set_options" in step.needs or not possible:
            continue
        fits = [step.apply(each) for each in oracles]
        if all(fits) or shows_room:
            steps.append(step)
    return steps


def roomy(adapter: type[KVCacheAdapter], history: History) -> History:
    """Return the admitted steps, for a cache so large that copies in place of forks fit too.

    The function is idempotent.
    """
    spec = history.spec
    oracle = Oracle.of(adapter, spec, history.texts)
    steps: list[Operation] = []
    for step in history.operations:
        if admitted := step.admitted_part(oracle):
            steps.append(admitted)
        step.apply(oracle)
    endless = _plain(adapter, history, 1 << 40)
    names = {seq for step in steps for seq in step.changed_seqs()}
    blocks = 1 + adapter.lookahead_blocks * (len(names) + 1)
    for step in steps:
        rows = step.without_sharing(endless).rows()
        if isinstance(step, BeginWith):  # it may reuse all tokens that were looked up
            rows = [(step.seq, pending_prefixes(endless)[step.seq])]
        blocks += endless.pages_needed(rows)
        blocks += sum(-(-endless.length(seq) // spec.block_size) for seq in step.forked_seqs())
        step.apply(endless)
        if isinstance(step, BeginWith):
            endless.append(rows, endless.new_tokens(rows))
    # Groups of layers with different windows may share one pool.
    blocks *= max(1, len({*spec.windows}))
    return _with(replace(history, spec=replace(spec, num_blocks=blocks)), steps)


def _plain(adapter: type[KVCacheAdapter], history: History, capacity: int) -> Oracle:
    """Return the oracle of a cache without windows, whose forks share all blocks."""
    return replace(
        Oracle.of(adapter, history.spec, history.texts),
        capacity=capacity,
        fork_shares="blocks",
        truncate_copies=False,
        windows=Windows(),
    )


def _with(history: History, steps: Iterable[Operation]) -> History:
    return replace(history, operations=tuple(steps))


def _run(adapter: type[KVCacheAdapter], history: History) -> HistoryRunner:
    machine = HistoryRunner(adapter, history, attends=False)
    machine.run()
    return machine


def _check_alike(
    adapter: type[KVCacheAdapter],
    history: History,
    variants: Sequence[Sequence[Operation]],
    difference: str,
) -> Checked:
    """Check that a history ends like another one, which has these steps in place of each step.

    A step that was not possible in the first run is left out of the second, where a part of it may
    be possible.
    """
    one = _run(adapter, history)
    checked = Counter(one.invariant_checks)
    if [*chain.from_iterable(variants)] != [*history.operations]:
        possible = (each for at, each in enumerate(variants, 1) if at not in one.skipped)
        two = _run(adapter, _with(history, chain.from_iterable(possible)))
        _compare(one, two, difference)
        checked.update(two.invariant_checks)
    return checked


def _compare(one: HistoryRunner, other: HistoryRunner, difference: str) -> None:
    if one.payload.tolerance:
        return  # both are within the tolerance of the written values; they need not be equal
    finds_some = any(
        run.declared.prefixes.finds == "some" or ((met := run.observer(Collisions)) and met.any)
        for run in (one, other)
    )
    for seq in one.oracle.readable:
        if finds_some and one.oracle.length(seq) != other.oracle.length(seq):
            continue  # it reused a longer prefix in one run; the oracle has checked both
        for layer in range(one.spec.num_layers):
            pairs = zip(one.adapter.peek(seq, layer), other.adapter.peek(seq, layer), strict=True)
            if not all(same_bits(a.contiguous(), b.contiguous()) for a, b in pairs):
                problem = f"sequence {seq}, layer {layer} differs from the run without {difference}"
                kind = _kind(difference)
                other.fail(Finding(problem, Location(layer, {seq: None}), kind=kind))


def _compare_arenas(one: HistoryRunner, other: HistoryRunner, difference: str) -> None:
    scratch = list(one.adapter.scratch_blocks)
    expected, after = one.take_snapshot().arena, other.take_snapshot(copies=False)
    if expected is None or after.arena is None or one.payload.tolerance:
        return
    if one.oracle.finds_blocks:  # switches may change which blocks stay cached
        return
    if expected[0].shape != after.arena[0].shape:  # or how much storage there is
        return
    for was, now in zip(expected, after.arena, strict=True):
        was[:, scratch] = now[:, scratch]
    if change := find_change(other.observation(after), expected, after.arena):
        problem = f"the whole cache differs from the run without {difference}"
        other.fail(Finding(problem, change[0], kind=_kind(difference)))


def _kind(difference: str) -> str:
    """Return the kind of findings of a comparison, without the values of switches."""
    return f"differs from the run without {difference.partition(' {')[0]}"
