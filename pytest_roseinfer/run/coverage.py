"""Counts of how often a run reaches declared paths and conditions, and what to aim at next."""

from __future__ import annotations

import json
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count, product
from time import monotonic
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities.cache_data import FINDS_PREFIXES
from pytest_roseinfer.capabilities.writes import (
    BOUNDARY,
    LAST_SHARED,
    MIXED_LENGTHS,
    MIXED_POSITIONS,
    ONE_POSITION,
    SHARED_TWICE,
)
from pytest_roseinfer.findings.timeline import add

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.engine import RequestMix
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.findings.timeline import Found
    from pytest_roseinfer.histories.history import History
    from pytest_roseinfer.oracle.oracle import Oracle

_REQUIRED_WITH = {"hash_collision": "use_hash", "calls_in_flight": "use_queue"}
"""Conditions that are required of a cache that defines these methods, without being named."""
REQUIRED_TIMES = 3
"""How often a path or condition must be reached: once may be luck."""
ENOUGH_TRIES = 1000
"""Examples that could reach something and did not, after which that it is never reached is a fact.

What one in 200 of them reaches is missed by all in 7 of 1,000 runs, one in 100 in none of 10,000.
"""
_TURNS_AGAIN = 5
_MOST_TIMES_THE_EXAMPLES = 10
"""Further turns have at most so many times the examples of the profile."""
_MOST_PRELUDES = 8
"""The examples that are kept for each path and condition."""
_Example = TypeVar("_Example", "History", "RequestMix")
_Turn = tuple[str | None, str, int]
"""A path to aim at, the name of the turn, and the examples due."""


def finds_prefixes(adapter: type[Adapter]) -> bool:
    """Return True for a cache that lets sequences begin with what is found of their texts."""
    shares = issubclass(adapter, KVCacheAdapter) and adapter.prefixes.shares
    return {*adapter.abilities, f"prefixes.shares={shares}"} >= FINDS_PREFIXES


def _has_windows(adapter: type[Adapter]) -> bool:
    return issubclass(adapter, KVCacheAdapter) and adapter.windows.groups > 0


def possible_batches(adapter: type[Adapter]) -> Iterator[str]:
    """Yield the kinds of batches that a cache can have."""
    if not issubclass(adapter, KVCacheAdapter):
        return
    yield MIXED_LENGTHS
    if max(adapter.block_sizes) > 1:
        yield ONE_POSITION
        yield MIXED_POSITIONS
    yield BOUNDARY
    forks = "fork" in adapter.abilities and adapter.prefixes.shares != "none"
    if finds_prefixes(adapter) or (forks and adapter.fork_shares != "nothing"):
        yield SHARED_TWICE
    if forks and adapter.fork_shares == "blocks":
        yield LAST_SHARED


