"""Results of searches: sums, the pages, and the strength in the wheel."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.report import verdict
from pytest_roseinfer.report.verdict import Strength
from tests.mutants import command, report
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.jobs import RANDOM, Job, Outcome
from tests.mutants.known_bugs import KNOWN_BUGS
from tests.mutants.planted import EQUIVALENT, RESULTS_PAGE, SUMMARY_PAGE, outcome
from tests.mutants.results import sum_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def test_bug_that_one_seed_misses_survives() -> None:
    (result,) = sum_up([EQUIVALENT], [outcome(0, killed=True), outcome(1, killed=False)])
    assert result.survived
    assert result.killed == "1/2"


def test_bug_without_a_search_survives() -> None:
    (result,) = sum_up([EQUIVALENT], [outcome(0, killed=True, kind=RANDOM)])
    assert result.survived


def test_medians_are_over_searches_only() -> None:
    searches = [
        outcome(seed, killed=True, examples=examples) for seed, examples in enumerate((1, 9, 2))
    ]
    (result,) = sum_up(
        [EQUIVALENT], [*searches, outcome(0, killed=False, kind=RANDOM, examples=99)]
    )
    assert (result.median_examples, result.max_examples) == (2, 9)
    assert (result.killed_by_random, result.survived) == ("0/1", False)


def test_strength_in_the_wheel_equals_the_page() -> None:
    """Else: ``python -m tests.mutants --write-docs docs/lab/mutants.md``."""
    strength = Strength.of("ci")
    assert strength is not None
    results = RESULTS_PAGE.read_text().partition("<!-- results -->")[2]
    assert f" on {strength.date},\n" in results
    assert f", roseinfer {strength.version}, " in results
    assert f"\n{strength.num_found} of {strength.planted} planted bugs found in " in results
    assert strength.planted <= len(CATALOGUE)  # bugs may have been planted since
    assert f"\n  {strength.seeds}/{strength.seeds} by " in results


@pytest.mark.parametrize("profile", ["ci", "dev"])
def test_summary_has_the_measured_strength(profile: str) -> None:
    """Else update the figures of docs/explanation/mutants.md from docs/lab/mutants.md."""
    strength = Strength.of(profile)
    assert strength is not None
    page = " ".join(SUMMARY_PAGE.read_text().split())
    assert re.search(
        rf"\| profile `{profile}`, [^|]* \| {strength.planted} \| {strength.num_found} \| \d+ \|",
        page,
    )
    not_found = page.partition("## Not found")[2].partition("## ")[0]
    for name, seeds in strength.unreliable.items():
        assert re.search(rf"`{name}` is found by {seeds}\b|`{name}` by {seeds}\b", not_found)


@pytest.mark.parametrize(
    ("names", "profile", "written"),
    [((), "ci", True), ((), "dev", True), ((EQUIVALENT.name,), "ci", False)],
)
def test_only_a_hunt_for_every_bug_writes_the_strength(
    names: tuple[str, ...],
    profile: str,
    written: bool,
    monkeypatch: pytest.MonkeyPatch,
    page: Path,
    tmp_path: Path,
) -> None:
    def stub_run(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes
        return (
            outcome(task.seed, killed=bool(job.mutant) and task.seed < 2, kind=task.kind)
            for job in jobs
            for task in job.tasks
        )

    monkeypatch.setattr(command, "CATALOGUE", (EQUIVALENT,))
    monkeypatch.setattr(command, "find", lambda _: EQUIVALENT)
    monkeypatch.setattr(command, "run", stub_run)
    monkeypatch.setattr(verdict, "FILE", tmp_path / "strength.json")
    verdict.FILE.write_text("{}")
    options = [*names, "--seeds", "3", "--profile", profile, "--write-docs", str(page)]
    assert command.main(options) == 1
    strength = Strength.of(profile)
    if not written:
        assert strength is None
        return
    assert strength is not None
    assert (strength.planted, strength.num_found, strength.seeds) == (1, 0, 3)
    assert strength.missed == {EQUIVALENT.name: 2}
    assert f"roseinfer {strength.version}" in page.read_text()


def test_writing_a_section_keeps_the_others(page: Path) -> None:
    results = sum_up([EQUIVALENT], [outcome(0, killed=True)])
    report.write_results(page, results, 1.0, "first command")
    alarms = report.alarms([outcome(0, killed=False)], ["one:Target", "another:Target"], 2.0)
    report.write_alarms(page, alarms, "alarm command")
    report.write_results(page, results, 3.0, "second command")
    text = page.read_text()
    assert "first command" not in text
    assert text.index("second command") < text.index("alarm command")
    assert (
        "1 seeds of the dev profile on each of these, without a planted bug: 0 failed (2 s)\n"
        "- one:Target\n- another:Target\n"
    ) in text
    assert all(f"\n- {row} (" in text for row in KNOWN_BUGS)


def test_page_without_sections_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("other")
    with pytest.raises(ValueError, match="no section"):
        report.write_alarms(page, "", "")
    assert page.read_text() == "other"
