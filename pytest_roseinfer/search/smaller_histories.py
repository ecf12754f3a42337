"""Lists the histories that are smaller than one in one way: fewer steps, or less in each.

Each way leaves what makes sense: a step whose sequence is gone is left out, and one that brings
something back brings back what is there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations.lookups.take import Take
from pytest_roseinfer.cases.operations.operation import MOST_SEQUENCES, NAMING, Write
from pytest_roseinfer.cases.operations.sequences.free import Free
from pytest_roseinfer.cases.operations.set_options import SetOptions
from pytest_roseinfer.cases.operations.writes.append import Append
from pytest_roseinfer.cases.operations.writes.append_many import AppendMany
from pytest_roseinfer.cases.operations.writes.fill import Fill
from pytest_roseinfer.cases.operations.writes.prefill import Prefill
from pytest_roseinfer.oracle.windowed import ORACLES
from pytest_roseinfer.search.smaller_caches import fewest_blocks, smaller_caches
from pytest_roseinfer.search.smaller_steps import replace_field, simpler_steps, with_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.cases.history import History
    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle

_MANY_ROWS = 2 * MOST_SEQUENCES
"""Few drawn steps have more rows."""


def passes_of_histories(
    adapter: type[KVCacheAdapter],
) -> list[Callable[[History], Iterator[History]]]:
    """Return the ways to make a history of this adapter smaller, the most thorough last."""
    ways = (
        _without_steps_if_large,
        _without_a_sequence,
        _without_steps,
        _with_one_sequence_for_two,
        _with_switches_set_before,
        smaller_caches,
        _with_simpler_steps,
        _with_all_numbers_lower,
        _with_joined_steps,
        _without_two_steps,
        _with_less_room,
        _renamed,
    )
    return [partial(_sensible, way, adapter) for way in ways]


def _sensible(
    way: Callable[[type[KVCacheAdapter], History], Iterator[History]],
    adapter: type[KVCacheAdapter],
    history: History,
) -> Iterator[History]:
    for smaller in way(adapter, history):
        sensible = what_makes_sense(adapter, smaller)
        if 0 < sensible.size <= history.size:
            yield sensible


def what_makes_sense(adapter: type[KVCacheAdapter], history: History) -> History:
    """Leave out the steps that cannot be done or drawn; end what is left half done."""
    oracle = _oracle(adapter, history)
    shows_room = "ledger" in adapter.abilities
    kept: list[Operation] = []
    for each in history.operations:
        step = each.fitted(oracle)
        if not _can_be_done(step, oracle):
            continue
        fits = step.fits(oracle) or not step.allowed(oracle)
        if not (fits or shows_room):
            continue
        step.apply(oracle)
        kept.append(step)
        if not fits and adapter.sharing == "equal prefixes":
            break  # it may find room all the same, and nobody knows what it holds then
    kept += [Fill()] * len(oracle.reserved)
    kept += map(Take, oracle.looked_up)
    return replace(history, operations=tuple(kept))


def _oracle(adapter: type[KVCacheAdapter], history: History) -> Oracle:
    return ORACLES[bool(history.spec.windows)].of(adapter, history.spec, history.texts)


def _can_be_done(step: Operation, oracle: Oracle) -> bool:
    unwritten = {seq for due in oracle.reserved for seq, _ in due.rows}
    return unwritten.isdisjoint([*step.changed(), *step.uses()]) and step.possible(oracle)


def _with(history: History, steps: Iterable[Operation]) -> History:
    return replace(history, operations=tuple(steps))


def _without_a_sequence(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    names = {seq: None for step in history.operations for seq in _names(step)}
    for seq in reversed(names):
        left = (_without_rows_of(seq, step) for step in history.operations)
        yield _with(history, (step for step in left if step))


def _with_one_sequence_for_two(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Do to one sequence what is done to two, such as a fork and its parent."""
    names = dict.fromkeys(seq for step in history.operations for seq in _names(step))
    for kept, gone in combinations(names, 2):
        as_one = {**{seq: seq for seq in names}, gone: kept}
        apart = (
            _without_rows_of(gone, step) if kept in _names(step) else step
            for step in history.operations
        )
        merged = [_with_names(step, as_one) for step in apart if step]
        yield _with(history, merged)
        if Free(kept) in merged:
            yield _with(history, (step for step in merged if step != Free(kept)))


def _without_rows_of(seq: int, step: Operation) -> Operation | None:
    """Return a step without the rows of a sequence; None if nothing is left of it."""
    if seq not in _names(step):
        return step
    fewer = simpler_steps(step, {})
    return next((each for each in fewer if [*_names(each)] == _others(seq, step)), None)


