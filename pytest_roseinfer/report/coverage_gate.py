"""Gate of coverage: a run fails if declared paths or named targets were not checked."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from pytest_roseinfer import settings
from pytest_roseinfer.adapters.load_target import load_target
from pytest_roseinfer.environment import describe_device, describe_target
from pytest_roseinfer.gates.gate import Gate, figures_of, show_problems
from pytest_roseinfer.report.html import page
from pytest_roseinfer.report.verdict import (
    NOT_SEARCHED,
    TargetVerdict,
    pairs,
    problems_of,
    searches_of,
    verdict,
)
from pytest_roseinfer.run import coverage
from pytest_roseinfer.words import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pytest

    from pytest_roseinfer.report.verdict import Verdict
    from pytest_roseinfer.run.coverage import Coverage, TargetCoverage


NOT_OFFERED = "not offered"
_STATISTICS = "--hypothesis-show-statistics"
"""Option of Hypothesis that lists what each of its tests drew; the lists are those of searches."""


class CoverageGate(Gate):
    """Gate of the coverage of this process and its workers."""

    judged_last = True

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._settings = settings.current()
        self._coverage = coverage.current()
        self._by_target: dict[str, list[str]] = {}
        """Problems by target; problems of the whole run have the key ""."""

    def to_json(self) -> dict[str, Any]:
        return self._coverage.to_json()

    def add(self, collected: dict[str, Any]) -> None:
        self._coverage.add(collected)

    def judge(self, *, passed: bool) -> Sequence[str]:
        """Return the problems, and write the requested reports."""
        run_coverage, run_settings = self._coverage, self._settings
        if not (run_coverage.targets or run_settings.named_targets or run_settings.reports):
            return ()
        problems = self._by_target = problems_of(
            run_coverage, require_paths=run_settings.require_paths
        )
        # A run that failed or was stopped may not have reached all targets.
        if passed and (unchecked := self._unchecked_targets()):
            problems[""] = unchecked
        run_verdict = verdict(run_coverage, run_settings, problems, passed=passed and not problems)
        here = self.config.invocation_params.dir
        figures = figures_of(self.config)
        failures = [_write(here / name, run_verdict, figures) for name in run_settings.reports]
        if unwritten := [failure for failure in failures if failure]:
            problems.setdefault("", []).extend(unwritten)
        _add_junit_properties(self.config, run_coverage)
        return [line for lines in problems.values() for line in lines]

    def _unchecked_targets(self) -> list[str]:
        """Return a problem for each target of the command line that no test checked."""
        return [
            f"--roseinfer-target {name}: no test of this run checked it; its tests run with "
            "pytest --pyargs pytest_roseinfer.suite"
            for name in self._settings.named_targets
            if coverage.name_of(load_target(name)) not in self._coverage.targets
        ]

    def in_markdown(self) -> Iterable[str]:
        for name, judged in self._target_verdicts.items():
            yield from (f"### roseinfer: `{name}`", "", self._describe_search(judged), "")
            for label, fact in _facts(judged.target).items():
                yield from (f"{label}: {fact}", "") if label != NOT_OFFERED else ()
            for finding in judged.target.findings:
                known = finding["known"]
                yield f"- {known}" if known else f"- **failed**: {finding['summary']}"
            yield from (f"- {line}" for line in _missed_findings(judged.target, name))
            if table := _table(judged, "github"):
                yield from (table, "")
            yield from (f"- **failed**: {problem}" for problem in self._by_target.get(name, ()))
            yield from (f"- warning: {warning}" for warning in judged.warnings())
            yield ""
        if self._target_verdicts:
            yield from (f"- **failed**: {problem}" for problem in self._by_target.get("", ()))

    def show(self, reporter: pytest.TerminalReporter) -> None:
        for name, judged in self._target_verdicts.items():
            reporter.section(f"roseinfer: {describe_target(name)}")
            if reporter.verbosity > 0 or self.config.getoption(_STATISTICS, False):
                reporter.line(self._describe_search(judged))
                for label, fact in _facts(judged.target).items():
                    reporter.line(f"{label}: {fact}")
                if table := _table(judged, "simple"):
                    reporter.line(table)
            else:
                early = judged.sizes if judged.target.large_cut_short else ""
                reporter.line(self._describe_effort(judged, early))
                reporter.line(in_brief(judged))
            show_problems(reporter, self._by_target.get(name, ()))
            for warning in judged.warnings():
                reporter.line(f"WARNING: {warning}", yellow=True)
            for known in dict.fromkeys(finding["known"] for finding in judged.target.findings):
                if known:
                    reporter.line(f"XFAIL: {known}", yellow=True)
            for line in _missed_findings(judged.target, name):
                reporter.line(f"XPASS: {line}", yellow=True)
        if problems := self._by_target.get(""):
            reporter.section("roseinfer")
            show_problems(reporter, problems)

    @property
    def _target_verdicts(self) -> dict[str, TargetVerdict]:
        targets = self._coverage.targets
        return {name: TargetVerdict(target, self._settings) for name, target in targets.items()}

    def _describe_search(self, judged: TargetVerdict) -> str:
        """Describe this run's search effort on a target, with the sizes reached."""
        return self._describe_effort(judged, judged.sizes)

    def _describe_effort(self, judged: TargetVerdict, sizes: str = "") -> str:
        target, run_settings = judged.target, self._settings
        if not target.searched:
            return NOT_SEARCHED
        compiled = f", {target.num_compiled_kernels} kernels compiled" if run_settings.gpu else ""
        effort = (
            f"{target.histories} {searches_of(target.kind)} of up to {run_settings.steps} steps on "
            f"{describe_device(run_settings)} in {target.seconds:.0f} s{compiled}, profile "
            f"{run_settings.profile}, seed {run_settings.seed}"
        )
        return "\n".join(filter(None, [effort, sizes, judged.cut_short]))


