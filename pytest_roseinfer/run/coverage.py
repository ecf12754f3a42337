"""Coverage of declared paths and conditions, and the aims of further searches."""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import count
from time import monotonic
from types import MethodType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.capabilities import capability
from pytest_roseinfer.capabilities.cache_data import PREFIX_HIT_METHODS
from pytest_roseinfer.capabilities.writes import (
    BOUNDARY,
    LAST_SHARED,
    MIXED_LENGTHS,
    MIXED_POSITIONS,
    ONE_POSITION,
    SHARED_TWICE,
)
from pytest_roseinfer.engine_capabilities.capability import conclusive_examples, required_conditions
from pytest_roseinfer.findings.timeline import add

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.adapters.engine import RequestMix
    from pytest_roseinfer.capabilities.operation import Operation
    from pytest_roseinfer.findings.timeline import FindingRecord
    from pytest_roseinfer.histories.history import History
    from pytest_roseinfer.oracle.oracle import Oracle

_FINDS_TEXTS = {"match_prefix", "prefill"}
_REQUIRED_WITH: Mapping[str, set[str]] = {
    "state_reused": {"use_states", "begin_with"},
    "hash_collision": {"use_hash"},
    "calls_in_flight": {"use_queue"},
    "reset_of_stored_text": {"reset", *_FINDS_TEXTS},
    "text_after_reset": {"reset", *_FINDS_TEXTS},
    "reset_after_look_up": {"reset", "look_up", *_FINDS_TEXTS},
    "block_stored_again": {"events", "prefill", "free"},
    "block_loaded": {"load_prefix"},
    "restarted_warm": {"restart_tiers"},
    "restarted_empty": {"restart_tiers"},
    "lookup_missed_by_key": {"use_text_keys", *_FINDS_TEXTS},
    "beam_taken_twice": {"reorder"},
    "beams_exchanged": {"reorder"},
    "beam_dropped": {"reorder"},
    "session_resumed_twice": {"keep_session"},
    "session_resumed_after_pressure": {"keep_session", "ledger"},
}
"""Methods that make a condition required although the adapter does not declare it."""
REQUIRED_TIMES = 3
"""Times that a path or condition must be reached: a single time may be luck."""
CONCLUSIVE_EXAMPLES = 1000
"""Eligible examples without a hit that make a path or condition count as never reached.

A path that one example in 200 reaches is missed in 7 of 1,000 runs, and one that 1 in 100 reaches
in none of 10,000.
"""
_TURNS_AGAIN = 5
_MAX_TRIES_PER_EXAMPLE = 10
"""Most examples of further turns, as a multiple of the profile's."""
_MAX_PRELUDES = 8
"""Most examples that are kept for each path and condition."""
_Example = TypeVar("_Example", "History", "RequestMix")


class Turn(NamedTuple):
    """A search of a test, with its own aim and number of examples."""

    aim: str | None
    """Path to aim at; None for any."""
    name: str
    examples: int
    first_setting: int = 0
    """Index of the path's settings that the simplest example has, modulo their number."""


def finds_prefixes(adapter: type[Adapter]) -> bool:
    """Return True for a cache whose sequences may begin with a stored prefix, and that shows it."""
    shares = issubclass(adapter, KVCacheAdapter) and adapter.prefixes.shares
    return {*adapter.abilities, f"prefixes.shares={shares}"} >= PREFIX_HIT_METHODS


