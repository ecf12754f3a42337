"""A hunt that was cut off goes on with the outcomes it had."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.mutants import command
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.jobs import EXAMPLES, HUNT, RANDOM, Job, Outcome
from tests.mutants.kept import KeptError, KeptOutcomes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_TWO = CATALOGUE[:2]
_HUNT = "ci, 1 seeds: two bugs"


def _outcomes(jobs: Sequence[Job]) -> Iterator[Outcome]:
    for job in jobs:
        for task in job.tasks:
            yield Outcome(job.name, task.kind, task.seed, killed=True, examples=3)


@pytest.mark.parametrize(("ended_after", "tasks_left"), [(1, 3), (2, 1), (3, 0)])
def test_hunt_goes_on_with_the_tasks_that_are_left(
    ended_after: int, tasks_left: int, tmp_path: Path
) -> None:
    jobs = command.jobs_for(_TWO, seeds=1, compare=True)
    assert [task.kind for task in jobs[1].tasks] == [HUNT, RANDOM, EXAMPLES]
    path = tmp_path / "kept"
    first = KeptOutcomes(path, _HUNT)
    assert first.left(jobs) == jobs
    everything = list(first.keep(_outcomes(jobs)))
    assert everything == first.outcomes
    lines = path.read_text().splitlines(keepends=True)
    cut = 1 + 3 + ended_after
    path.write_text("".join(lines[:cut]) + "".join(lines[cut:])[:20])  # ended in a line
    second = KeptOutcomes(path, _HUNT)
    left = second.left(jobs)
    assert left == [replace(jobs[1], tasks=jobs[1].tasks[-tasks_left:])][: bool(tasks_left)]
    list(second.keep(_outcomes(left)))
    third = KeptOutcomes(path, _HUNT)
    assert third.outcomes == everything
    assert third.left(jobs) == []
    assert third.seconds >= second.seconds > 0


@pytest.mark.parametrize("text", ["", "dev, 10 seeds: all bugs\n"])
def test_file_of_another_hunt_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text(text)
    with pytest.raises(KeptError, match="is of another hunt"):
        KeptOutcomes(path, _HUNT)


def test_outcomes_that_are_kept_are_reported_without_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    searched: list[str] = []

    def stub_run(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes
        searched.extend(job.name for job in jobs)
        planted = _TWO[0].name  # others are targets without a bug, in which none is found
        return (replace(each, killed=each.mutant == planted) for each in _outcomes(jobs))

    monkeypatch.setattr(command, "run", stub_run)
    arguments = [_TWO[0].name, "--seeds", "1", "--resume", str(tmp_path / "kept")]
    assert command.main(arguments) == 0
    assert searched == [*[f"no bug in {each}" for each in _TWO[0].targets], _TWO[0].name]
    assert command.main(arguments) == 0
    assert len(searched) == len(_TWO[0].targets) + 1
    assert capsys.readouterr().out.count("1 of 1 planted bugs found") == 2
