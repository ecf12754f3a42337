"""Counts how often a run reaches declared paths and conditions, and judges the run by that."""

from __future__ import annotations

import json
import weakref
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product
from time import monotonic
from types import MethodType
from typing import TYPE_CHECKING, Any

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.engine import EngineAdapter
from pytest_roseinfer.adapters.names.condition_names import COUNTED
from pytest_roseinfer.findings.found import add
from pytest_roseinfer.mistakes import did_you_mean
from pytest_roseinfer.plural import some

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_roseinfer.adapters.base import Adapter
    from pytest_roseinfer.cases.operations.operation import Operation
    from pytest_roseinfer.findings.found import Found
    from pytest_roseinfer.oracle.oracle import Oracle

_REQUIRED_WITH = {"hash_collision": "use_hash", "calls_in_flight": "use_queue"}
"""Conditions that are required of a cache that defines these methods, without being named."""
REQUIRED_TIMES = 3
"""How often a path or condition must be reached: once may be luck."""
_TURNS_AGAIN = 5
_Turn = tuple[str | None, str, int]
"""A path to aim at, the name of the turn, and the examples due."""


def finds_prefixes(adapter: type[Adapter]) -> bool:
    """Return True for a cache that lets sequences begin with what is found of their texts."""
    shares = getattr(adapter, "sharing", "") == "equal prefixes"
    return shares and {"texts", "matched", "prefill", "table", "ledger"} <= adapter.abilities