def _others(seq: int, step: Operation) -> list[int]:
    return [name for name in _names(step) if name != seq]


def _names(step: Operation) -> Iterator[int]:
    for name in NAMING:
        value = getattr(step, name, ())
        named = value if isinstance(value, tuple) else (value,)
        yield from (seq for seq in named if seq is not None)


def _without_steps(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Leave out steps that follow each other: half of all, then fewer, from the end on."""
    steps, many = history.operations, history.size
    while many := many // 2:
        for end in range(len(steps), many - 1, -many):
            yield _with(history, (*steps[: end - many], *steps[end:]))


def _without_steps_if_large(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Leave out steps before sequences where steps have many rows: each then takes long to try."""
    if any(len(step.rows()) > _MANY_ROWS for step in history.operations):
        yield from _without_steps(adapter, history)


def _without_two_steps(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    steps = history.operations
    for pair in combinations(reversed(range(len(steps))), 2):
        yield _with(history, (step for at, step in enumerate(steps) if at not in pair))


def _with_less_room(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Leave something out, and as many blocks as it took, for what is wrong where few are free."""
    free = _free(adapter, history)
    for way in (_without_a_sequence, _without_steps, _without_two_steps, _with_simpler_steps):
        for left in way(adapter, history):
            smaller = what_makes_sense(adapter, left)
            blocks = smaller.spec.num_blocks - _free(adapter, smaller) + free
            if fewest_blocks(smaller.spec) <= blocks < smaller.spec.num_blocks:
                yield replace(smaller, spec=replace(smaller.spec, num_blocks=blocks))


def _free(adapter: type[KVCacheAdapter], history: History) -> int:
    """Count the blocks that are free in the end."""
    oracle = _oracle(adapter, history)
    for step in history.operations:
        step.apply(oracle)
    return oracle.pages_free()


def _with_switches_set_before(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Build the cache with the switches that a step sets."""
    steps = history.operations
    for at, step in enumerate(steps):
        if isinstance(step, SetOptions):
            spec = replace(history.spec, options=step.options)
            yield _with(replace(history, spec=spec), (*steps[:at], *steps[at + 1 :]))


def _with_joined_steps(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Have one step that writes be a plain append, or two be one."""
    steps = history.operations
    writing = {at: dict(step.rows()) for at, step in enumerate(steps) if isinstance(step, Write)}
    for at, rows in writing.items():
        if {*rows.values()} == {1}:
            yield _with(history, (*steps[:at], Append(tuple(rows)), *steps[at + 1 :]))
    for first, second in combinations(writing, 2):
        rows = Counter(writing[first]) + Counter(writing[second])
        between, behind = steps[first + 1 : second], steps[second + 1 :]
        for joined in _writes(rows):
            if joined.needs <= adapter.abilities:
                yield _with(history, (*steps[:first], joined, *between, *behind))


def _writes(rows: Mapping[int, int]) -> Iterator[Operation]:
    """List the steps that write so many tokens to each sequence."""
    if {*rows.values()} == {1}:
        yield Append(tuple(rows))
    if len(rows) == 1:
        yield from (Prefill(seq, count) for seq, count in rows.items())
    for names in dict.fromkeys([tuple(rows), tuple(reversed(rows))]):
        yield AppendMany(names, tuple(rows[seq] for seq in names))


def _with_simpler_steps(adapter: type[KVCacheAdapter], history: History) -> Iterator[History]:
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    steps = history.operations
    for at in reversed(range(len(steps))):
        for simpler in simpler_steps(steps[at], usual):
            yield _with(history, (*steps[:at], simpler, *steps[at + 1 :]))


def _with_all_numbers_lower(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Lower all numbers at once, by some blocks or by one, so that they go on fitting together."""
    size = history.spec.block_size
    for less in (4 * size, size, 1):
        lowered = (with_numbers(step, partial(_less, less)) for step in history.operations)
        yield _with(history, lowered)


def _less(less: int, number: int) -> int:
    return number - less if number > less else number


def _renamed(_: type[KVCacheAdapter], history: History) -> Iterator[History]:
    """Number the sequences in the order in which they come."""
    seen = dict.fromkeys(seq for step in history.operations for seq in _names(step))
    numbers = {seq: number for number, seq in enumerate(seen)}
    yield _with(history, (_with_names(step, numbers) for step in history.operations))


def _with_names(step: Operation, numbers: dict[int, int]) -> Operation:
    for name in NAMING:
        value = getattr(step, name, ())
        if isinstance(value, int):
            step = replace_field(step, name, numbers[value])
        elif value:
            step = replace_field(
                step, name, tuple(None if seq is None else numbers[seq] for seq in value)
            )
    return step
