"""Two histories that must end alike, run on two caches and compared without the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.cases.history import (
    Append,
    Copy,
    Fork,
    History,
    Operation,
    SetOptions,
    apply_to_oracle,
    is_write,
)
from pytest_roseinfer.cases.payload import same_bits
from pytest_roseinfer.findings.location import Place, find_change
from pytest_roseinfer.oracle import Oracle
from pytest_roseinfer.running.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_roseinfer.adapters.cache import KVCacheAdapter


def check_permuted(adapter: type[KVCacheAdapter], history: History) -> None:
    """Appending to sequences in another order changes no sequence."""

    def turned(step: Append) -> list[Operation]:
        return [replace(step, seqs=step.seqs[::-1])]

    history = _roomy(adapter, history)
    _check_alike(adapter, history, _with_appends(history, turned), "its batches in reverse order")


def check_split(adapter: type[KVCacheAdapter], history: History) -> None:
    """Two appends of half the rows each do what one of all rows does."""

    def halved(step: Append) -> list[Operation]:
        at = len(step.seqs) // 2
        halves = [step.seqs[:at], step.seqs[at:]]
        return [replace(step, seqs=half) for half in halves if half]

    history = _roomy(adapter, history)
    _check_alike(adapter, history, _with_appends(history, halved), "its batches split in two")


def check_copied(adapter: type[KVCacheAdapter], history: History) -> None:
    """A fork behaves as a sequence of its own with the same tokens."""
    history = _roomy(adapter, history)
    oracle = Oracle(history.spec.block_size, history.spec.num_blocks)
    steps: list[Operation] = []
    for step in history.operations:
        if isinstance(step, Fork):
            steps.append(Copy(step.parent, step.child, oracle.length(step.parent)))
        else:
            steps.append(step)
        apply_to_oracle(oracle, step)
    copied = replace(history, operations=tuple(steps))
    _check_alike(adapter, history, copied, "copies in place of its forks")


def check_every_option(adapter: type[KVCacheAdapter], history: History) -> None:
    """The same history under every setting of every switch ends in the same bits."""
    steps = tuple(step for step in history.operations if not isinstance(step, SetOptions))
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    first: Machine | None = None
    for options in _settings(adapter):
        same = replace(
            history, spec=replace(history.spec, options={**usual, **options}), operations=steps
        )
        machine = _ran(adapter, same)
        if first is None:
            first = machine
        else:
            _compare(first, machine, f"options {options}")
            _compare_arenas(first, machine, f"options {options}")


def _settings(adapter: type[KVCacheAdapter]) -> Iterator[dict[str, Any]]:
    """The usual setting, each switch changed alone, and all of them changed."""
    yield {}
    for name, values in adapter.option_choices.items():
        for value in values[1:]:
            yield {name: value}
    yield {name: values[-1] for name, values in adapter.option_choices.items()}


def _roomy(adapter: type[KVCacheAdapter], history: History) -> History:
    """What the history gets done, on a cache so large that its copies would fit as well."""
    spec = history.spec
    oracle = Oracle(spec.block_size, spec.num_blocks, adapter.fork_shares)
    steps = tuple(step for step in history.operations if apply_to_oracle(oracle, step))
    endless = Oracle(spec.block_size, capacity=1 << 40)
    blocks = 1
    for step in steps:
        if is_write(step):
            blocks += endless.pages_needed(step.rows())
        elif isinstance(step, Fork):
            blocks += len(endless.sequences[step.parent]) + 1
        apply_to_oracle(endless, step)
    return replace(history, spec=replace(spec, num_blocks=blocks), operations=steps)


def _with_appends(history: History, change: Callable[[Append], list[Operation]]) -> History:
    steps: list[Operation] = []
    for step in history.operations:
        steps += change(step) if isinstance(step, Append) else [step]
    return replace(history, operations=tuple(steps))


def _ran(adapter: type[KVCacheAdapter], history: History) -> Machine:
    machine = Machine(adapter, history, attends=False)
    machine.run()
    return machine


def _check_alike(
    adapter: type[KVCacheAdapter], history: History, other: History, difference: str
) -> None:
    one = _ran(adapter, history)
    if other != history:
        _compare(one, _ran(adapter, other), difference)


def _compare(one: Machine, other: Machine, difference: str) -> None:
    for seq in one.oracle.sequences:
        for layer in range(one.spec.num_layers):
            pairs = zip(one.adapter.peek(seq, layer), other.adapter.peek(seq, layer), strict=True)
            if not all(same_bits(a.contiguous(), b.contiguous()) for a, b in pairs):
                other.fail(
                    f"sequence {seq}, layer {layer} differs from the run without {difference}",
                    place=Place(layer, {seq: None}),
                )


def _compare_arenas(one: Machine, other: Machine, difference: str) -> None:
    if "arena" not in one.can:
        return
    scratch = list(one.adapter.scratch_blocks)
    for kind, was, now in zip("KV", one.adapter.arena(), other.adapter.arena(), strict=True):
        expected = was.clone()
        expected[:, scratch] = now[:, scratch]
        if place := find_change(other, kind, expected, now):
            what = f"the whole cache differs from the run without {difference}"
            other.fail(what, place=place)
