"""Verdict of a run, and the measured strength of searches by profile."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.capability import counted_conditions
from pytest_roseinfer.capabilities.text_keys import TEXTS_DIFFER_IN
from pytest_roseinfer.environment import describe_device, distribution_of, variables, versions
from pytest_roseinfer.run import coverage
from pytest_roseinfer.settings import PROFILES
from pytest_roseinfer.words import did_you_mean, format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.findings.timeline import FindingRecord
    from pytest_roseinfer.run.coverage import Coverage, TargetCoverage
    from pytest_roseinfer.settings import Settings

# Strength: share of planted bugs that each profile finds, measured and shipped with the package


FILE = Path(__file__).with_name("strength.json")
"""File of measurements, written only by ``python -m tests.mutants --write-docs``."""
_RELIABLE_SHARE = 0.9
"""Minimum share of the seeds that must find a bug for it to count as found."""


@dataclass(frozen=True, slots=True)
class Strength:
    """Measured result of one profile on all planted bugs."""

    profile: str
    planted: int
    seeds: int
    missed: Mapping[str, int]
    """Bugs that some seeds missed, with the number of seeds that found each."""
    version: str
    """Version of roseinfer that was measured."""
    date: str

    @classmethod
    def of(cls, profile: str) -> Strength | None:
        """Read the measurement of a profile; None without one."""
        measured = _read().get(profile)
        return cls(**measured) if measured else None

    @property
    def unreliable(self) -> Mapping[str, int]:
        """Bugs that too many seeds missed."""
        least = _RELIABLE_SHARE * self.seeds
        return {name: num_seeds for name, num_seeds in self.missed.items() if num_seeds < least}

    @property
    def num_found(self) -> int:
        return self.planted - len(self.unreliable)

    def write(self) -> None:
        measured = {**_read(), self.profile: asdict(self)}
        FILE.write_text(json.dumps(measured, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        of_seeds = f"each of {self.seeds}"
        if self.missed:
            of_seeds = f"at least {_RELIABLE_SHARE:.0%} of {self.seeds}"
        num_skipped = "".join(
            f"; {name} with {num_seeds} of them" for name, num_seeds in self.unreliable.items()
        )
        return (
            f"when it was last measured (roseinfer {self.version}, {self.date}), on roseinfer's "
            f"own engine and caches, {self.profile} found {self.num_found} of {self.planted} "
            f"planted bugs with {of_seeds} seeds{num_skipped}"
        )


def describe_strength(run_settings: Settings, *, cut_short: bool) -> str:
    """Describe the measured strength of searches with these settings, or why it is unknown."""
    default = PROFILES[run_settings.profile]
    if run_settings.endpoint:
        return "not measured for a server"
    if cut_short:
        return "not measured: some searches ended before they had tried all examples"
    if (run_settings.examples, run_settings.steps) != (default.examples, default.steps):
        return f"not measured: {run_settings.examples} examples in place of {default.examples}"
    measured = Strength.of(run_settings.profile)
    return str(measured) if measured else f"not measured for the profile {run_settings.profile}"


class SearchReporter:
    """Pytest plugin that describes the run's search effort and its strength after the run."""

    def __init__(self, run_settings: Settings) -> None:
        self._settings = run_settings
        self._histories = 0
        self._cut_short = False

    def pytest_terminal_summary(self) -> None:
        """Read the coverage of the run and its workers, while it is available."""
        targets = coverage.current().targets.values()
        self._histories = sum(target.histories for target in targets)
        self._cut_short = any(target.num_skipped for target in targets)

    def in_words(self, seconds: float) -> str:
        return (
            f"Searched {self._histories} histories and mixes of requests in {seconds:.0f} s, "
            f"profile {self._settings.profile}.\n"
            "Strength of such a search: "
            f"{describe_strength(self._settings, cut_short=self._cut_short)}."
        )


def _read() -> dict[str, dict[str, Any]]:
    measured: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return measured


# Verdict on one target, from the counts of a run.


NEVER = "NOT REACHED"
"""Verdict on a path or condition that enough examples never reached: the run fails."""
RARELY = "too rarely"
"""Verdict on one reached too few times, or tried by too few examples: a warning."""


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """Row of the verdict: a path or a condition."""

    kind: str
    name: str
    must_equal: str
    times: int
    verdict: str


