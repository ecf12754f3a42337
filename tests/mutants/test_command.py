"""The command: its list of bugs, false alarms, and usage errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.settings import SHIPPED_TARGETS
from tests.mutants import command
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.jobs import EXAMPLES, HUNT, RANDOM, Job, Outcome, Task
from tests.mutants.mutant import ENGINE, MANAGERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def test_list_names_every_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [mutant.name for mutant in CATALOGUE]


@pytest.mark.parametrize(
    "names", [(), (CATALOGUE[0].name,)]
)  # more than a buffer of output, and less
def test_list_can_be_read_in_part(names: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as head does, but before the first line
    command_line = [sys.executable, "-m", "tests.mutants", "--list", *names]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command_line, stdout=writing, stderr=subprocess.PIPE, env=buffered, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_unknown_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["no-such-bug"]) == 2
    assert "no mutant is called 'no-such-bug'" in capsys.readouterr().err


@pytest.mark.parametrize("seeds", [1, 4, 9])
def test_every_seed_is_searched_for_false_alarms(seeds: int) -> None:
    jobs = command.alarm_jobs(seeds, ("one:Target",))
    assert [task for job in jobs for task in job.tasks] == [Task(HUNT, n) for n in range(seeds)]
    assert {(job.mutant, job.targets) for job in jobs} == {(None, ("one:Target",))}


@pytest.mark.parametrize(
    ("arguments", "targets"),
    [((), SHIPPED_TARGETS), (("--targets", *MANAGERS), MANAGERS)],
)
def test_false_alarms_are_searched_on_the_named_targets(
    arguments: tuple[str, ...],
    targets: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    page: Path,
) -> None:
    def stub_run(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes == 1
        assert {job.targets for job in jobs} == {targets}
        return (Outcome(job.name, HUNT, task.seed) for job in jobs for task in job.tasks)

    monkeypatch.setattr(command, "run", stub_run)
    options = ["--false-alarms", "6", "--jobs", "1", "--write-docs", str(page), *arguments]
    assert command.main(options) == 0
    section = page.read_text().partition("## No false alarms")[2].partition("<!-- end -->")[0]
    assert " ".join(("--false-alarms 6", *arguments, "--write-docs")) in section
    assert "6 seeds of the dev profile on each" in section
    assert [line[2:] for line in section.splitlines() if line.startswith("- ")] == [*targets]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--targets", MANAGERS[0]), "--targets: planted bugs have their own"),
        (("--false-alarms", "1", "--targets", "no.such:Cache"), "--targets: no.such:Cache: "),
    ],
)
def test_invalid_targets_are_a_usage_error(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_target_that_fails_without_a_bug_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs_run: list[Job] = []

    def stub_run(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes
        jobs_run.extend(jobs)
        return (
            Outcome(job.name, HUNT, task.seed, True, "histories", "a step raised InterpreterError")
            for job in jobs
            for task in job.tasks
        )

    monkeypatch.setattr(command, "run", stub_run)
    assert command.main([CATALOGUE[0].name]) == 2
    assert [(job.mutant, job.targets) for job in jobs_run] == [
        *[(None, (target,)) for target in CATALOGUE[0].targets],
        (CATALOGUE[0], CATALOGUE[0].targets),
    ]
    name = f"no bug in {CATALOGUE[0].targets[0]}"
    assert f"{name}: histories: a step raised InterpreterError" in capsys.readouterr().err


def test_broken_caches_are_not_searched_without_their_bug() -> None:
    broken = [mutant for mutant in CATALOGUE if not mutant.module and mutant.targets]
    assert broken
    assert command.control_jobs(broken) == []


def test_jobs_of_a_bug_in_the_engine_have_each_task_once() -> None:
    (mutant, *_) = (each for each in CATALOGUE if each.targets == (ENGINE,))
    jobs = command.jobs_for([mutant], seeds=10, compare=True)
    tasks = [task for job in jobs for task in job.tasks]
    seeds = [task.seed for task in tasks if task.kind == HUNT]
    kinds = Counter(task.kind for task in tasks)
    assert (len(jobs), seeds) == (3, [*range(10)])
    assert kinds == {HUNT: 10, RANDOM: 3, EXAMPLES: 1}
    for job in jobs[1:]:
        assert job.tasks[0].kind == HUNT  # random operations need the search before them


def test_job_survives_serialisation() -> None:
    job = command.jobs_for(CATALOGUE[:1], seeds=2, compare=True)[0]
    assert Job.from_line(job.to_line()) == job
    assert [task.kind for task in job.tasks] == [HUNT, RANDOM, HUNT, RANDOM, EXAMPLES]
