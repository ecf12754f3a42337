"""The gate of coverage: a run is no pass if declared paths or named targets were not checked."""

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

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pytest

    from pytest_roseinfer.report.verdict import Verdict
    from pytest_roseinfer.run.coverage import Coverage, TargetCoverage


NOT_OFFERED = "not offered"


class CoverageGate(Gate):
    """Judges what this process and its workers saw."""

    judged_last = True

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self._asked = settings.current()
        self._seen = coverage.current()
        self._by_target: dict[str, list[str]] = {}
        """The problems of each target; those of the run have an empty name."""

    def to_json(self) -> dict[str, Any]:
        return self._seen.to_json()

    def add(self, seen: dict[str, Any]) -> None:
        self._seen.add(seen)

    def judge(self, *, passed: bool) -> Sequence[str]:
        """Write every report that was asked for."""
        seen, asked = self._seen, self._asked
        if not (seen.targets or asked.named_targets or asked.reports):
            return ()
        problems = self._by_target = problems_of(seen, require_paths=asked.require_paths)
        # A run that failed or was stopped may not have come to them.
        if passed and (unchecked := self._unchecked()):
            problems[""] = unchecked
        found = verdict(seen, asked, problems, passed=passed and not problems)
        here = self.config.invocation_params.dir
        figures = figures_of(self.config)
        failures = [_write(here / name, found, figures) for name in asked.reports]
        if unwritten := [failure for failure in failures if failure]:
            problems.setdefault("", []).extend(unwritten)
        _add_junit_properties(self.config, seen)
        return [line for lines in problems.values() for line in lines]

    def _unchecked(self) -> list[str]:
        """Return a problem for each target of the command line that no test touched."""
        return [
            f"--roseinfer-target {name}: no test of this run checked it. Those that do are run by "
            "pytest --pyargs pytest_roseinfer.suite"
            for name in self._asked.named_targets
            if coverage.name_of(load_target(name)) not in self._seen.targets
        ]

    def in_markdown(self) -> Iterable[str]:
        for name, judged in self._judged.items():
            yield from (f"### roseinfer: `{name}`", "", self._searched(judged), "")
            for what, fact in _facts(judged.target).items():
                yield from (f"{what}: {fact}", "") if what != NOT_OFFERED else ()
            yield from (f"- **failed**: {found['what']}" for found in judged.target.found)
            if table := _table(judged, "github"):
                yield from (table, "")
            yield from (f"- **failed**: {problem}" for problem in self._by_target.get(name, ()))
            yield from (f"- warning: {warning}" for warning in judged.warnings())
            yield ""
        if self._judged:
            yield from (f"- **failed**: {problem}" for problem in self._by_target.get("", ()))

    def show(self, reporter: pytest.TerminalReporter) -> None:
        for name, judged in self._judged.items():
            reporter.section(f"roseinfer: {describe_target(name)}")
            reporter.line(self._searched(judged))
            for what, fact in _facts(judged.target).items():
                reporter.line(f"{what}: {fact}")
            if table := _table(judged, "simple"):
                reporter.line(table)
            show_problems(reporter, self._by_target.get(name, ()))
            for warning in judged.warnings():
                reporter.line(f"WARNING: {warning}", yellow=True)
        if problems := self._by_target.get(""):
            reporter.section("roseinfer")
            show_problems(reporter, problems)

    @property
    def _judged(self) -> dict[str, TargetVerdict]:
        targets = self._seen.targets
        return {name: TargetVerdict(target, self._asked) for name, target in targets.items()}

    def _searched(self, judged: TargetVerdict) -> str:
        """Say how hard this run looked at a target."""
        target, asked = judged.target, self._asked
        if not target.searched:
            return NOT_SEARCHED
        compiled = f", {target.compiled} kernels compiled" if asked.gpu else ""
        how_hard = (
            f"{target.histories} {searches_of(target.kind)} of up to {asked.steps} steps on "
            f"{describe_device(asked)} in {target.seconds:.0f} s{compiled}, profile "
            f"{asked.profile}, seed {asked.seed}"
        )
        return "\n".join(filter(None, [how_hard, judged.sizes, judged.cut_short]))


def _facts(target: TargetCoverage) -> dict[str, str]:
    facts = {
        "tested": pairs(target.abilities),
        NOT_OFFERED: ", ".join(target.not_offered),
        "checked": pairs(+target.checked),
        "batches": pairs(target.batches) if target.searched else "",
    }
    return {what: fact for what, fact in facts.items() if fact or what == "tested"}


def _table(judged: TargetVerdict, style: str) -> str:
    """Return a table of what was to be reached; empty where nothing was."""
    rows = [dataclasses.astuple(row) for row in judged.rows()]
    if not rows:
        return ""
    return tabulate(
        rows,
        headers=("", "name", "must equal", "times reached", "verdict"),
        tablefmt=style,
    )


def _write(file: Path, verdict: Verdict, figures: Mapping[str, str]) -> str:
    """Write a report in the format its suffix names; return why that failed, if so."""
    if file.suffix == ".html":
        text = page(verdict, _saved(verdict), figures)
    else:
        text = json.dumps(verdict, indent=1) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"--roseinfer-report {file}: {error.strerror}"
    return ""


def _saved(verdict: Verdict) -> dict[str, str]:
    """Return the files that were saved of findings, by the paths that these have."""
    folder, saved = settings.current().failures_dir, {}
    for found in verdict["findings"]:
        for path in filter(None, (found["trace"], found["script"], found["drawing"])):
            with suppress(OSError):  # somebody took it away, which is no reason to fail
                saved[path] = (Path(folder or "").parent / path).read_text(encoding="utf-8")
    return saved


def _add_junit_properties(config: pytest.Config, seen: Coverage) -> None:
    """Add ``roseinfer.<target>.<path>`` to the file of ``--junitxml``, if there is one."""
    from _pytest.junitxml import xml_key  # its public face is a fixture, and no test runs here

    if (xml := config.stash.get(xml_key, None)) is None:
        return
    for name, target in seen.targets.items():
        for row in TargetVerdict(target).rows():
            xml.add_global_property(f"roseinfer.{name}.{row.name}", str(row.times))