@dataclass(frozen=True, slots=True)
class TargetVerdict:
    """Verdict on one target: coverage, problems, warnings and remedies."""

    target: TargetCoverage
    settings: Settings = field(default_factory=settings.current)

    def rows(self) -> list[CoverageRow]:
        paths = [self._row("path", name, twin) for name, twin in self.target.paths.items()]
        return paths + [self._row("condition", name, "") for name in self.target.conditions]

    def _row(self, kind: str, name: str, twin: str) -> CoverageRow:
        times = self.target.counts[name]
        if self.target.failed:
            verdict = "see failures"
        elif not self.target.searched:
            verdict = "not searched"
        elif times >= coverage.REQUIRED_TIMES:
            verdict = "met" if twin in ("", name) else "equal"
        elif times or self.target.is_inconclusive(name) or self.target.large_counts[name]:
            verdict = RARELY
        else:
            verdict = NEVER
        return CoverageRow(kind, name, twin, times, verdict)

    def problems(self, *, require_paths: bool) -> list[str]:
        """List the required checks that did not run, which fail the run."""
        if self.target.failed or not self.target.searched:
            return []
        if not self.target.histories:
            return ["its search ran no history: a check that did not run is not a pass"]
        if not require_paths:
            return []
        return [
            f"{row.kind} {row.name!r} was never reached, by none of {self._tries(row.name)}: "
            f"a check that did not run is not a pass{self._early()}{self._suggest_condition(row)}"
            for row in self.rows()
            if row.verdict == NEVER
        ]

    def warnings(self) -> list[str]:
        """List paths and conditions that were reached too rarely, with remedies."""
        target = self.target
        searched = target.searched and target.histories and not target.failed
        if not (searched and self.settings.require_paths):
            return []
        return [target.blindness] * bool(target.blindness) + [
            f"{row.kind} {row.name!r} was {self._describe_times(row)}: {self._remedy(row)}"
            f"{self._early()}{self._suggest_condition(row)}"
            for row in self.rows()
            if row.verdict == RARELY
        ]

    def _tries(self, name: str) -> str:
        searches = searches_of(self.target.kind)
        return f"{self.target.eligible_examples[name]} {searches} that could reach it"

    def _describe_times(self, row: CoverageRow) -> str:
        if row.times:
            by = f" by {self._tries(row.name)}" if self.target.eligible_examples[row.name] else ""
            required = coverage.REQUIRED_TIMES
            return f"reached {format_count(row.times, 'time')}{by}, of {required} required"
        if large := self.target.large_counts[row.name]:
            return f"reached by {self._large} alone, {format_count(large, 'time')}"
        enough = self.target.conclusive(row.name)
        return f"not reached by {self._tries(row.name)}, too few for a verdict ({enough})"

    def _remedy(self, row: CoverageRow) -> str:
        """Advise how to reach a path or condition more often."""
        harder = f"search harder: {settings.harder_than(self.settings.profile)}"
        if row.kind == "condition" or row.name in self.target.aimed_paths:
            return harder
        return (
            "it has no aims, so searches cannot aim at it; make its requirement a switch of "
            "option_choices (such as a smaller minimum batch) and name that in aims, or "
            f"{harder}"
        )

    def _early(self) -> str:
        return f"; {self.cut_short}" if self.target.num_skipped else ""

    def _suggest_condition(self, row: CoverageRow) -> str:
        """Suggest a condition of the harness for one that was never met, as it may be misspelt."""
        counted = counted_conditions(KVCacheAdapter)
        unknown = self.target.kind == "cache" and row.kind == "condition"
        unknown = unknown and row.name not in counted
        unknown = unknown and not row.name.startswith(TEXTS_DIFFER_IN)
        return did_you_mean(row.name, counted) if unknown and not row.times else ""

    @property
    def sizes(self) -> str:
        """Largest sizes in words; empty without any."""
        sizes, cut_short = largest_of(self.target.largest), self.target.large_cut_short
        early = f" ({self._large} cut short: {cut_short}, for lack of time)"
        return sizes + early * bool(sizes and cut_short)

    @property
    def _large(self) -> str:
        return "wide mixes" if self.target.kind == "engine" else "large histories"

    @property
    def cut_short(self) -> str:
        """Note that some examples were not tried; empty if all were tried."""
        if not self.target.num_skipped:
            return ""
        examples = self.target.examples
        return (
            f"searched {examples - self.target.num_skipped} of {examples} examples in the time "
            "limit (--roseinfer-search-seconds): this is less than full strength"
        )


def problems_of(run_coverage: Coverage, *, require_paths: bool) -> dict[str, list[str]]:
    """Return the problems by target, without targets that have none."""
    problems = {
        name: TargetVerdict(target).problems(require_paths=require_paths)
        for name, target in run_coverage.targets.items()
    }
    return {name: lines for name, lines in problems.items() if lines}


