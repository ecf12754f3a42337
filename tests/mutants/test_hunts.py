"""Searches for planted bugs, and reports of bugs that are not found."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.mutants import command, hunt
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.exhaustive import bugs_in_the_cache, walk_on
from tests.mutants.forking import in_child
from tests.mutants.install import plant, source_of
from tests.mutants.jobs import DIRECTED, EXAMPLES, HUNT, RANDOM, Job, Outcome, Task
from tests.mutants.known_bugs import KNOWN_BUGS
from tests.mutants.mutant import COMPACTED, MANAGERS, Mutant, StaleMutant
from tests.mutants.planted import BROKEN, CRASH, EQUIVALENT, POOL, RELEASE
from tests.mutants.runner import WorkerFailed, run
from tests.mutants.tally import Tally
from tests.slow import sorted_by_hash

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.slow


def small_job(mutant: Mutant | None, *tasks: Task, targets: Sequence[str] = (COMPACTED,)) -> Job:
    return Job(mutant, tuple(targets), tasks, examples=10, steps=6)


@pytest.mark.parametrize(("source", "places"), [("x = 1", 0), (f"{RELEASE}\n" * 2, 2)])
def test_stale_mutant_is_an_error(source: str, places: int) -> None:
    with pytest.raises(StaleMutant, match=f"'equivalent' replaces .* {places} places match"):
        EQUIVALENT.applied_to(source)


def test_planting_a_stale_mutant_is_an_error(tmp_path: Path) -> None:
    stale = Mutant("stale", "Nothing.", POOL, "BlockPool.drop", "no_such.call(argument, 3)", "")
    with pytest.raises(StaleMutant, match="0 places match"):
        plant(stale, tmp_path)


def test_bug_is_planted_only_in_the_copy(tmp_path: Path) -> None:
    before = source_of(POOL).read_text()
    plant(CRASH, tmp_path)
    assert "SIGSEGV" in (tmp_path / "roseinfer" / "kv" / "pool.py").read_text()
    assert source_of(POOL).read_text() == before


def one_bug_for_each_row() -> list[Mutant]:
    return [next(m for m in CATALOGUE if row in m.rows) for row in KNOWN_BUGS]


EIGHTHS = [0, *(pytest.param(eighth, marks=pytest.mark.slow) for eighth in range(1, 8))]


@pytest.mark.parametrize("eighth", EIGHTHS)
def test_bugs_of_every_known_row_are_found(eighth: int, capsys: pytest.CaptureFixture[str]) -> None:
    planted = {mutant.name for mutant in one_bug_for_each_row()}
    names = sorted_by_hash(planted, str)[eighth::8]
    assert command.main([*names, "--quick", "--jobs", "2"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in names)
    assert f"{len(names)} of {len(names)} planted bugs found" in output


KINDS = (HUNT, RANDOM, EXAMPLES, DIRECTED)


@pytest.fixture(scope="module")
def finished() -> FinishedJobs:
    """Run some jobs in one worker, because its start takes longer than all of them."""
    jobs = [
        small_job(None, *map(Task, KINDS)),
        small_job(EQUIVALENT, Task(HUNT)),
        small_job(CRASH, Task(HUNT, 0), Task(HUNT, 1), targets=MANAGERS[:1]),
        small_job(BROKEN, Task(HUNT), targets=MANAGERS),
    ]
    outcomes: list[Outcome] = []
    with pytest.raises(WorkerFailed) as failure:
        outcomes.extend(run(jobs, processes=1))
    return FinishedJobs(outcomes, str(failure.value))


@dataclass(frozen=True)
class FinishedJobs:
    outcomes: list[Outcome]
    failure: str
    """Message of the last job's failure."""

    def of(self, mutant: Mutant | None) -> list[Outcome]:
        name = mutant.name if mutant else f"no bug in {COMPACTED}"
        return [outcome for outcome in self.outcomes if outcome.mutant == name]


def test_equivalent_change_survives(
    finished: FinishedJobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CATALOGUE", (EQUIVALENT,))
    monkeypatch.setattr(command, "run", lambda *_, **__: iter(finished.of(EQUIVALENT)))
    assert command.main([]) == 1
    assert "SURVIVED: equivalent" in capsys.readouterr().out


def test_unbroken_copy_has_no_failures(finished: FinishedJobs) -> None:
    outcomes = finished.of(None)
    assert tuple(outcome.kind for outcome in outcomes) == KINDS
    assert [(outcome.check, outcome.message) for outcome in outcomes if outcome.killed] == []
    assert outcomes[0].examples > 10
    assert outcomes[1].operations >= outcomes[0].operations


def test_crash_counts_as_found_and_the_next_seed_runs(finished: FinishedJobs) -> None:
    outcomes = finished.of(CRASH)
    assert [outcome.message for outcome in outcomes] == ["the process was ended by SIGSEGV"] * 2
    assert all(outcome.killed and outcome.check == "histories" for outcome in outcomes)
    assert all(outcome.examples for outcome in outcomes)


def test_copy_that_cannot_be_imported_is_an_error(finished: FinishedJobs) -> None:
    assert finished.of(BROKEN) == []
    assert re.search(r"worker failed on broken: [\s\S]*SyntaxError", finished.failure)


def test_hanging_example_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunt, "_HANGS_AFTER", 1)
    tally = Tally()

    def hang() -> str:
        with hunt.guarded(tally, operations=7):
            time.sleep(30)
        return "it went on"

    assert in_child(hang).ended_by == "SIGALRM"
    assert (tally.examples, tally.operations) == (1, 7)


def test_short_histories_find_a_bug_only_where_one_is_planted() -> None:
    (bug,) = (each for each in bugs_in_the_cache() if each.name == "truncated-a-block-long")
    assert walk_on(bug, 2) == "2"
    assert walk_on(None, 2) == ""
