"""The verdict of a run, and how strong such a run was when last measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.capability import counted_conditions
from pytest_roseinfer.environment import describe_device, distribution_of, variables, versions
from pytest_roseinfer.run import coverage
from pytest_roseinfer.settings import PROFILES
from pytest_roseinfer.words import did_you_mean, some

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.findings.timeline import Found
    from pytest_roseinfer.run.coverage import Coverage, TargetCoverage
    from pytest_roseinfer.settings import Settings

# How many planted bugs each profile is known to find, a measurement that ships with it.


FILE = Path(__file__).with_name("strength.json")
"""Only ``python -m tests.mutants --write-docs`` writes it."""
_RELIABLY = 0.9
"""A bug counts as found by a profile when at least this share of the seeds found it."""


@dataclass(frozen=True, slots=True)
class Strength:
    """The result of one hunt for every planted bug."""

    profile: str
    planted: int
    seeds: int
    missed: Mapping[str, int]
    """The bugs that some seed missed, and how many seeds found each."""
    version: str
    """The version of roseinfer that was measured."""
    date: str

    @classmethod
    def of(cls, profile: str) -> Strength | None:
        """Read what was measured of a profile, if anything was."""
        measured = _read().get(profile)
        return cls(**measured) if measured else None

    @property
    def unreliable(self) -> Mapping[str, int]:
        """The bugs that too many seeds missed."""
        least = _RELIABLY * self.seeds
        return {name: found for name, found in self.missed.items() if found < least}

    @property
    def found(self) -> int:
        return self.planted - len(self.unreliable)

    def write(self) -> None:
        measured = {**_read(), self.profile: asdict(self)}
        FILE.write_text(json.dumps(measured, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        of_seeds = f"each of {self.seeds}"
        if self.missed:
            of_seeds = f"at least {_RELIABLY:.0%} of {self.seeds}"
        left_out = "".join(
            f"; {name} with {found} of them" for name, found in self.unreliable.items()
        )
        return (
            f"when it was last measured (roseinfer {self.version}, {self.date}), on roseinfer's "
            f"own engine and caches, {self.profile} found {self.found} of {self.planted} planted "
            f"bugs with {of_seeds} seeds{left_out}"
        )


def how_strong(asked: Settings, *, cut_short: bool) -> str:
    """Say how much a search as asked is known to find, and one that was not cut short."""
    usual = PROFILES[asked.profile]
    if asked.endpoint:
        return "not measured for a server"
    if cut_short:
        return "not measured: some searches ended before they had tried all examples"
    if (asked.examples, asked.steps) != (usual.examples, usual.steps):
        return f"not measured: {asked.examples} examples in place of {usual.examples}"
    measured = Strength.of(asked.profile)
    return str(measured) if measured else f"not measured for the profile {asked.profile}"


class Searched:
    """A plugin of a run that says behind it how hard it looked, and how much that finds."""

    def __init__(self, asked: Settings) -> None:
        self._asked = asked
        self._histories = 0
        self._cut_short = False

    def pytest_terminal_summary(self) -> None:
        """Look at what the run and its workers saw, while it is there."""
        targets = coverage.current().targets.values()
        self._histories = sum(target.histories for target in targets)
        self._cut_short = any(target.left_out for target in targets)

    def in_words(self, seconds: float) -> str:
        return (
            f"Looked at {self._histories} histories and mixes of requests in {seconds:.0f} s, "
            f"profile {self._asked.profile}.\n"
            f"How much such a look finds: {how_strong(self._asked, cut_short=self._cut_short)}."
        )


def _read() -> dict[str, dict[str, Any]]:
    measured: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return measured


# The verdict on one target, from the counts of a run.


NEVER = "NOT REACHED"
"""The verdict on what no example reached of enough that could: it fails the run."""
RARELY = "too rarely"
"""The verdict on what was reached too few times, or by none of too few examples: a warning."""


@dataclass(frozen=True, slots=True)
class Reached:
    """One row of the verdict: a path or a condition."""

    kind: str
    name: str
    must_equal: str
    times: int
    verdict: str


@dataclass(frozen=True, slots=True)
class TargetVerdict:
    """What a run reached of one target, what it missed, and what to do about it."""

    target: TargetCoverage
    asked: Settings = field(default_factory=settings.current)

    def rows(self) -> list[Reached]:
        paths = [self._row("path", name, twin) for name, twin in self.target.paths.items()]
        return paths + [self._row("condition", name, "") for name in self.target.conditions]

    def _row(self, kind: str, name: str, twin: str) -> Reached:
        times = self.target.counts[name]
        if self.target.failed:
            verdict = "see failures"
        elif not self.target.searched:
            verdict = "not searched"
        elif times >= coverage.REQUIRED_TIMES:
            verdict = "equal" if kind == "path" else "met"
        elif times or self.target.may_be_luck(name) or self.target.large[name]:
            verdict = RARELY
        else:
            verdict = NEVER
        return Reached(kind, name, twin, times, verdict)

    def problems(self, *, require_paths: bool) -> list[str]:
        """Say what the run set out to check and did not, so that it is no pass."""
        if self.target.failed or not self.target.searched:
            return []
        if not self.target.histories:
            return ["its search ran no history: a check that did not run is no pass"]
        if not require_paths:
            return []
        return [
            f"{row.kind} {row.name!r} was never reached, by none of {self._tries(row.name)}: "
            f"a check that did not run is no pass{self._early()}{self._meant(row)}"
            for row in self.rows()
            if row.verdict == NEVER
        ]

    def warnings(self) -> list[str]:
        """Say what was reached too rarely, where that may be luck, and what to do about it."""
        target = self.target
        searched = target.searched and target.histories and not target.failed
        if not (searched and self.asked.require_paths):
            return []
        return [
            f"{row.kind} {row.name!r} was {self._how_rarely(row)}: {self._remedy(row)}"
            f"{self._early()}{self._meant(row)}"
            for row in self.rows()
            if row.verdict == RARELY
        ]

    def _tries(self, name: str) -> str:
        return f"{self.target.tried[name]} {searches_of(self.target.kind)} that could reach it"

    def _how_rarely(self, row: Reached) -> str:
        if row.times:
            by = f" by {self._tries(row.name)}" if self.target.tried[row.name] else ""
            due = coverage.REQUIRED_TIMES
            return f"reached {some(row.times, 'time')}{by}, and should be {due} times"
        if large := self.target.large[row.name]:
            return f"reached by {self._large} alone, {some(large, 'time')}"
        enough = coverage.ENOUGH_TRIES
        return f"not reached by {self._tries(row.name)}, too few for a verdict ({enough})"

    def _remedy(self, row: Reached) -> str:
        """Say how to have it reached more often."""
        harder = f"search harder: {settings.harder_than(self.asked.profile)}"
        if row.kind == "condition" or row.name in self.target.aimed:
            return harder
        return (
            "no runs_with says what it needs, so switches cannot be aimed; make that a switch of "
            f"option_choices (a smaller least batch, say) and name it in runs_with, or {harder}"
        )

    def _early(self) -> str:
        return f"; {self.cut_short}" if self.target.left_out else ""

    def _meant(self, row: Reached) -> str:
        """Ask whether a condition that was never met is one that the harness counts, misspelt."""
        counted = counted_conditions(KVCacheAdapter)
        own = self.target.kind == "cache" and row.kind == "condition" and row.name not in counted
        return did_you_mean(row.name, counted) if own and not row.times else ""

    @property
    def sizes(self) -> str:
        """The largest sizes in words; empty where nothing was given any."""
        sizes, cut_short = largest_of(self.target.largest), self.target.large_cut_short
        early = f" ({self._large} cut short: {cut_short}, for lack of time)"
        return sizes + early * bool(sizes and cut_short)

    @property
    def _large(self) -> str:
        return "wide mixes" if self.target.kind == "engine" else "large histories"

    @property
    def cut_short(self) -> str:
        """That not all examples were tried, in words; empty where they were."""
        if not self.target.left_out:
            return ""
        examples = self.target.examples
        return (
            f"searched {examples - self.target.left_out} of {examples} examples in the time "
            "there was (--roseinfer-search-seconds): this is less than its full strength"
        )


def problems_of(seen: Coverage, *, require_paths: bool) -> dict[str, list[str]]:
    """Return the problems of each target that has any."""
    found = {
        name: TargetVerdict(target).problems(require_paths=require_paths)
        for name, target in seen.targets.items()
    }
    return {name: lines for name, lines in found.items() if lines}


def searches_of(kind: str) -> str:
    """Return what searches of a kind of target run, in words."""
    return "mixes of requests" if kind == "engine" else "histories"


def largest_of(sizes: Mapping[str, int]) -> str:
    """Return the largest sizes in words; empty where nothing was given any."""
    return "largest: " * bool(sizes) + ", ".join(f"{size} {name}" for name, size in sizes.items())


def pairs(values: Mapping[str, object], sign: str = " ") -> str:
    """Return names with their values, in one line."""
    return ", ".join(f"{name}{sign}{value}" for name, value in values.items())


# The verdict of a run, as reports have it.


FORMAT = 2
"""This number rises when a field changes its meaning."""
NOT_SEARCHED = "its histories were not searched in this run, so its paths are not judged"


class Target(TypedDict):
    name: str
    distribution: str
    kind: str
    """``cache`` or ``engine``."""
    histories: int
    seconds: float
    """The time that its searches took, added up over workers."""
    compiled: int
    """The kernels that had to be compiled for it."""
    searched: bool
    failed: bool
    examples: int
    """How many examples its searches were to try."""
    left_out: int
    """How many of them were left out, since the time was over."""
    cut_short: str
    """The same in words; empty where none was left out."""
    largest: dict[str, int]
    """The most rows of a batch, tokens of a sequence and, of a cache, blocks of a table."""
    large_cut_short: int
    """How many of the large histories or mixes ended early, since their time was over."""
    problems: list[str]
    warnings: list[str]
    """What was reached too rarely, where that may be luck."""
    tested: dict[str, int]
    """How often each method was called."""
    not_offered: list[str]
    checked: dict[str, int]
    """How often each invariant was checked."""
    batches: dict[str, int]
    """How often there was each kind of batch that a cache can have; empty for an engine."""
    rows: list[dict[str, Any]]
    """The fields of ``Reached`` for each declared path and condition."""
    times: dict[str, int]
    """How often each path ran, slow ones included."""
    together: dict[str, dict[str, int]]
    """For each path, in how many steps that took it each condition was met."""


class Verdict(TypedDict):
    format: int
    passed: bool
    problems: list[str]
    device: str
    server: dict[str, str]
    """The ``url`` and the ``model`` that were asked; empty where no server was tested."""
    profile: str
    examples: int
    steps: int
    seed: int | None
    required_paths: bool
    strength: str
    """How much such a search is known to find."""
    versions: dict[str, str]
    environment: dict[str, str]
    findings: list[Found]
    targets: list[Target]


def verdict(
    seen: Coverage, asked: Settings, problems: Mapping[str, Sequence[str]], *, passed: bool
) -> Verdict:
    """``problems`` holds lines for each target; those of the run have an empty name."""
    server = asked.endpoint
    return {
        "format": FORMAT,
        "passed": passed,
        "problems": list(problems.get("", ())),
        "device": describe_device(asked),
        "server": {"url": server.url, "model": server.model} if server else {},
        "profile": asked.profile,
        "examples": asked.examples,
        "steps": asked.steps,
        "seed": asked.seed,
        "required_paths": asked.require_paths,
        "strength": how_strong(
            asked, cut_short=any(target.left_out for target in seen.targets.values())
        ),
        "versions": versions(),
        "environment": variables(),
        "findings": [found for target in seen.targets.values() for found in target.found],
        "targets": [
            _target(name, target, problems.get(name, ())) for name, target in seen.targets.items()
        ],
    }


def _target(name: str, target: TargetCoverage, problems: Sequence[str]) -> Target:
    paths, judged = [*target.paths, *target.twins], TargetVerdict(target)
    return {
        "name": name,
        "distribution": distribution_of(name),
        "kind": target.kind,
        "histories": target.histories,
        "seconds": round(target.seconds, 2),
        "compiled": target.compiled,
        "searched": target.searched,
        "failed": target.failed,
        "examples": target.examples,
        "left_out": target.left_out,
        "cut_short": judged.cut_short,
        "largest": dict(target.largest),
        "large_cut_short": target.large_cut_short,
        "problems": list(problems),
        "warnings": judged.warnings(),
        "tested": target.abilities,
        "not_offered": target.not_offered,
        "checked": dict(target.checked),
        "batches": dict(target.batches),
        "rows": [asdict(row) for row in judged.rows()],
        "times": {path: target.counts[path] for path in paths},
        "together": {
            path: {name: target.together[path][name] for name in target.conditions}
            for path in paths
        },
    }