def _missed_findings(target: TargetCoverage, name: str) -> Iterable[str]:
    """Yield a line for each known finding that its test ran to the end without."""
    known = settings.current().known_of(name)
    for digest in target.known_missed:
        if digest in known and digest not in target.known_met:
            missed = known[digest]
            yield f"{missed}; {missed.test} no longer finds it: remove the entry if it is fixed"


def in_brief(judged: TargetVerdict) -> str:
    """Return the numbers of what ``-v`` lists, and the names of what was not reached."""
    target = judged.target
    methods = len(target.tested_methods), len(target.missing_methods)
    parts = [f"tested {methods[0]} of {sum(methods)} methods"]
    parts += [format_count(len(+target.invariant_checks), "invariant")] * (target.kind == "cache")
    for kind, reached in {"path": "equal", "condition": "met"}.items():
        rows = [row for row in judged.rows() if row.kind == kind]
        missing = [row.name for row in rows if row.verdict != reached]
        if rows and target.searched and not target.failed:
            without = f" (not {', '.join(missing)})" if missing else ""
            count = f"{len(rows) - len(missing)} of {format_count(len(rows), kind)} {reached}"
            parts.append(f"{count}{without}")
    if target.failed and judged.rows():
        parts.append("paths and conditions not judged")
    return f"{', '.join(parts)}; -v lists them"


def _facts(target: TargetCoverage) -> dict[str, str]:
    facts = {
        "tested": pairs(target.abilities),
        NOT_OFFERED: ", ".join(target.missing_methods),
        "checked": pairs(+target.invariant_checks),
        "batches": pairs(target.batches) if target.searched else "",
    }
    return {label: fact for label, fact in facts.items() if fact or label == "tested"}


def _table(judged: TargetVerdict, style: str) -> str:
    """Return a table of declared paths and conditions; "" without any."""
    rows = [dataclasses.astuple(row) for row in judged.rows()]
    if not rows:
        return ""
    return tabulate(
        rows,
        headers=("", "name", "must equal", "times reached", "verdict"),
        tablefmt=style,
    )


def _write(file: Path, verdict: Verdict, figures: Mapping[str, str]) -> str:
    """Write a report in the format of its suffix; return an error message, or ""."""
    if file.suffix == ".html":
        text = page(verdict, _read_saved_files(verdict), figures)
    else:
        text = json.dumps(verdict, indent=1) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"--roseinfer-report {file}: {error.strerror}"
    return ""


def _read_saved_files(verdict: Verdict) -> dict[str, str]:
    """Return the contents of findings' saved files, by path."""
    folder, saved = settings.current().failures_dir, {}
    for finding in verdict["findings"]:
        for path in filter(None, (finding["trace"], finding["script"], finding["drawing"])):
            with suppress(OSError):  # the file may have been deleted since
                saved[path] = (Path(folder or "").parent / path).read_text(encoding="utf-8")
    return saved


def _add_junit_properties(config: pytest.Config, seen_coverage: Coverage) -> None:
    """Add ``roseinfer.<target>.<path>`` properties to the file of ``--junitxml``, if requested."""
    from _pytest.junitxml import xml_key  # the public API is a fixture, which needs a test

    if (xml := config.stash.get(xml_key, None)) is None:
        return
    for name, target in seen_coverage.targets.items():
        for row in TargetVerdict(target).rows():
            xml.add_global_property(f"roseinfer.{name}.{row.name}", str(row.times))