@dataclass(frozen=True, slots=True)
class Reached:
    """One row of the verdict: a path or a condition."""

    kind: str
    name: str
    must_equal: str
    times: int
    verdict: str


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
    called: Counter[str] = field(default_factory=Counter)
    """How often each method of the adapter was called."""
    counts: Counter[str] = field(default_factory=Counter)
    together: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """For every path, in how many of the steps that took it each condition was met."""
    checked: Counter[str] = field(default_factory=Counter)
    """How often each invariant was checked."""
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

    def note_sizes(self, step: Operation, oracle: Oracle) -> None:
        """Note how large is what a step has just added to, if it is larger than all before."""
        seqs = [seq for seq, _ in step.rows() if seq in oracle.sequences]
        for seq in seqs:
            blocks, tokens = len(oracle.sequences[seq]), oracle.length(seq)
            self.note_largest({"rows": len(seqs), "blocks": blocks, "tokens": tokens})

    def note_largest(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            self.largest[name] = max(size, self.largest.get(name, 0))

    @property
    def sizes(self) -> str:
        """The largest sizes in words; empty where nothing was given any."""
        if not self.largest:
            return ""
        of = ", ".join(f"{size} {name}" for name, size in self.largest.items())
        what = "wide mixes" if self.kind == "engine" else "large histories"
        early = f" ({what} cut short: {self.large_cut_short}, for lack of time)"
        return f"largest: {of}{early * bool(self.large_cut_short)}"

    def searched_for(self, examples: int, left_out: int) -> None:
        self.examples += examples
        self.left_out += left_out

    @property
    def cut_short(self) -> str:
        """That not all examples were tried, in words; empty where they were."""
        if not self.left_out:
            return ""
        return (
            f"searched {self.examples - self.left_out} of {self.examples} examples in the time "
            "there was (--roseinfer-search-seconds): this is less than its full strength"
        )

    @property
    def twins(self) -> list[str]:
        """The slow paths that others must equal."""
        return [name for name in dict.fromkeys(self.paths.values()) if name not in self.paths]

    @property
    def abilities(self) -> dict[str, int]:
        """The methods that were tested, and how often each was called."""
        return {name: self.called[name] for name in self.tested}

    @property
    def searches(self) -> str:
        """What a search runs, in words."""
        return "mixes of requests" if self.kind == "engine" else "histories"

    @property
    def checks(self) -> str:
        """How often each invariant was checked that was, in words."""
        return ", ".join(f"{name} {times}" for name, times in self.checked.items() if times)

    def rows(self) -> list[Reached]:
        paths = [self._row("path", name, twin) for name, twin in self.paths.items()]
        return paths + [self._row("condition", name, "") for name in self.conditions]

    def still_missing(self, since: Mapping[str, int]) -> list[str | None]:
        """Name the paths reached too rarely since ``since`` was counted; None is for conditions."""
        if not settings.current().require_paths:
            return []

        def short(name: str) -> bool:
            return self.counts[name] - since.get(name, 0) < REQUIRED_TIMES

        part = settings.current().part
        for_conditions = [None] if any(map(short, self.conditions)) else []
        return [*filter(short, part.share_of([*self.paths])), *part.share_of(for_conditions)]

    def _row(self, kind: str, name: str, twin: str) -> Reached:
        times = self.counts[name]
        if self.failed:
            verdict = "see failures"
        elif not self.searched:
            verdict = "not searched"
        elif times < REQUIRED_TIMES:
            verdict = "NOT REACHED"
        else:
            verdict = "equal" if kind == "path" else "met"
        return Reached(kind, name, twin, times, verdict)

    def problems(self, *, require_paths: bool) -> list[str]:
        """Say what the run set out to check and did not, so that it is no pass."""
        if self.failed or not self.searched:
            return []
        if not self.histories:
            return ["its search ran no history: a check that did not run is no pass"]
        problems = []
        early = f"; {self.cut_short}" if self.left_out else ""
        for row in self.rows():
            if require_paths and row.verdict == "NOT REACHED":
                reached = f"reached {some(row.times, 'time')}"
                problems.append(
                    f"{row.kind} {row.name!r} was {reached if row.times else 'never reached'} and "
                    f"must be {REQUIRED_TIMES} times: a check that did not run is no pass{early}"
                    f"{self._meant(row)}"
                )
        return problems

    def _meant(self, row: Reached) -> str:
        """Ask whether a condition that was never met is one that the harness counts, misspelt."""
        own = self.kind == "cache" and row.kind == "condition" and row.name not in COUNTED
        return did_you_mean(row.name, COUNTED) if own and not row.times else ""

    def to_json(self) -> dict[str, Any]:
        """All fields, with plain dicts for counters: workers can send no others."""
        text = json.dumps({each.name: getattr(self, each.name) for each in fields(self)})
        plain: dict[str, Any] = json.loads(text)
        return plain

    def add(self, seen: Mapping[str, Any]) -> None:
        """Add what another process saw of the same target."""
        self.counts.update(seen["counts"])
        for name, met in seen["together"].items():
            self.together[name].update(met)
        self.checked.update(seen["checked"])
        self.called.update(seen["called"])
        self.note_largest(seen["largest"])
        for name in ("histories", "seconds", "compiled", "large_cut_short"):
            setattr(self, name, getattr(self, name) + seen[name])
        self.searched |= seen["searched"]
        self.failed |= seen["failed"]
        self.searched_for(seen["examples"], seen["left_out"])
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
                    *["left_a_window"] * bool(getattr(adapter, "window_groups", 0)),
                    *["prefix_found"] * finds_prefixes(adapter),
                    *(met for met, by in _REQUIRED_WITH.items() if by in offered),
                ],
                [*adapter.required, *(each for each in adapter.optional if each in offered)],
                [each for each in adapter.optional if each not in offered],
                "engine" if issubclass(adapter, EngineAdapter) else "cache",
                self._called[name],
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

    def problems(self, *, require_paths: bool) -> dict[str, list[str]]:
        return {
            name: lines
            for name, target in self.targets.items()
            if (lines := target.problems(require_paths=require_paths))
        }

    def to_json(self) -> dict[str, Any]:
        return {name: target.to_json() for name, target in self.targets.items()}

    def add(self, data: Mapping[str, Any]) -> None:
        for name, seen in data.items():
            names = ("paths", "conditions", "tested", "not_offered", "kind")
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
    still_missing: Callable[[], Iterable[str | None]], of_a_turn: int, ends: float
) -> Iterator[_Turn]:
    """Yield further searches, aimed at what is still missing, until nothing is or time is over.

    Bad luck with the examples is no verdict. What so many more do not reach, none will.
    """
    for turn in range(_TURNS_AGAIN):
        for aim in still_missing() if monotonic() < ends else ():
            yield aim, f"again {turn}", of_a_turn