def searches_of(kind: str) -> str:
    """Return the noun for the examples of a kind of target."""
    return "mixes of requests" if kind == "engine" else "histories"


def largest_of(sizes: Mapping[str, int]) -> str:
    """Return the largest sizes in words; "" without any."""
    return "largest: " * bool(sizes) + ", ".join(f"{size} {name}" for name, size in sizes.items())


def pairs(values: Mapping[str, object], sign: str = " ") -> str:
    """Return names with their values, in one line."""
    return ", ".join(f"{name}{sign}{value}" for name, value in values.items())


# Verdict of a run, as in JSON reports.


FORMAT = 3
"""Format version of JSON reports; raised when a field changes its meaning."""
NOT_SEARCHED = "its histories were not searched in this run, so its paths are not judged"


class Target(TypedDict):
    """A target in the JSON report."""

    name: str
    distribution: str
    kind: str
    """``cache`` or ``engine``."""
    histories: int
    seconds: float
    """Seconds of its searches, summed over workers."""
    compiled: int
    """Number of kernels that were compiled for it."""
    searched: bool
    failed: bool
    examples: int
    """Number of examples planned for its searches."""
    left_out: int
    """Number of examples that were not tried because the time limit was over."""
    cut_short: str
    """Description of the examples that were not tried; empty if all were tried."""
    largest: dict[str, int]
    """Maximum rows of a batch, tokens of a sequence and, for a cache, blocks of a table."""
    large_cut_short: int
    """Number of large histories or mixes that ended early because their time limit was over."""
    problems: list[str]
    warnings: list[str]
    """Paths and conditions that were reached too rarely, which may be bad luck."""
    tested: dict[str, int]
    """Number of calls by method."""
    not_offered: list[str]
    checked: dict[str, int]
    """Number of checks by invariant."""
    batches: dict[str, int]
    """Number of batches by kind; empty for an engine."""
    known_missed: list[str]
    """Digests of known findings that their tests ran to the end without."""
    rows: list[dict[str, Any]]
    """Fields of ``CoverageRow`` for each declared path and condition."""
    times: dict[str, int]
    """Number of runs by path, including slow paths."""
    together: dict[str, dict[str, int]]
    """Number of steps by path and condition: the path ran, and the condition was met."""


class Verdict(TypedDict):
    """The JSON report."""

    format: int
    passed: bool
    problems: list[str]
    device: str
    server: dict[str, str]
    """``url`` and ``model`` of the tested server; empty without one."""
    profile: str
    examples: int
    steps: int
    seed: int | None
    required_paths: bool
    strength: str
    """Measured strength of a search with these settings, in words."""
    versions: dict[str, str]
    environment: dict[str, str]
    findings: list[FindingRecord]
    targets: list[Target]


def verdict(
    run_coverage: Coverage,
    run_settings: Settings,
    problems: Mapping[str, Sequence[str]],
    *,
    passed: bool,
) -> Verdict:
    """Return a run's verdict; ``problems`` are by target, those of the run under an empty name."""
    server = run_settings.endpoint
    return {
        "format": FORMAT,
        "passed": passed,
        "problems": list(problems.get("", ())),
        "device": describe_device(run_settings),
        "server": {"url": server.url, "model": server.model} if server else {},
        "profile": run_settings.profile,
        "examples": run_settings.examples,
        "steps": run_settings.steps,
        "seed": run_settings.seed,
        "required_paths": run_settings.require_paths,
        "strength": describe_strength(
            run_settings,
            cut_short=any(target.num_skipped for target in run_coverage.targets.values()),
        ),
        "versions": versions(),
        "environment": variables(),
        "findings": [
            finding for target in run_coverage.targets.values() for finding in target.findings
        ],
        "targets": [
            _target(name, target, problems.get(name, ()))
            for name, target in run_coverage.targets.items()
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
        "compiled": target.num_compiled_kernels,
        "searched": target.searched,
        "failed": target.failed,
        "examples": target.examples,
        "left_out": target.num_skipped,
        "cut_short": judged.cut_short,
        "largest": dict(target.largest),
        "large_cut_short": target.large_cut_short,
        "problems": list(problems),
        "warnings": judged.warnings(),
        "tested": target.abilities,
        "not_offered": target.missing_methods,
        "checked": dict(target.invariant_checks),
        "batches": dict(target.batches),
        "known_missed": [each for each in target.known_missed if each not in target.known_met],
        "rows": [asdict(row) for row in judged.rows()],
        "times": {path: target.counts[path] for path in paths},
        "together": {
            path: {name: target.conditions_by_path[path][name] for name in target.conditions}
            for path in paths
        },
    }
