"""``python -m tests.mutants``: plant the bugs, look for them, say what was found."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.load_target import TargetError, load_target, require_target
from pytest_roseinfer.plugin.reference import PageError
from pytest_roseinfer.settings import PROFILES, SHIPPED_TARGETS, choose_kernel_runtime
from roseinfer.cli.model_options import Parser
from roseinfer.progress import track_progress
from tests.mutants import report
from tests.mutants.catalogue import CATALOGUE, find
from tests.mutants.jobs import DIRECTED, EXAMPLES, HUNT, PROFILE, RANDOM, SHRINK, Job, Task
from tests.mutants.options import DESCRIPTION, add_options
from tests.mutants.results import sum_up
from tests.mutants.runner import WorkerFailed, run
from tests.mutants.shortest import SHORTEST, Made

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tests.mutants.jobs import Outcome
    from tests.mutants.mutant import Mutant

_COMMAND = "python -m tests.mutants"
_RANDOM_SEEDS = 3
"""How many seeds are compared with random operations, which take longer than the search."""
_SEEDS_OF_A_JOB = 4
"""How many seeds search an unbroken copy one after the other, each to its end."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=_COMMAND, description=DESCRIPTION)
    add_options(parser)
    asked = parser.parse_args(argv)
    try:
        mutants = [find(name) for name in asked.names] or list(CATALOGUE)
        _check_targets(asked)
        if asked.write_docs:
            report.require_page(Path(asked.write_docs))
    except PageError as error:
        print(f"--write-docs: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"{error.args[0]}; --list names them all", file=sys.stderr)
        return 2
    except TargetError as error:
        print(f"--targets: {error}", file=sys.stderr)
        return 2
    if asked.list:
        _list(mutants)
        return 0
    try:
        if asked.false_alarms:
            return _look_for_false_alarms(asked)
        if asked.smallest:
            return _make_smallest(asked)
        return _look_for_bugs(asked, mutants)
    except WorkerFailed as error:
        print(error, file=sys.stderr)
        return 2


def _check_targets(asked: argparse.Namespace) -> None:
    if not asked.targets:
        return
    if not asked.false_alarms:
        raise TargetError("planted bugs have their own; it goes with --false-alarms")
    choose_kernel_runtime()
    for name in asked.targets:  # all of them before any, which takes seconds, is imported
        require_target(name)
    for name in asked.targets:
        load_target(name)


def _list(mutants: Sequence[Mutant]) -> None:
    try:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.wrong}")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, such as head, has seen enough
        # What is still buffered must go somewhere when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def jobs_for(
    mutants: Sequence[Mutant], *, seeds: int, compare: bool, profile: str = PROFILE
) -> list[Job]:
    """What to try on each mutant; with ``compare``, random operations and examples too."""
    jobs = []
    hard = PROFILES[profile]
    for mutant in mutants:
        comparable = compare and bool(mutant.module)  # examples are of our own cache
        tasks = [Task(DIRECTED)] if mutant.directed else []
        for seed in range(seeds if mutant.targets else 0):
            tasks.append(Task(HUNT, seed))
            if comparable and seed < _RANDOM_SEEDS:
                tasks.append(Task(RANDOM, seed))
        if comparable:
            tasks.append(Task(EXAMPLES))
        jobs.append(Job(mutant, mutant.targets, tuple(tasks), hard.examples, hard.steps))
    return jobs


def alarm_jobs(seeds: int, targets: tuple[str, ...]) -> list[Job]:
    """The dev profile on a copy without a bug, once for every seed."""
    tasks = [Task(HUNT, seed) for seed in range(seeds)]
    dev = PROFILES["dev"]
    return [
        Job(None, targets, tuple(tasks[at : at + _SEEDS_OF_A_JOB]), dev.examples, dev.steps)
        for at in range(0, seeds, _SEEDS_OF_A_JOB)
    ]


def _look_for_bugs(asked: argparse.Namespace, mutants: list[Mutant]) -> int:
    seeds = 1 if asked.quick else asked.seeds
    # What a search finds is compared with what others find where it looks hardest.
    compare = not asked.quick and asked.profile == PROFILE
    jobs = jobs_for(mutants, seeds=seeds, compare=compare, profile=asked.profile)
    outcomes, seconds = _do(jobs, asked.jobs, "planted bugs")
    results = sum_up(mutants, outcomes)
    print(report.table(results))
    print(f"\n{report.summary(results, seconds)}")
    for result in results:
        for outcome in result.searches:
            if result.survived and outcome.killed:
                print(f"  {outcome.mutant}, seed {outcome.seed}: {outcome.check}: {outcome.what}")
    if asked.write_docs:
        strength = report.strength(results, seeds, asked.profile)
        page, how = Path(asked.write_docs), _command(asked)
        if asked.profile == PROFILE:
            report.write_results(page, results, seconds, how)
        else:
            report.write_profile(page, results, strength, seconds, how)
        if not asked.names and not asked.quick:
            strength.write()
    return int(any(result.survived for result in results))


def _look_for_false_alarms(asked: argparse.Namespace) -> int:
    targets = tuple(asked.targets or SHIPPED_TARGETS)
    outcomes, seconds = _do(alarm_jobs(asked.false_alarms, targets), asked.jobs, "seeds")
    said = report.alarms(outcomes, targets, seconds)
    print(said)
    if asked.write_docs:
        report.write_alarms(Path(asked.write_docs), said, _command(asked))
    return int(any(outcome.killed for outcome in outcomes))


def _make_smallest(asked: argparse.Namespace) -> int:
    known = [each for each in SHORTEST if each.bug in (asked.names or [each.bug])]
    tasks = tuple(Task(SHRINK, seed) for seed in range(asked.seeds))
    mutants = [find(each.bug) for each in known]
    jobs = [Job(mutant, mutant.targets, tasks) for mutant in mutants]
    outcomes, _ = _do(jobs, asked.jobs, "bugs whose smallest example is known")
    made = Made(known, outcomes)
    print(report.smallest(made))
    for outcome in outcomes:
        if not made.small_enough(outcome):
            print(f"\n{outcome.mutant}, seed {outcome.seed}: {outcome.what}")
    if asked.write_docs:
        report.write_smallest(Path(asked.write_docs), made, _command(asked))
    return int(not made.nearly_all)


def _do(jobs: Sequence[Job], processes: int, what: str) -> tuple[list[Outcome], float]:
    start = time.perf_counter()
    todo = sum(len(job.tasks) for job in jobs)
    outcomes: list[Outcome] = []
    with track_progress(todo, what, "tasks") as done:
        for outcome in run(jobs, processes=processes):
            outcomes.append(outcome)
            done()
    return outcomes, time.perf_counter() - start


def _command(asked: argparse.Namespace) -> str:
    parts = [_COMMAND, *asked.names]
    if asked.false_alarms:
        parts += [f"--false-alarms {asked.false_alarms}"]
        parts += ["--targets", *asked.targets] if asked.targets else []
    else:
        parts += [f"--profile {asked.profile}"] if asked.profile != PROFILE else []
        parts += ["--quick"] * asked.quick + ["--smallest"] * asked.smallest
        parts += [f"--seeds {asked.seeds}"] * (asked.seeds != 10 and not asked.quick)
    return " ".join([*parts, f"--write-docs {asked.write_docs}"])
