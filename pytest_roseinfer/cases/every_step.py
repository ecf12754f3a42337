"""Lists every step that may come next in a small history, those that only differ in names once.

A cache is taken not to care which of its new names, or of its texts, is the first.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from pytest_roseinfer.cases.operations.lookups.look_up import LookUp
from pytest_roseinfer.cases.operations.lookups.take import Take
from pytest_roseinfer.cases.operations.sequences.fork import Fork
from pytest_roseinfer.cases.operations.sequences.free import Free
from pytest_roseinfer.cases.operations.sequences.truncate import Truncate
from pytest_roseinfer.cases.operations.writes.append import Append
from pytest_roseinfer.cases.operations.writes.prefill import Prefill
from pytest_roseinfer.oracle.texts import WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.texts import Branch

SEQUENCES = 2
"""The most that there are at a time."""


def every_texts(adapter: type[KVCacheAdapter]) -> list[tuple[Branch, ...]]:
    """List what two sequences may say: the same, or what parts after one token or a few."""
    if "texts" not in adapter.abilities:
        return [()]
    parting: list[tuple[Branch, ...]] = [((0, 0), (0, length)) for length in (2, 1, 3)]
    apart: list[tuple[Branch, ...]] = [((0, 0), (0, WHOLE, 1))]
    return [((0, 0),), *(apart if "namespaces" in adapter.abilities else ()), *parting]


def every_step(adapter: type[KVCacheAdapter], oracle: Oracle) -> list[Operation]:
    """List the steps that a cache can take which offers what this adapter does."""
    shows_room = "ledger" in adapter.abilities
    steps = [*_of_live(oracle), *_of_new(oracle)]
    return [
        step
        for step in steps
        if step.needs <= adapter.abilities and (shows_room or step.fits(oracle))
    ]


def _of_live(oracle: Oracle) -> Iterator[Operation]:
    live = [*oracle.sequences]
    for seq in live:
        yield Append((seq,))
        yield Free(seq)
        if oracle.length(seq):
            yield Truncate(seq, oracle.length(seq) - 1)
    if len(live) > 1:
        yield Append(tuple(live))
        yield Append(tuple(live[::-1]))


def _of_new(oracle: Oracle) -> Iterator[Operation]:
    size = oracle.block_size
    for name in _names(oracle):
        yield Append((name,))
        yield from (Fork(seq, name) for seq in oracle.sequences if oracle.length(seq))
        if not oracle.texts:
            continue
        # All blocks that are left are needed, so that what is kept for later texts is evicted.
        if free := oracle.pages_free():
            yield from (Prefill(name, blocks * size) for blocks in (free, free + 1))
        if oracle.sequences or oracle.lives:
            yield from (LookUp(name, blocks * size) for blocks in (1, 2))
    yield from map(Take, oracle.looked_up)


def _names(oracle: Oracle) -> list[int]:
    """List the names that a sequence can begin under.

    A name that was used before is no other's equal, since a cache may remember it. Where texts
    part, the name says which text it is, and each sequence has one of its own.
    """
    taken = {*oracle.sequences, *oracle.looked_up}
    if len(taken) == SEQUENCES:
        return []
    used = taken | {name for name, times in oracle.lives.items() if times}
    if not oracle.texts or len(oracle.texts.drawn) == 1:
        new = next(name for name in count() if name not in used)
        return [*sorted(used - taken), *([new] if new < SEQUENCES else [])]
    texts = range(len(oracle.texts.drawn) if used else 1)
    return [
        next(n for n in count(text, len(oracle.texts.drawn)) if n not in used) for text in texts
    ]
