"""What the searches found is summed up, and the page and the wheel say the same of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.report import verdict
from pytest_roseinfer.report.verdict import Strength
from tests.mutants import command, report
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.jobs import RANDOM, Job, Outcome
from tests.mutants.known_bugs import KNOWN_BUGS
from tests.mutants.planted import DOCS, EQUIVALENT, outcome
from tests.mutants.results import sum_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def test_one_seed_that_misses_makes_a_survivor() -> None:
    (result,) = sum_up([EQUIVALENT], [outcome(0, killed=True), outcome(1, killed=False)])
    assert result.survived
    assert result.killed == "1/2"


def test_a_bug_that_nobody_looked_for_survives() -> None:
    (result,) = sum_up([EQUIVALENT], [outcome(0, killed=True, kind=RANDOM)])
    assert result.survived


def test_medians_are_over_the_searches_alone() -> None:
    searches = [
        outcome(seed, killed=True, examples=examples) for seed, examples in enumerate((1, 9, 2))
    ]
    (result,) = sum_up(
        [EQUIVALENT], [*searches, outcome(0, killed=False, kind=RANDOM, examples=99)]
    )
    assert (result.median_examples, result.most_examples) == (2, 9)
    assert (result.killed_by_random, result.survived) == ("0/1", False)


def test_the_wheel_says_of_its_strength_what_the_page_says() -> None:
    """Else: ``python -m tests.mutants --write-docs docs/mutants.md``."""
    said = Strength.of("ci")
    assert said is not None
    results = DOCS.read_text().partition("<!-- results -->")[2]
    assert f" on {said.date}, " in results
    assert f", roseinfer {said.version}, " in results
    assert f"\n{said.found} of {said.planted} planted bugs found in " in results
    assert said.planted <= len(CATALOGUE)  # bugs may have been planted since
    assert f"| {said.seeds}/{said.seeds} " in results


@pytest.mark.parametrize(
    ("names", "profile", "written"),
    [((), "ci", True), ((), "dev", True), ((EQUIVALENT.name,), "ci", False)],
)
def test_the_strength_is_that_of_a_hunt_for_every_bug(
    names: tuple[str, ...],
    profile: str,
    written: bool,
    monkeypatch: pytest.MonkeyPatch,
    page: Path,
    tmp_path: Path,
) -> None:
    def pretend(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes
        return (
            outcome(task.seed, killed=task.seed < 2, kind=task.kind)
            for job in jobs
            for task in job.tasks
        )

    monkeypatch.setattr(command, "CATALOGUE", (EQUIVALENT,))
    monkeypatch.setattr(command, "find", lambda _: EQUIVALENT)
    monkeypatch.setattr(command, "run", pretend)
    monkeypatch.setattr(verdict, "FILE", tmp_path / "strength.json")
    verdict.FILE.write_text("{}")
    hunt = [*names, "--seeds", "3", "--profile", profile, "--write-docs", str(page)]
    assert command.main(hunt) == 1
    said = Strength.of(profile)
    if not written:
        assert said is None
        return
    assert said is not None
    assert (said.planted, said.found, said.seeds) == (1, 0, 3)
    assert said.missed == {EQUIVALENT.name: 2}
    assert f"roseinfer {said.version}" in page.read_text()


def test_a_section_of_the_page_is_replaced_and_the_rest_kept(page: Path) -> None:
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
    assert all(f"| {row:5} |" in text for row in KNOWN_BUGS)


def test_a_page_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("mine")
    with pytest.raises(ValueError, match="no section"):
        report.write_alarms(page, "", "")
    assert page.read_text() == "mine"
