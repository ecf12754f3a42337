"""Bounded-exhaustive search: every history of a few steps on a small cache."""

from __future__ import annotations

import sys
import time
from collections import Counter
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.load_target import TargetError, load_target
from pytest_roseinfer.capabilities.cache_data import CacheSpec
from pytest_roseinfer.capabilities.capability import Walk
from pytest_roseinfer.capabilities.prefixes import pending_prefixes
from pytest_roseinfer.capabilities.text_keys import keys_by_part
from pytest_roseinfer.capabilities.windows import with_windows
from pytest_roseinfer.findings.divergence import Divergence
from pytest_roseinfer.findings.known import describe_entry, digest_of, read_known
from pytest_roseinfer.histories.history import GATHERS_EVERY, History
from pytest_roseinfer.oracle.texts import WHOLE, repeat_with_keys
from pytest_roseinfer.run.coverage import name_of
from pytest_roseinfer.run.machine import HistoryRunner

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.oracle.oracle import Oracle
    from pytest_roseinfer.oracle.texts import Branch

# Possible next steps of a small history, without those that differ only in names.
#
# The order of new names and of texts is assumed not to matter to a cache.


SEQUENCES = 2
"""Maximum number of sequences at a time."""


def every_texts(adapter: type[KVCacheAdapter]) -> list[tuple[Branch, ...]]:
    """List the texts of two sequences: equal ones, or different after one or a few tokens.

    If a cache has parts of keys, two texts of equal token ids differ in each of these.
    """
    if "use_tokens" not in adapter.abilities:
        return [()]
    parting: list[tuple[Branch, ...]] = [((0, 0), (0, length)) for length in (2, 1, 3)]
    apart: list[tuple[Branch, ...]] = [((0, 0), (0, WHOLE, 1))]
    if adapter.key_parts:
        usual, *others = keys_by_part(adapter.key_parts, BLOCK_SIZE - 1, BLOCK_SIZE + 1)
        apart = [repeat_with_keys(((0, 0),), (usual, other)) for other in others]
        parting = [repeat_with_keys(texts, (usual,)) for texts in parting]
    elif "use_namespaces" not in adapter.abilities:
        apart = []
    return [parting[0][:1], *apart, *parting]


def every_step(adapter: type[KVCacheAdapter], oracle: Oracle) -> list[Operation]:
    """List all possible next steps of a cache with this adapter's abilities."""
    shows_room, walk = "ledger" in adapter.abilities, Walk(oracle, _names(oracle), adapter)
    every = (step for one in adapter.capabilities if one.walk for step in one.walk(walk))
    steps = [
        step
        for step in every
        if step.needs <= adapter.abilities and (shows_room or step.fits(oracle))
    ]
    # Steps that start no sequence come first.
    return sorted(steps, key=lambda step: not oracle.sequences.keys() >= {*step.changed_seqs()})


def _names(oracle: Oracle) -> list[int]:
    """List the names that a new sequence can have.

    Names that were used before are all listed, since a cache may remember them. If texts differ,
    the name determines the text, and each sequence has its own.
    """
    names_in_use = {*oracle.sequences, *oracle.pending_seqs}
    if len(names_in_use) == SEQUENCES:
        return []
    used = names_in_use | {name for name, times in oracle.lives.items() if times}
    if not oracle.texts or len(oracle.texts.initial_branches) == 1:
        new = next(name for name in count() if name not in used)
        return [*sorted(used - names_in_use), *([new] if new < SEQUENCES else [])]
    texts = range(len(oracle.texts.initial_branches) if used else 1)
    return [
        next(n for n in count(text, len(oracle.texts.initial_branches)) if n not in used)
        for text in texts
    ]


# The walk.


BLOCKS, BLOCK_SIZE = 3, 2
WINDOWS = (None, BLOCK_SIZE)
"""Windows of the layers of a cache with groups; with a single group, the last."""


@dataclass(slots=True)
class WalkCounts:
    """Histories and states of a walk."""

    histories: int = 0
    states: set[int] = field(default_factory=set)
    """Hashes of expected contents and of shared blocks."""
    known: Counter[str] = field(default_factory=Counter)
    """Histories that showed each known finding, by its digest."""


def empty_histories(
    adapter: type[KVCacheAdapter], options: Mapping[str, Any] | None = None
) -> Iterator[History]:
    """Return the empty histories that a walk starts from: a small cache, with each of its texts."""
    sizes = adapter.block_sizes
    usual = {name: values[0] for name, values in adapter.option_choices.items()}
    spec = CacheSpec(
        num_heads=min(adapter.head_counts),
        head_dim=min(adapter.head_dims),
        block_size=BLOCK_SIZE if BLOCK_SIZE in sizes else min(sizes),
        num_blocks=BLOCKS + SEQUENCES * adapter.lookahead_blocks,
        dtype=adapter.dtypes[0],
        options={**usual, **(options or {})},
    )
    if windows := adapter.windows.choose(WINDOWS):
        spec = with_windows(spec, adapter, windows)
    each = max(GATHERS_EVERY)  # each prefix of a history is walked too, so all steps are gathered
    return (History(spec, (), texts=texts, gathers_every=each) for texts in every_texts(adapter))


