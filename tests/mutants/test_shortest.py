"""The command says which failures are made as small as one can count by hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutants import command
from tests.mutants.catalogue import find
from tests.mutants.jobs import SHRINK, Outcome, Task
from tests.mutants.shortest import HISTORIES, MIXES, SHORTEST, Size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

    from tests.mutants.jobs import Job

DOCS = Path(__file__).parents[2] / "docs" / "mutants.md"


def test_histories_and_mixes_of_enough_bugs_were_counted() -> None:
    assert (len(HISTORIES) >= 20, len(MIXES) >= 6) == (True, True)
    assert len({find(each.bug).name for each in SHORTEST}) == len(SHORTEST)
    engines = {any("ngine" in target for target in find(each.bug).targets) for each in MIXES}
    assert engines == {True}


def test_a_size_is_read_as_it_is_said() -> None:
    assert Size.said(str(Size(3, 14))) == Size(3, 14)
    assert Size(2, 9) < Size(3, 1) < Size(3, 2)


def outcome(bug: str, seed: int, size: Size, *, killed: bool = True) -> Outcome:
    return Outcome(bug, SHRINK, seed, killed, "histories", f"{size}\na cache")


def made_with(
    monkeypatch: pytest.MonkeyPatch, too_large: Sequence[str], *arguments: str
) -> tuple[int, list[Job]]:
    """Run the command as if failures on these bugs were left a step longer than need be."""
    asked: list[Job] = []

    def pretend(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes == 1
        asked.extend(jobs)
        for job, known in zip(jobs, SHORTEST, strict=True):
            assert job.name == known.bug
            more = known.size._replace(steps=known.size.steps + 1)
            for task in job.tasks:
                late = known.bug in too_large and task.seed == 1
                yield outcome(known.bug, task.seed, more if late else known.size)

    monkeypatch.setattr(command, "run", pretend)
    return command.main(["--smallest", "--seeds", "2", "--jobs", "1", *arguments]), asked


def test_nine_in_ten_must_be_made_smallest_by_every_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [each.bug for each in SHORTEST[: len(SHORTEST) // 10]]
    status, jobs = made_with(monkeypatch, few)
    assert (status, jobs[0].tasks) == (0, (Task(SHRINK, 0), Task(SHRINK, 1)))
    said = capsys.readouterr().out
    count = len(SHORTEST)
    assert f"{count - len(few)} of {count} are made as small as can be by every seed." in said
    assert re.search(rf"^{few[0]} .* 1/2$", said, re.M)
    assert f"{few[0]}, seed 1: " in said
    many = [each.bug for each in SHORTEST[: len(SHORTEST) // 10 + 1]]
    assert made_with(monkeypatch, many)[0] == 1


def test_what_was_not_found_was_not_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes == 1
        return (Outcome(job.name, SHRINK, task.seed) for job in jobs for task in job.tasks)

    monkeypatch.setattr(command, "run", pretend)
    assert command.main(["--smallest", "--seeds", "1", "--jobs", "1"]) == 1


def test_the_page_shows_what_was_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else: ``python -m tests.mutants --smallest --write-docs docs/mutants.md``."""

    def shown(page: Path) -> list[tuple[str, ...]]:
        section = page.read_text().partition("<!-- smallest -->")[2].partition("<!-- end -->")[0]
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        return [tuple(cell.strip() for cell in line.split("|")[1:5]) for line in lines[1:]]

    counted = [(each.bug, each.example, *map(str, each.size)) for each in SHORTEST]
    assert shown(DOCS) == counted
    copy = tmp_path / "mutants.md"
    copy.write_text(DOCS.read_text())
    made_with(monkeypatch, [], "--write-docs", str(copy))
    assert shown(copy) == counted
    assert "`python -m tests.mutants --smallest --seeds 2 --write-docs " in copy.read_text()
