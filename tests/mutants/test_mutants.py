"""The planted bugs are found, and the runner would say so if they were not."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import KVCacheAdapter
from pytest_roseinfer.adapters.load_target import load_target
from pytest_roseinfer.report import strength
from pytest_roseinfer.report.strength import Strength
from pytest_roseinfer.settings import SHIPPED_TARGETS
from tests.mutants import command, hunt, report
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.forking import in_child
from tests.mutants.install import plant, source_of
from tests.mutants.jobs import DIRECTED, EXAMPLES, HUNT, RANDOM, Job, Outcome, Task
from tests.mutants.known_bugs import KNOWN_BUGS
from tests.mutants.mutant import COMPACTED, MANAGERS, Mutant, StaleMutant
from tests.mutants.results import sum_up
from tests.mutants.runner import WorkerFailed, run
from tests.mutants.tally import Tally
from tests.mutants.walked import in_the_cache, walk_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DOCS = Path(__file__).parents[2] / "docs" / "mutants.md"
APPLICABLE = {*map(str, range(1, 36)), *(f"S{row}" for row in range(1, 20))} - {"22"}
"""Rows of the lists of known bugs that our engine or a small cache of the tests has a part for."""
POOL = "roseinfer.kv.pool"
RELEASE = "        self.refcounts[index] -= 1\n"
EQUIVALENT = Mutant(
    "equivalent", "Nothing.", POOL, RELEASE, "        self.refcounts[index] += -1\n"
)
CRASH = Mutant(
    "crash", "Freeing ends the process.", POOL, RELEASE,
    "        import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n",
)  # fmt: skip
BROKEN = Mutant("broken", "It is no Python.", POOL, RELEASE, "        self.refcounts[index] -=\n")


def small_job(mutant: Mutant | None, *tasks: Task, targets: Sequence[str] = (COMPACTED,)) -> Job:
    return Job(mutant, tuple(targets), tasks, examples=10, steps=6)


# ------------------------------------------------------------------------- the catalogue


@pytest.mark.parametrize(
    "mutant", [each for each in CATALOGUE if each.module], ids=lambda mutant: mutant.name
)
def test_a_planted_bug_changes_the_code_it_was_made_for(mutant: Mutant) -> None:
    source = source_of(mutant.module).read_text()
    broken = mutant.applied_to(source)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    "mutant", [each for each in CATALOGUE if not each.module], ids=lambda mutant: mutant.name
)
def test_a_broken_cache_is_there_to_be_searched(mutant: Mutant) -> None:
    (target,) = mutant.targets
    assert issubclass(load_target(target), KVCacheAdapter)


def test_the_catalogue_covers_every_known_bug_that_applies() -> None:
    assert len(CATALOGUE) >= 30
    assert len({mutant.name for mutant in CATALOGUE}) == len(CATALOGUE)
    assert {row for mutant in CATALOGUE for row in mutant.rows} == APPLICABLE == KNOWN_BUGS.keys()


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_searched_for_in_one_way(mutant: Mutant) -> None:
    assert bool(mutant.targets) != bool(mutant.directed)


def test_the_page_shows_the_catalogue_as_it_is() -> None:
    """Else: ``python -m tests.mutants --write-docs docs/mutants.md``."""
    rows = [line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    shown = {row[1].strip(): row[2].strip() for row in rows if len(row) > 8}
    shown.pop("bug")
    assert shown == {mutant.name: mutant.wrong for mutant in CATALOGUE}
    page = DOCS.read_text()
    assert "SURVIVED" not in page
    assert report.known_bugs() in page
    assert report.left_out() in page


def test_the_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    offered = re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.M)
    assert sorted(re.findall(r"^\| `(--[\w-]+)`", DOCS.read_text(), re.M)) == sorted(
        set(offered) - {"--help"}
    )


# ------------------------------------------------------------------------------ planting


@pytest.mark.parametrize("source", ["nothing of the sort", RELEASE * 2], ids=["gone", "twice"])
def test_a_stale_mutant_is_an_error(source: str) -> None:
    with pytest.raises(StaleMutant, match="'equivalent' replaces text that must occur once"):
        EQUIVALENT.applied_to(source)


def test_planting_a_stale_mutant_is_an_error(tmp_path: Path) -> None:
    stale = Mutant("stale", "Nothing.", POOL, "no such code", "")
    with pytest.raises(StaleMutant, match="occurs 0 times"):
        plant(stale, tmp_path)


def test_a_bug_is_planted_in_the_copy_alone(tmp_path: Path) -> None:
    before = source_of(POOL).read_text()
    plant(CRASH, tmp_path)
    assert "SIGSEGV" in (tmp_path / "roseinfer" / "kv" / "pool.py").read_text()
    assert source_of(POOL).read_text() == before


# ------------------------------------------------------------------------------- finding


def one_for_each_row() -> list[Mutant]:
    return [next(m for m in CATALOGUE if row in m.rows) for row in KNOWN_BUGS]


def test_a_bug_of_every_known_kind_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted({mutant.name for mutant in one_for_each_row()})
    assert command.main([*names, "--quick", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names)
    assert f"{len(names)} of {len(names)} planted bugs found" in said


def test_a_change_that_breaks_nothing_survives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(mutants: Sequence[Mutant], **_: object) -> list[Job]:
        return [small_job(mutant, Task(HUNT)) for mutant in mutants]

    monkeypatch.setattr(command, "CATALOGUE", (EQUIVALENT,))
    monkeypatch.setattr(command, "jobs_for", small)
    assert command.main([]) == 1
    assert "SURVIVED: equivalent" in capsys.readouterr().out


def test_nothing_is_found_where_nothing_is_planted() -> None:
    tasks = [Task(kind) for kind in (HUNT, RANDOM, EXAMPLES, DIRECTED)]
    outcomes = list(run([small_job(None, *tasks)], processes=1))
    assert [outcome.kind for outcome in outcomes] == [task.kind for task in tasks]
    assert [(outcome.check, outcome.what) for outcome in outcomes if outcome.killed] == []
    assert outcomes[0].examples > 10
    assert outcomes[1].operations >= outcomes[0].operations


def test_a_crash_is_a_kill_and_the_next_seed_is_tried() -> None:
    job = small_job(CRASH, Task(HUNT, 0), Task(HUNT, 1), targets=MANAGERS[:1])
    outcomes = list(run([job], processes=1))
    assert [outcome.what for outcome in outcomes] == ["the process was ended by SIGSEGV"] * 2
    assert all(outcome.killed and outcome.check == "histories" for outcome in outcomes)
    assert all(outcome.examples for outcome in outcomes)


def test_a_copy_that_cannot_be_imported_is_no_kill() -> None:
    with pytest.raises(WorkerFailed, match=r"could not do broken: [\s\S]*SyntaxError"):
        list(run([small_job(BROKEN, Task(HUNT), targets=MANAGERS)], processes=1))


def test_an_example_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunt, "_HANGS_AFTER", 1)
    tally = Tally()

    def hang() -> str:
        with hunt.guarded(tally, operations=7):
            time.sleep(30)
        return "it went on"

    assert in_child(hang).ended_by == "SIGALRM"
    assert (tally.examples, tally.operations) == (1, 7)


def test_short_histories_find_a_bug_and_nothing_where_there_is_none() -> None:
    (bug,) = (each for each in in_the_cache() if each.name == "truncated-a-block-long")
    assert walk_on(bug, 2) == "2"
    assert walk_on(None, 2) == ""


# ------------------------------------------------------------------------- child processes


def test_a_child_returns_what_it_made() -> None:
    ended = in_child(lambda: str(os.getpid()))
    assert not ended.ended_by
    assert int(ended.answer) != os.getpid()


def test_an_error_in_a_child_is_raised() -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        in_child(lambda: str(1 // 0))


def test_a_child_does_not_outlive_whom_it_works_for() -> None:
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="ended with status"):
        in_child(_sleep_long, watch=gone)
    assert time.monotonic() - start < 10


def test_a_signal_is_told_by_name() -> None:
    def end() -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return ""

    assert in_child(end).ended_by == "SIGTERM"


# ------------------------------------------------------------------------------ reporting


def outcome(seed: int, *, killed: bool, kind: str = HUNT, examples: int = 3) -> Outcome:
    return Outcome(EQUIVALENT.name, kind, seed, killed, "histories", "what", examples, 9, 0.5)


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
    monkeypatch.setattr(strength, "FILE", tmp_path / "strength.json")
    strength.FILE.write_text("{}")
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


@pytest.fixture
def page(tmp_path: Path) -> Path:
    copy = tmp_path / "mutants.md"
    shutil.copy(DOCS, copy)
    return copy


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


# ----------------------------------------------------------------------------- the command


def test_the_list_names_every_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [mutant.name for mutant in CATALOGUE]


@pytest.mark.parametrize("names", [(), (CATALOGUE[0].name,)])  # more than a buffer, and less
def test_the_list_may_be_read_in_part(names: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as head does, only earlier
    command_line = [sys.executable, "-m", "tests.mutants", "--list", *names]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        command_line, stdout=writing, stderr=subprocess.PIPE, env=buffered, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_unknown_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["no-such-bug"]) == 2
    assert "no mutant is called 'no-such-bug'" in capsys.readouterr().err


@pytest.mark.parametrize("seeds", [1, 4, 9])
def test_every_seed_is_looked_at_for_false_alarms(seeds: int) -> None:
    jobs = command.alarm_jobs(seeds, ("one:Target",))
    assert [task for job in jobs for task in job.tasks] == [Task(HUNT, n) for n in range(seeds)]
    assert {(job.mutant, job.targets) for job in jobs} == {(None, ("one:Target",))}


@pytest.mark.parametrize(
    ("arguments", "targets"),
    [((), SHIPPED_TARGETS), (("--targets", *MANAGERS), MANAGERS)],
)
def test_false_alarms_are_looked_for_on_the_targets_named(
    arguments: tuple[str, ...],
    targets: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    page: Path,
) -> None:
    def pretend(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
        assert processes == 1
        assert {job.targets for job in jobs} == {targets}
        return (Outcome(None, HUNT, task.seed) for job in jobs for task in job.tasks)

    monkeypatch.setattr(command, "run", pretend)
    asked = ["--false-alarms", "6", "--jobs", "1", "--write-docs", str(page), *arguments]
    assert command.main(asked) == 0
    written = page.read_text().partition("## No false alarms")[2].partition("<!-- end -->")[0]
    assert " ".join(("--false-alarms 6", *arguments, "--write-docs")) in written
    assert "6 seeds of the dev profile on each" in written
    assert [line[2:] for line in written.splitlines() if line.startswith("- ")] == [*targets]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--targets", MANAGERS[0]), "--targets: planted bugs have their own"),
        (("--false-alarms", "1", "--targets", "no.such:Cache"), "--targets: no.such:Cache: "),
    ],
)
def test_targets_that_make_no_sense_are_a_usage_error(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_job_survives_the_trip_to_the_worker() -> None:
    job = command.jobs_for(CATALOGUE[:1], seeds=2, compare=True)[0]
    assert Job.from_line(job.to_line()) == job
    assert [task.kind for task in job.tasks] == [HUNT, RANDOM, HUNT, RANDOM, EXAMPLES]


def _sleep_long() -> str:
    time.sleep(30)
    return ""
