"""Sizes of shrunk failures compared with the smallest examples, counted by hand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pytest_roseinfer.plugin.reference import read_section
from tests.mutants import command
from tests.mutants.catalogue import find
from tests.mutants.jobs import SHRINK, Outcome, Task
from tests.mutants.planted import RESULTS_PAGE
from tests.mutants.shortest import HISTORIES, MIXES, SHORTEST, Size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pytest

    from tests.mutants.jobs import Job


def test_enough_bugs_have_counted_examples() -> None:
    assert (len(HISTORIES) >= 20, len(MIXES) >= 6) == (True, True)
    assert len({find(each.bug).name for each in SHORTEST}) == len(SHORTEST)
    engines = {any("ngine" in target for target in find(each.bug).targets) for each in MIXES}
    assert engines == {True}


def test_size_is_parsed_as_printed() -> None:
    assert Size.parse(str(Size(3, 14))) == Size(3, 14)
    assert Size(2, 9) < Size(3, 1) < Size(3, 2)


def outcome(bug: str, seed: int, size: Size, *, killed: bool = True) -> Outcome:
    return Outcome(bug, SHRINK, seed, killed, "histories", f"{size}\na cache")


def run_command(
    monkeypatch: pytest.MonkeyPatch, too_large: Sequence[str], *arguments: str
) -> tuple[int, list[Job]]:
    """Run the command with stub failures, one step too long on these bugs for one seed."""
    jobs_run: list[Job] = []

    def stub_run(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes == 1
        jobs_run.extend(jobs)
        for job, counted in zip(jobs, SHORTEST, strict=True):
            assert job.name == counted.bug
            more = counted.size._replace(steps=counted.size.steps + 1)
            for task in job.tasks:
                longer = counted.bug in too_large and task.seed == 1
                yield outcome(counted.bug, task.seed, more if longer else counted.size)

    monkeypatch.setattr(command, "run", stub_run)
    return command.main(["--smallest", "--seeds", "2", "--jobs", "1", *arguments]), jobs_run


def test_every_seed_must_shrink_nine_in_ten_to_the_smallest_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tolerated = [each.bug for each in SHORTEST[: len(SHORTEST) // 10]]
    status, jobs = run_command(monkeypatch, tolerated)
    assert (status, jobs[0].tasks) == (0, (Task(SHRINK, 0), Task(SHRINK, 1)))
    output = capsys.readouterr().out
    count = len(SHORTEST)
    assert (
        f"{count - len(tolerated)} of {count} are shrunk to the smallest size by every seed."
        in output
    )
    assert re.search(rf"^{tolerated[0]} .* 1/2$", output, re.M)
    assert f"{tolerated[0]}, seed 1: " in output
    too_many = [each.bug for each in SHORTEST[: len(SHORTEST) // 10 + 1]]
    assert run_command(monkeypatch, too_many)[0] == 1


def test_bug_not_found_does_not_count_as_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def stub_run(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes == 1
        return (Outcome(job.name, SHRINK, task.seed) for job in jobs for task in job.tasks)

    monkeypatch.setattr(command, "run", stub_run)
    assert command.main(["--smallest", "--seeds", "1", "--jobs", "1"]) == 1


def test_page_has_the_counted_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else: ``python -m tests.mutants --smallest --write-docs docs/lab/mutants.md``."""

    def examples_of(page: Path) -> list[tuple[str, ...]]:
        section = " ".join(read_section(page, "smallest").split())
        return re.findall(
            r" - `([\w-]+)` \((\d+ of \d+ tokens); \d+/\d+\): (.*?)(?= - `|$)", section
        )

    expected = [(each.bug, str(each.size), each.example) for each in SHORTEST]
    assert examples_of(RESULTS_PAGE) == expected
    copy = tmp_path / "mutants.md"
    copy.write_text(RESULTS_PAGE.read_text())
    run_command(monkeypatch, [], "--write-docs", str(copy))
    assert examples_of(copy) == expected
    assert "`python -m tests.mutants --smallest --seeds 2 --write-docs " in copy.read_text()