def chooses_evictions(adapter: type[Adapter]) -> bool:
    """Return True for a cache whose eviction order is declared, and reached by prompts."""
    if not issubclass(adapter, KVCacheAdapter) or adapter.prefixes.evicts == "any":
        return False
    return adapter.prefixes.shares == "equal prefixes" and {"prefill", "free"} <= adapter.abilities


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
    """Declarations of one target, and counts of the paths and conditions that searches reached."""

    paths: dict[str, str]
    """Slow twin of each path."""
    conditions: list[str]
    tested_methods: list[str] = field(default_factory=list)
    missing_methods: list[str] = field(default_factory=list)
    kind: str = "cache"
    """Kind of target, ``cache`` or ``engine``."""
    aimed_paths: list[str] = field(default_factory=list)
    """Paths with settings in ``aims`` or ``runs_with``, which searches can aim at."""
    method_calls: Counter[str] = field(default_factory=Counter)
    """Number of calls of each adapter method."""
    counts: Counter[str] = field(default_factory=Counter)
    """Times that each path or condition was reached."""
    eligible_examples: Counter[str] = field(default_factory=Counter)
    """Number of examples whose switches allow each path or condition."""
    large_counts: Counter[str] = field(default_factory=Counter)
    """Times that large histories or wide mixes reached each path or condition, which ``counts``
    leaves out."""
    conditions_by_path: defaultdict[str, Counter[str]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    """Number of steps on each path that met each condition."""
    invariant_checks: Counter[str] = field(default_factory=Counter)
    """Number of checks of each invariant."""
    batches: Counter[str] = field(default_factory=Counter)
    """Number of batches of each kind that this cache can have, in drawn histories."""
    conclusive_examples: dict[str, int] = field(default_factory=dict)
    """Number of conclusive examples by condition, where it is not ``CONCLUSIVE_EXAMPLES``."""
    histories: int = 0
    seconds: float = 0.0
    """Seconds that its searches took, summed over workers."""
    num_compiled_kernels: int = 0
    """Number of kernels compiled for it."""
    searched: bool = False
    """True once the run has begun a search of this target; only searches reach paths."""
    failing_tests: list[str] = field(default_factory=list)
    """Ids of the tests whose latest search found a failure, which ends it."""
    examples: int = 0
    """Number of examples planned for its searches, including skipped ones."""
    num_skipped: int = 0
    """Number of planned examples that were skipped because their test's time limit was over."""
    findings: list[FindingRecord] = field(default_factory=list)
    """Failures that searches found, without duplicates."""
    known_met: Counter[str] = field(default_factory=Counter)
    """Number of failing examples by the known finding that they show, by digest."""
    known_missed: list[str] = field(default_factory=list)
    """Known findings that their own tests ran to the end without."""
    largest: dict[str, int] = field(default_factory=dict)
    """Most rows of a batch, tokens of a sequence and, for a cache, blocks of a table."""
    blindness: str = ""
    """Description of a model whose tokens hardly show wrong keys or positions; empty if they do."""
    large_cut_short: int = 0
    """Number of large histories or mixes that ended early because their time limit was over."""

    @property
    def failed(self) -> bool:
        return bool(self.failing_tests)

    def note_failure(self) -> None:
        """Note that a search of the running test found a failure."""
        self.failing_tests.append(current_test())

    def forget_failure(self) -> None:
        """Forget the failure of the running test, which runs again."""
        again = current_test()
        self.failing_tests = [test for test in self.failing_tests if test != again]

    def add_finding(self, finding: FindingRecord) -> None:
        add(self.findings, finding)

    def note(self, ran: Mapping[str, int]) -> None:
        """Add the counts of paths and conditions of one step."""
        self.counts.update(ran)
        met = [name for name in self.conditions if ran.get(name)]
        for name in (*self.paths, *self.twins):
            if ran.get(name):
                self.conditions_by_path[name].update(met)

    def note_tried(self, adapter: type[Adapter], options: Mapping[str, Any]) -> None:
        """Count an example as eligible for the paths its switches allow, and for all conditions."""
        device = settings.current().device
        paths = {name for name in self.paths if adapter.paths[name].can_run(options, device)}
        self.eligible_examples.update([*paths, *self.conditions])

    def note_sizes(self, step: Operation, oracle: Oracle) -> None:
        """Record the sizes of a step's batch and sequences if they are the largest so far."""
        seqs = [seq for seq, _ in step.rows() if seq in oracle.sequences]
        for seq in seqs:
            blocks, tokens = len(oracle.sequences[seq]), oracle.length(seq)
            self.note_largest({"rows": len(seqs), "blocks": blocks, "tokens": tokens})

    def note_largest(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            self.largest[name] = max(size, self.largest.get(name, 0))

    def add_examples(self, examples: int, num_skipped: int) -> None:
        self.examples += examples
        self.num_skipped += num_skipped

    @property
    def twins(self) -> list[str]:
        """Slow paths that fast ones must equal."""
        return [name for name in dict.fromkeys(self.paths.values()) if name not in self.paths]

    @property
    def abilities(self) -> dict[str, int]:
        """Number of calls of each tested method."""
        return {name: self.method_calls[name] for name in self.tested_methods}

    def note_batches(self, batches: Mapping[str, int]) -> None:
        """Add a history's counts of each kind of batch."""
        for kind in self.batches:
            self.batches[kind] += batches.get(kind, 0)

    def names_below_required(self, since: Mapping[str, int]) -> list[str]:
        """Return the paths and conditions reached too rarely after the counts in ``since``."""
        names = (*self.paths, *self.conditions)
        return [name for name in names if self.counts[name] - since.get(name, 0) < REQUIRED_TIMES]

    def missing_paths(self, since: Mapping[str, int], tries: int = 0) -> list[str | None]:
        """Return the paths that need another turn; None stands for all conditions.

        At first, all paths below the required count need one. After ``tries`` further examples,
        paths that were reached still do, since examples can begin with a prelude that reached them.
        Paths that were never reached do until that is conclusive, if the profile has enough
        examples.
        """
        current_settings = settings.current()
        max_tries = _MAX_TRIES_PER_EXAMPLE * current_settings.examples
        if not current_settings.require_paths or tries > max_tries or self.failed:
            return []
        short = {
            name
            for name in self.names_below_required(since)
            if not tries or self._stays_missing(name)
        }
        part = current_settings.part
        paths = [name for name in part.share_of([*self.paths]) if name in short]
        for_conditions = [None] if short.intersection(self.conditions) else []
        return [*paths, *part.share_of(for_conditions)]

    def _stays_missing(self, name: str) -> bool:
        """Return True if a path or condition needs more than its first further turns."""
        max_tries = _MAX_TRIES_PER_EXAMPLE * settings.current().examples
        can_conclude = max_tries >= self.conclusive(name)
        return bool(self.counts[name]) or (can_conclude and self.is_inconclusive(name))

    def is_inconclusive(self, name: str) -> bool:
        """Return True if too few examples were eligible for the verdict "never reached"."""
        enough = self.eligible_examples[name] >= self.conclusive(name)
        return not (enough or self.large_counts[name])

    def conclusive(self, name: str) -> int:
        """Return the number of eligible examples that are enough for the verdict."""
        return self.conclusive_examples.get(name, CONCLUSIVE_EXAMPLES)

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with counters as plain dicts, which workers can send."""
        text = json.dumps({each.name: getattr(self, each.name) for each in fields(self)})
        plain: dict[str, Any] = json.loads(text)
        return plain

    def add(self, other: Mapping[str, Any]) -> None:
        """Add the coverage of the same target from another process, as plain data."""
        for name in (
            "method_calls",
            "counts",
            "eligible_examples",
            "large_counts",
            "invariant_checks",
            "batches",
            "known_met",
        ):
            getattr(self, name).update(other[name])
        for name, met in other["conditions_by_path"].items():
            self.conditions_by_path[name].update(met)
        for name in (
            "histories",
            "seconds",
            "num_compiled_kernels",
            "examples",
            "num_skipped",
            "large_cut_short",
        ):
            setattr(self, name, getattr(self, name) + other[name])
        self.known_missed = sorted({*self.known_missed, *other["known_missed"]})
        self.conclusive_examples |= other["conclusive_examples"]
        self.searched |= other["searched"]
        self.blindness = self.blindness or other["blindness"]
        self.failing_tests = sorted({*self.failing_tests, *other["failing_tests"]})
        self.note_largest(other["largest"])
        for finding in other["findings"]:
            self.add_finding(finding)


class Coverage:
    """Coverage of all targets of a run, summed over the workers of pytest-xdist."""

    def __init__(self) -> None:
        self._targets: dict[str, TargetCoverage] = {}
        self._method_calls: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @property
    def targets(self) -> dict[str, TargetCoverage]:
        """Targets by name, sorted, so that the order does not depend on the workers."""
        return dict(sorted(self._targets.items()))

    def of(self, adapter: type[Adapter]) -> TargetCoverage:
        """Return the coverage of an adapter class; add an empty one if it is new."""
        name = name_of(adapter)
        if name not in self._targets:
            offered, device = adapter.abilities, settings.current().device
            engine = issubclass(adapter, EngineAdapter)
            self._targets[name] = TargetCoverage(
                {name: path.equals for name, path in adapter.paths.items() if path.runs_on(device)},
                [
                    *adapter.conditions,
                    *["block_left_window"] * _has_windows(adapter),
                    *["prefix_hit"] * finds_prefixes(adapter),
                    *["eviction_choice"] * chooses_evictions(adapter),
                    *(met for met, by in _REQUIRED_WITH.items() if by <= offered),
                    *(
                        required_conditions(adapter)
                        if engine
                        else capability.required_conditions(adapter)
                    ),
                ],
                [*adapter.required, *(each for each in adapter.optional if each in offered)],
                [each for each in adapter.optional if each not in offered],
                "engine" if engine else "cache",
                [name for name, path in adapter.paths.items() if path.settings_to_draw],
                self._method_calls[name],
                batches=Counter(dict.fromkeys(possible_batches(adapter), 0)),
                conclusive_examples=conclusive_examples(adapter) if engine else {},
            )
        return self._targets[name]

    def count_calls(self, adapter: Adapter) -> None:
        """Count the calls of each method of an adapter from now on."""
        calls = self._method_calls[name_of(type(adapter))]

        def counting(name: str, method: Callable[[], Any], *arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return method()(*arguments, **named)

        for name in (*adapter.required, *adapter.abilities):
            wrap_method(partial(counting, name), adapter, name)

    def to_json(self) -> dict[str, Any]:
        return {name: target.to_json() for name, target in self.targets.items()}

    def add(self, data: Mapping[str, Any]) -> None:
        """Add the coverage of all targets from another process, as plain data."""
        for name, target in data.items():
            names = (
                "paths",
                "conditions",
                "tested_methods",
                "missing_methods",
                "kind",
                "aimed_paths",
            )
            declared = (target[each] for each in names)
            self._targets.setdefault(name, TargetCoverage(*declared)).add(target)


def wrap_method(watching: Callable[..., Any], adapter: Adapter, name: str) -> None:
    """Replace a method by ``watching``, whose first argument is a function that returns it."""
    method = getattr(adapter, name)
    # A reference cycle would keep the cache's tensors until the next garbage collection.
    getter: Any = weakref.WeakMethod(method) if isinstance(method, MethodType) else lambda: method
    vars(adapter)[name] = partial(watching, getter)


_current = Coverage()


def current() -> Coverage:
    return _current


def set_current(coverage: Coverage) -> None:
    global _current
    _current = coverage


def current_test() -> str:
    """Return the id of the running test, without the phase that pytest adds; "" outside of one."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def name_of(adapter: type[Adapter]) -> str:
    return f"{adapter.__module__}:{adapter.__qualname__}"


def split_examples(adapter: type[Adapter], examples: int, of_a_turn: int) -> list[Turn]:
    """Divide the examples of a test among searches; return the searches of this part of it.

    Paths take turns, so that a bug on the last path is found before all examples of the others have
    run. For the same reason, each other path has one example after the first turn of the first
    path: the simplest shows most bugs of a kernel. Each search of a path begins with the next of
    its settings; those that are left have one example each at the end. Without paths the aim is
    None.
    """
    paths = current().of(adapter).paths
    shares: Mapping[str | None, float] = {name: adapter.paths[name].share for name in paths}
    shares = shares or {None: 1.0}
    each = examples / sum(shares.values())
    turns = max(1, round(each / of_a_turn))
    searches = {aim: max(1, round(turns * min(1, share))) for aim, share in shares.items()}
    split: list[Turn] = []
    begun: Counter[str | None] = Counter([*shares][1:])
    for round_ in range(turns):
        for aim, share in shares.items():
            before, then = (-(-at * searches[aim] // turns) for at in (round_, round_ + 1))
            ends = [round(at * each * share / searches[aim]) for at in (before, then)]
            if then > before:
                split.append(Turn(aim, str(round_), max(1, ends[1] - ends[0]), begun[aim]))
                begun[aim] += 1
    split[1:1] = [Turn(aim, "first", 1) for aim in [*shares][1:]]
    split += [
        Turn(aim, f"setting {at}", 1, at)
        for aim in paths
        for at in range(begun[aim], len(adapter.paths[aim].settings_to_draw))
    ]
    aims_of_part = set(settings.current().part.share_of([*shares]))
    return [turn for turn in split if turn.aim in aims_of_part]


_LONG = 60.0
"""Shortest length of a search that is announced, in seconds."""
_TRIED_SECONDS = 15.0
"""Seconds of a search after which its length is estimated."""


class SearchDuration:
    """Announcement of how long a search will take, if that is long."""

    def __init__(
        self,
        target: str,
        examples: int,
        noun: str,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``examples`` is the number of examples of the search; ``noun`` names them."""
        self._target, self._noun = target, noun
        self._examples, self._tried = examples, 0
        self._clock, self._began = clock, clock()
        self._announced = False

    def note(self, examples: int) -> None:
        """Count further examples as tried; announce the length once it can be estimated."""
        self._tried += examples
        elapsed = self._clock() - self._began
        total = elapsed * self._examples / self._tried
        if self._announced or elapsed < _TRIED_SECONDS or total < _LONG:
            return
        self._announced = True
        settings.current().announce(
            f"roseinfer: {self._target}: {self._tried} of {self._examples} {self._noun} took "
            f"{elapsed:.0f} s, so all take about {total / 60:.0f} min; --roseinfer-examples N "
            "tries fewer, and --roseinfer-search-seconds S sets a limit"
        )


def repeat_searches(
    missing_paths: Callable[[int], Iterable[str | None]], of_a_turn: int, ends: float
) -> Iterator[Turn]:
    """Yield searches aimed at missing paths, until no path is missing or time is over.

    ``missing_paths`` gets the number of further examples per aim after the first turns; 0 before.
    """
    for turn in count():
        tries = of_a_turn * turn if turn >= _TURNS_AGAIN else 0
        aims = [*missing_paths(tries)]
        if not aims:
            return
        for aim in aims:
            if monotonic() > ends:
                return
            yield Turn(aim, f"again {turn}", of_a_turn, turn)


class Preludes(Generic[_Example]):
    """First examples of a search that reached each path and condition; preludes of later ones."""

    def __init__(self, short: Callable[[], Iterable[str]], paths: Iterable[str]) -> None:
        self._short = short
        """Function that returns the paths and conditions reached too rarely so far."""
        self._paths = frozenset(paths)
        self._examples: defaultdict[str, list[_Example]] = defaultdict(list)

    def note(self, counted: Iterable[str], example: Callable[[], _Example]) -> None:
        """Keep an example for each counted name that has fewer than ``_MAX_PRELUDES``."""
        for name in counted:
            if len(examples := self._examples[name]) < _MAX_PRELUDES:
                examples.append(example())

    def of(self, aim: str | None) -> tuple[_Example, ...]:
        """Return the kept examples of ``aim`` while it is below the required count.

        None stands for all conditions.
        """
        short = [name for name in self._short() if name in self._examples]
        names = [name for name in short if name == aim or (aim is None and name not in self._paths)]
        return tuple(example for name in names for example in self._examples[name])
