"""Runs every history of a few steps on a small cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_roseinfer.adapters.cache import CacheSpec
from pytest_roseinfer.cases.every_step import every_step, every_texts
from pytest_roseinfer.cases.history import GATHERS_EVERY, History
from pytest_roseinfer.cases.layer_windows import with_windows
from pytest_roseinfer.running.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_roseinfer.adapters.cache import KVCacheAdapter
    from pytest_roseinfer.oracle.oracle import Oracle

BLOCKS, BLOCK_SIZE = 3, 2
WINDOWS = (None, BLOCK_SIZE)
"""Of layers, where a cache has groups of them; one has the last."""


@dataclass(slots=True)
class Walked:
    """What a walk came by."""

    histories: int = 0
    states: set[int] = field(default_factory=set)
    """Hashes of what caches had to hold, and of which blocks were shared."""


def beginnings(
    adapter: type[KVCacheAdapter], options: Mapping[str, Any] | None = None
) -> Iterator[History]:
    """Return the empty histories from which a walk begins: a small cache, and its texts."""
    sizes = adapter.block_sizes
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    spec = CacheSpec(
        num_heads=min(adapter.head_counts),
        head_dim=min(adapter.head_dims),
        block_size=BLOCK_SIZE if BLOCK_SIZE in sizes else min(sizes),
        num_blocks=BLOCKS,
        dtype=adapter.dtypes[0],
        options={**usual, **(options or {})},
    )
    if groups := adapter.window_groups:
        spec = with_windows(spec, adapter, WINDOWS[-groups:])
    each = max(GATHERS_EVERY)  # every beginning of a history is one itself, and so is all gathered
    return (History(spec, (), texts=texts, gathers_every=each) for texts in every_texts(adapter))


def walk(
    adapter: type[KVCacheAdapter], history: History, most: int, walked: Walked
) -> Iterator[History]:
    """Run a history and all that go on from it, each on a cache of its own.

    Those of ``most`` steps are returned, from where one may walk on. Bad calls are made where a
    state is seen first. A cache that is wrong raises ``Divergence`` after the first step that
    shows it.
    """
    machine = Machine(adapter, history, attends=False)
    machine.run_steps()
    walked.histories += 1
    state = _state(machine.oracle)
    if state not in walked.states:
        walked.states.add(state)
        Machine(adapter, history, attends=False).run()
    if history.size == most:
        yield history
        return
    for step in every_step(adapter, machine.oracle):
        longer = replace(history, operations=(*history.operations, step))
        yield from walk(adapter, longer, most, walked)


def _state(oracle: Oracle) -> int:
    """Hash which sequences there are, what they hold and share, and what is to begin."""
    numbers: dict[int, int] = {}
    held = [
        (seq, numbers.setdefault(id(page), len(numbers)), *oracle.tokens_on(seq, at))
        for seq, pages in sorted(oracle.sequences.items())
        for at, page in enumerate(pages)
    ]
    named = (*sorted(oracle.sequences), -1, *sorted(oracle.looked_up.items()))
    return hash((named, *held))