def walk(
    adapter: type[KVCacheAdapter],
    history: History,
    max_steps: int,
    walked: WalkCounts,
    known: Collection[str] = (),
) -> Iterator[History]:
    """Run a history and all its continuations, each on a cache of its own.

    Yield the histories of ``max_steps`` steps, so that the walk can continue from them. Bad calls
    are made when a state is reached for the first time. A wrong cache raises ``Divergence`` after
    the first step that shows the error; where that is one of the ``known`` findings, it is counted,
    and the history is not continued.
    """
    machine = HistoryRunner(adapter, history, attends=False)
    walked.histories += 1
    try:
        machine.run_steps()
        state = _state(machine.oracle)
        if state not in walked.states:
            walked.states.add(state)
            HistoryRunner(adapter, history, attends=False).run()
    except Divergence as wrong:
        if (digest := digest_of(name_of(adapter), wrong)) not in known:
            raise
        walked.known[digest] += 1
        return
    if history.size == max_steps:
        yield history
        return
    for step in every_step(adapter, machine.oracle):
        longer = replace(history, operations=(*history.operations, step))
        yield from walk(adapter, longer, max_steps, walked, known)


def _state(oracle: Oracle) -> int:
    """Hash the sequences, their contents, their shared blocks and pending prefixes."""
    numbers: dict[int, int] = {}
    tables_held = [
        (seq, numbers.setdefault(id(page), len(numbers)), *oracle.tokens_on(seq, at))
        for seq, pages in sorted(oracle.sequences.items())
        for at, page in enumerate(pages)
    ]
    named = (*sorted(oracle.sequences), -1, *sorted(pending_prefixes(oracle).items()))
    return hash((named, *tables_held))


STEPS = 6
_PROCESSES = 2
_DIVIDED_AT = 3
"""Number of first steps that one process walks before the rest is split among processes."""
_SAID_EVERY = 10.0
"""Seconds between two lines of progress."""
_KERNELS_OFF = {"triton": False}
"""Options without Triton, whose interpreter takes ten times as long; the books are the same."""
SHIPPED: Mapping[str, Mapping[str, Any]] = {
    name: _KERNELS_OFF for name in settings.SHIPPED_TARGETS if "Manager" in name
}
"""roseinfer's own caches, with their options."""


@dataclass(slots=True)
class Result:
    """Result of a walk of one cache."""

    walked: WalkCounts = field(default_factory=WalkCounts)
    wrong: str = ""
    """Message of the first divergence, with its picture and digest; empty without one."""

    def add(self, other: Result) -> None:
        self.walked.histories += other.walked.histories
        self.walked.states |= other.walked.states
        self.walked.known += other.walked.known
        self.wrong = self.wrong or other.wrong


def run(targets: Sequence[str], steps: int = STEPS) -> int:
    """Walk these caches, or roseinfer's own; return the exit status."""
    named: Mapping[str, Mapping[str, Any]] = {name: {} for name in targets} or SHIPPED
    print(
        f"every history of up to {steps} steps, on {BLOCKS} blocks of {BLOCK_SIZE} tokens and "
        f"{SEQUENCES} sequences",
        flush=True,
    )
    settings.choose_kernel_runtime()
    file = Path(settings.current().known_file)
    findings = read_known(file) if file.exists() else {}
    for name in named:
        _cache(name)
    spawn = get_context("spawn")  # a forked torch may hang
    status = 0
    for name, options in named.items():
        print(f"{name}: begun", file=sys.stderr, flush=True)
        began = time.monotonic()
        known = {digest for digest, each in findings.items() if each.target == name}
        with ProcessPoolExecutor(_PROCESSES, mp_context=spawn) as pool:
            result = every_history(name, options, steps, pool, known)
        took = time.monotonic() - began
        counts = f"{result.walked.histories} histories, {len(result.walked.states)} states"
        if result.wrong:
            status = 1
            print(f"{name}: wrong, found by {counts} ({took:.0f} s)\n\n{result.wrong}")
        else:
            met = "".join(
                f"\n  {times} of them: {findings[digest]}"
                for digest, times in result.walked.known.items()
            )
            but = ", all equal but for known findings" if met else ", all equal"
            print(f"{name}: {counts}{but} ({took:.0f} s){met}", flush=True)
    return status


def every_history(
    name: str,
    options: Mapping[str, Any],
    steps: int,
    pool: Executor,
    known: Collection[str] = (),
) -> Result:
    """Walk one cache in a pool, which is shut down at the first wrong history."""
    adapter = _cache(name)
    result = Result()
    parts: list[History] = []
    for history in empty_histories(adapter, options):
        result.add(_walk_group(adapter, history, min(steps, _DIVIDED_AT), parts, known))
    if steps <= _DIVIDED_AT or result.wrong:
        return result
    # Processes run the histories they start from again, which must not count twice.
    result.walked.histories -= len(parts)
    last_line = time.monotonic()
    walked = pool.map(partial(_walk_on, name, steps, known), map(History.to_json, parts))
    for done, part in enumerate(walked, 1):
        result.add(part)
        if time.monotonic() - last_line >= _SAID_EVERY:
            last_line = time.monotonic()
            progress = f"{done} of {len(parts)} parts, {result.walked.histories} histories"
            print(f"{name}: {progress}", file=sys.stderr, flush=True)
        if result.wrong:
            pool.shutdown(cancel_futures=True)
            break
    return result


def _walk_on(name: str, steps: int, known: Collection[str], beginning: Mapping[str, Any]) -> Result:
    return _walk_group(_cache(name), History.from_json(beginning), steps, [], known)


def _walk_group(
    adapter: type[KVCacheAdapter],
    history: History,
    steps: int,
    longest: list[History],
    known: Collection[str],
) -> Result:
    result = Result()
    try:
        longest += walk(adapter, history, steps, result.walked, known)
    except Divergence as wrong:
        name = name_of(adapter)
        entry = describe_entry(digest_of(name, wrong), name, "test_histories")
        result.wrong = f"{wrong}\n\n{entry}"
    return result


def _cache(name: str) -> type[KVCacheAdapter]:
    adapter = load_target(name)
    if not issubclass(adapter, KVCacheAdapter):
        raise TargetError(f"{name}: adapter of an engine; --exhaustive needs one of a cache")
    return adapter
