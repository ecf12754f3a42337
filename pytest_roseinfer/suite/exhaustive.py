"""``roseinfer verify --exhaustive``: run every short history of a small cache, on two processes."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.load_target import TargetError, load_target
from pytest_roseinfer.cases.every_step import SEQUENCES
from pytest_roseinfer.cases.history import History
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.search.walk import BLOCK_SIZE, BLOCKS, Walked, beginnings, walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