@dataclass(slots=True)
class TargetCoverage:
    """What one target declared, and how often it was reached."""

    paths: dict[str, str]
    """Each with the slow twin it must equal."""
    conditions: list[str]
    tested: list[str] = field(default_factory=list)
    not_offered: list[str] = field(default_factory=list)
    kind: str = "cache"
    """Or ``engine``."""
    aimed: list[str] = field(default_factory=list)
    """The paths whose ``runs_with`` says how to aim at them."""
    called: Counter[str] = field(default_factory=Counter)
    """How often each method of the adapter was called."""
    counts: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    """How many examples could reach each path or condition by their switches."""
    large: Counter[str] = field(default_factory=Counter)
    """How often large histories or wide mixes reached them, which counts for nothing else."""
    together: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """For every path, in how many of the steps that took it each condition was met."""
    checked: Counter[str] = field(default_factory=Counter)
    """How often each invariant was checked."""
    batches: Counter[str] = field(default_factory=Counter)
    """How often drawn histories had each kind of batch that this cache can have."""
    histories: int = 0
    seconds: float = 0.0
    """The time that its searches took, added up over workers."""
    compiled: int = 0
    """The kernels that had to be compiled for it."""
    searched: bool = False
    """The run began to search this target's histories, which is what reaches paths."""
    failed: bool = False
    """A search found a difference, and stopped there."""
    examples: int = 0
    """How many examples its searches were to try, those left out included."""
    left_out: int = 0
    """How many of them were left out, since the time of their test was over."""
    found: list[Found] = field(default_factory=list)
    """The differences that searches found, each once."""
    largest: dict[str, int] = field(default_factory=dict)
    """The most rows of a batch, tokens of a sequence and, of a cache, blocks of a table."""
    large_cut_short: int = 0
    """How many of the large histories or mixes ended early, since their time was over."""

    def note_found(self, found: Found) -> None:
        add(self.found, found)

    def note(self, ran: Mapping[str, int]) -> None:
        """Add the paths that ran and the conditions that were met in one step."""
        self.counts.update(ran)
        met = [name for name in self.conditions if ran.get(name)]
        for name in (*self.paths, *self.twins):
            if ran.get(name):
                self.together[name].update(met)

    def note_tried(self, adapter: type[Adapter], options: Mapping[str, Any]) -> None:
        """Add an example to all that its switches let it reach."""
        device = settings.current().device
        paths = {name for name in self.paths if adapter.paths[name].can_run(options, device)}
        self.tried.update([*paths, *self.conditions])

    def note_sizes(self, step: Operation, oracle: Oracle) -> None:
        """Note how large is what a step has just added to, if it is larger than all before."""
        seqs = [seq for seq, _ in step.rows() if seq in oracle.sequences]
        for seq in seqs:
            blocks, tokens = len(oracle.sequences[seq]), oracle.length(seq)
            self.note_largest({"rows": len(seqs), "blocks": blocks, "tokens": tokens})

    def note_largest(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            self.largest[name] = max(size, self.largest.get(name, 0))

    def searched_for(self, examples: int, left_out: int) -> None:
        self.examples += examples
        self.left_out += left_out

    @property
    def twins(self) -> list[str]:
        """The slow paths that others must equal."""
        return [name for name in dict.fromkeys(self.paths.values()) if name not in self.paths]

    @property
    def abilities(self) -> dict[str, int]:
        """The methods that were tested, and how often each was called."""
        return {name: self.called[name] for name in self.tested}

    def note_batches(self, batches: Mapping[str, int]) -> None:
        """Add how often a history had each kind of batch."""
        for kind in self.batches:
            self.batches[kind] += batches.get(kind, 0)

    def short(self, since: Mapping[str, int]) -> list[str]:
        """Name what was reached too rarely since ``since`` was counted."""
        names = (*self.paths, *self.conditions)
        return [name for name in names if self.counts[name] - since.get(name, 0) < REQUIRED_TIMES]

    def still_missing(self, since: Mapping[str, int], tries: int = 0) -> list[str | None]:
        """Name the paths that need another turn; None is for conditions.

        All that are short do at first. After ``tries`` further examples, what was reached does,
        since examples can begin with what reached it, and what was not, until that is a fact,
        if the profile has enough examples for one.
        """
        asked = settings.current()
        if not asked.require_paths or tries > _MOST_TIMES_THE_EXAMPLES * asked.examples:
            return []
        short = {name for name in self.short(since) if not tries or self._goes_on(name)}
        paths = [name for name in asked.part.share_of([*self.paths]) if name in short]
        for_conditions = [None] if short.intersection(self.conditions) else []
        return [*paths, *asked.part.share_of(for_conditions)]

    def _goes_on(self, name: str) -> bool:
        """Return True where what is short needs more than its turns."""
        to_a_fact = _MOST_TIMES_THE_EXAMPLES * settings.current().examples >= ENOUGH_TRIES
        return bool(self.counts[name]) or (to_a_fact and self.may_be_luck(name))

    def may_be_luck(self, name: str) -> bool:
        """Return True where too few examples could reach something for it to be never reached."""
        return self.tried[name] < ENOUGH_TRIES and not self.large[name]

    def to_json(self) -> dict[str, Any]:
        """All fields, with plain dicts for counters: workers can send no others."""
        text = json.dumps({each.name: getattr(self, each.name) for each in fields(self)})
        plain: dict[str, Any] = json.loads(text)
        return plain

    def add(self, seen: Mapping[str, Any]) -> None:
        """Add what another process saw of the same target."""
        for name in ("called", "counts", "tried", "large", "checked", "batches"):
            getattr(self, name).update(seen[name])
        for name, met in seen["together"].items():
            self.together[name].update(met)
        for name in ("histories", "seconds", "compiled", "examples", "left_out", "large_cut_short"):
            setattr(self, name, getattr(self, name) + seen[name])
        self.searched |= seen["searched"]
        self.failed |= seen["failed"]
        self.note_largest(seen["largest"])
        for found in seen["found"]:
            self.note_found(found)


class Coverage:
    """All targets of a run. Every worker of pytest-xdist has its own; they are added up."""

    def __init__(self) -> None:
        self._targets: dict[str, TargetCoverage] = {}
        self._called: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @property
    def targets(self) -> dict[str, TargetCoverage]:
        """All by name, in an order that does not depend on which worker came first."""
        return dict(sorted(self._targets.items()))

    def of(self, adapter: type[Adapter]) -> TargetCoverage:
        name = name_of(adapter)
        if name not in self._targets:
            offered, device = adapter.abilities, settings.current().device
            self._targets[name] = TargetCoverage(
                {name: path.equals for name, path in adapter.paths.items() if path.runs_on(device)},
                [
                    *adapter.conditions,
                    *["block_left_window"] * _has_windows(adapter),
                    *["prefix_hit"] * finds_prefixes(adapter),
                    *(met for met, by in _REQUIRED_WITH.items() if by in offered),
                ],
                [*adapter.required, *(each for each in adapter.optional if each in offered)],
                [each for each in adapter.optional if each not in offered],
                "engine" if issubclass(adapter, EngineAdapter) else "cache",
                [name for name, path in adapter.paths.items() if path.runs_with],
                self._called[name],
                batches=Counter(dict.fromkeys(possible_batches(adapter), 0)),
            )
        return self._targets[name]

    def count_calls(self, adapter: Adapter) -> None:
        """Count from here on how often each method of an adapter is called."""
        called = self._called[name_of(type(adapter))]

        def counting(name: str, method: Callable[[], Any], *arguments: Any, **named: Any) -> Any:
            called[name] += 1
            return method()(*arguments, **named)

        for name in (*adapter.required, *adapter.abilities):
            send_through(partial(counting, name), adapter, name)

    def to_json(self) -> dict[str, Any]:
        return {name: target.to_json() for name, target in self.targets.items()}

    def add(self, data: Mapping[str, Any]) -> None:
        for name, seen in data.items():
            names = ("paths", "conditions", "tested", "not_offered", "kind", "aimed")
            declared = (seen[each] for each in names)
            self._targets.setdefault(name, TargetCoverage(*declared)).add(seen)


def send_through(watching: Callable[..., Any], adapter: Adapter, name: str) -> None:
    """Have ``watching`` called from here on, with what returns the method before its arguments."""
    method = getattr(adapter, name)
    # A cache that held itself would keep its tensors until the next garbage collection.
    found: Any = weakref.WeakMethod(method) if isinstance(method, MethodType) else lambda: method
    vars(adapter)[name] = partial(watching, found)


_current = Coverage()


def current() -> Coverage:
    return _current


def set_current(coverage: Coverage) -> None:
    global _current
    _current = coverage


def name_of(adapter: type[Adapter]) -> str:
    return f"{adapter.__module__}:{adapter.__qualname__}"


def in_turns(adapter: type[Adapter], examples: int, of_a_turn: int) -> Iterator[_Turn]:
    """Share out examples to searches, and yield those of this part of the test.

    Paths take turns, so that a bug on the last one is found before all examples of the others ran.
    Without paths the aim is None.
    """
    paths = current().of(adapter).paths
    shares: Mapping[str | None, float] = {name: adapter.paths[name].share for name in paths}
    shares = shares or {None: 1.0}
    each = examples / sum(shares.values())
    turns = max(1, round(each / of_a_turn))
    searches = {aim: max(1, round(turns * min(1, share))) for aim, share in shares.items()}
    due_here = set(settings.current().part.share_of([*shares]))
    for turn, (aim, share) in product(range(turns), shares.items()):
        before, then = (-(-at * searches[aim] // turns) for at in (turn, turn + 1))
        if then > before and aim in due_here:
            due = [round(at * each * share / searches[aim]) for at in (before, then)]
            yield aim, str(turn), max(1, due[1] - due[0])


def turns_again(
    still_missing: Callable[[int], Iterable[str | None]], of_a_turn: int, ends: float
) -> Iterator[_Turn]:
    """Yield further searches, aimed at what is still missing, until nothing is or time is over.

    ``still_missing`` is told how many examples each had once all had their turns, and 0 before.
    """
    for turn in count():
        tries = of_a_turn * turn if turn >= _TURNS_AGAIN else 0
        aims = [*still_missing(tries)]
        if not aims:
            return
        for aim in aims:
            if monotonic() > ends:
                return
            yield aim, f"again {turn}", of_a_turn


class Preludes(Generic[_Example]):
    """The first examples of a search that reached each path and condition; others begin so."""

    def __init__(self, short: Callable[[], Iterable[str]], paths: Iterable[str]) -> None:
        self._short = short
        """Names what was reached too rarely so far."""
        self._paths = frozenset(paths)
        self._kept: defaultdict[str, list[_Example]] = defaultdict(list)

    def note(self, counted: Iterable[str], example: Callable[[], _Example]) -> None:
        """Keep an example that reached what was counted, where more are kept."""
        for name in counted:
            if len(kept := self._kept[name]) < _MOST_PRELUDES:
                kept.append(example())

    def of(self, aim: str | None) -> tuple[_Example, ...]:
        """Return what reached ``aim`` while it is reached too rarely; None is for conditions."""
        short = [name for name in self._short() if name in self._kept]
        names = [name for name in short if name == aim or (aim is None and name not in self._paths)]
        return tuple(example for name in names for example in self._kept[name])
