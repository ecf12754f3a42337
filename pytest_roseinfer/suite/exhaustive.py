"""The bounded-exhaustive search: every history of a few steps on a small cache."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter
from pytest_roseinfer.adapters.load_target import TargetError, load_target
from pytest_roseinfer.cases.every_step import SEQUENCES, every_step, every_texts
from pytest_roseinfer.cases.history import GATHERS_EVERY, History
from pytest_roseinfer.cases.layer_windows import with_windows
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.running.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.oracle.oracle import Oracle

# Runs every history of a few steps on a small cache.


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


STEPS = 6
_PROCESSES = 2
_DIVIDED_AT = 3
"""So many steps are walked by one process, which leaves what comes after them to all."""
_SAID_EVERY = 10.0
"""Seconds between two lines that say how far it has come."""
_KERNELS_OFF = {"triton": False}
"""Triton's interpreter takes ten times as long; the books are the same without."""
SHIPPED: Mapping[str, Mapping[str, Any]] = {
    name: _KERNELS_OFF for name in settings.SHIPPED_TARGETS if "Manager" in name
}
"""The caches of this distribution, and what is set for them."""


@dataclass(slots=True)
class Result:
    """What became of every history of one cache."""

    walked: Walked = field(default_factory=Walked)
    wrong: str = ""
    """The first divergence, in words and with its picture."""

    def add(self, other: Result) -> None:
        self.walked.histories += other.walked.histories
        self.walked.states |= other.walked.states
        self.wrong = self.wrong or other.wrong


def run(targets: Sequence[str], steps: int = STEPS) -> int:
    """Walk these caches, or those of this distribution; return the exit status."""
    named: Mapping[str, Mapping[str, Any]] = {name: {} for name in targets} or SHIPPED
    print(
        f"every history of up to {steps} steps, on {BLOCKS} blocks of {BLOCK_SIZE} tokens and "
        f"{SEQUENCES} sequences",
        flush=True,
    )
    settings.choose_kernel_runtime()
    for name in named:
        _cache(name)
    spawn = get_context("spawn")  # a forked torch may hang
    status = 0
    for name, options in named.items():
        print(f"{name}: begun", file=sys.stderr, flush=True)
        began = time.monotonic()
        with ProcessPoolExecutor(_PROCESSES, mp_context=spawn) as pool:
            found = every_history(name, options, steps, pool)
        took = time.monotonic() - began
        said = f"{found.walked.histories} histories, {len(found.walked.states)} states"
        if found.wrong:
            status = 1
            print(f"{name}: wrong, found by {said} ({took:.0f} s)\n\n{found.wrong}")
        else:
            print(f"{name}: {said}, all equal ({took:.0f} s)", flush=True)
    return status


def every_history(name: str, options: Mapping[str, Any], steps: int, pool: Executor) -> Result:
    """Walk one cache, and shut the pool down once one history is wrong."""
    adapter = _cache(name)
    found = Result()
    parts: list[History] = []
    for history in beginnings(adapter, options):
        found.add(_walked(adapter, history, min(steps, _DIVIDED_AT), parts))
    if steps <= _DIVIDED_AT or found.wrong:
        return found
    # What a process walks on from was run already, and is not counted twice.
    found.walked.histories -= len(parts)
    said = time.monotonic()
    walked = pool.map(partial(_walk_on, name, steps), map(History.to_json, parts))
    for done, part in enumerate(walked, 1):
        found.add(part)
        if time.monotonic() - said >= _SAID_EVERY:
            said = time.monotonic()
            come = f"{done} of {len(parts)} parts, {found.walked.histories} histories"
            print(f"{name}: {come}", file=sys.stderr, flush=True)
        if found.wrong:
            pool.shutdown(cancel_futures=True)
            break
    return found


def _walk_on(name: str, steps: int, beginning: Mapping[str, Any]) -> Result:
    return _walked(_cache(name), History.from_json(beginning), steps, [])


def _walked(
    adapter: type[KVCacheAdapter], history: History, steps: int, longest: list[History]
) -> Result:
    found = Result()
    try:
        longest += walk(adapter, history, steps, found.walked)
    except Divergence as wrong:
        found.wrong = str(wrong)
    return found


def _cache(name: str) -> type[KVCacheAdapter]:
    adapter = load_target(name)
    if not issubclass(adapter, KVCacheAdapter):
        raise TargetError(f"{name} is the adapter of an engine, and must be one of a cache")
    return adapter
