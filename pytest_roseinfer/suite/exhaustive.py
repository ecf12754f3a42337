"""The bounded-exhaustive search: every history of a few steps on a small cache."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.load_target import TargetError, load_target
from pytest_roseinfer.capabilities.cache_data import CacheSpec
from pytest_roseinfer.capabilities.capability import Walk
from pytest_roseinfer.capabilities.prefixes import looked_up
from pytest_roseinfer.capabilities.windows import with_windows
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.histories.history import GATHERS_EVERY, History
from pytest_roseinfer.oracle.texts import WHOLE
from pytest_roseinfer.run.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.texts import Branch

# Lists every step that may come next in a small history, those that only differ in names once.
#
# A cache is taken not to care which of its new names, or of its texts, is the first.


SEQUENCES = 2
"""The most that there are at a time."""


def every_texts(adapter: type[KVCacheAdapter]) -> list[tuple[Branch, ...]]:
    """List what two sequences may say: the same, or what parts after one token or a few."""
    if "use_tokens" not in adapter.abilities:
        return [()]
    parting: list[tuple[Branch, ...]] = [((0, 0), (0, length)) for length in (2, 1, 3)]
    apart: list[tuple[Branch, ...]] = [((0, 0), (0, WHOLE, 1))]
    return [((0, 0),), *(apart if "use_namespaces" in adapter.abilities else ()), *parting]


def every_step(adapter: type[KVCacheAdapter], oracle: Oracle) -> list[Operation]:
    """List the steps that a cache can take which offers what this adapter does."""
    shows_room, walk = "ledger" in adapter.abilities, Walk(oracle, _names(oracle))
    every = (step for one in adapter.capabilities if one.walk for step in one.walk(walk))
    steps = [
        step
        for step in every
        if step.needs <= adapter.abilities and (shows_room or step.fits(oracle))
    ]
    # Those that begin no sequence come first.
    return sorted(steps, key=lambda step: not oracle.sequences.keys() >= {*step.changed()})


def _names(oracle: Oracle) -> list[int]:
    """List the names that a sequence can begin under.

    A name that was used before is no other's equal, since a cache may remember it. Where texts
    part, the name says which text it is, and each sequence has one of its own.
    """
    taken = {*oracle.sequences, *oracle.promised}
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
    if groups := adapter.windows.groups:
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
    named = (*sorted(oracle.sequences), -1, *sorted(looked_up(oracle).items()))
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
