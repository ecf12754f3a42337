"""``python -m tests.mutants``: plant the bugs, search for them, report the results."""

from __future__ import annotations

import os
import sys
import time
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_roseinfer.adapters.load_target import TargetError, load_target, require_target
from pytest_roseinfer.plugin.reference import PageError
from pytest_roseinfer.settings import PROFILES, SHIPPED_TARGETS, choose_kernel_runtime
from roseinfer.cli.model_options import Parser
from roseinfer.terminal import track_progress
from tests.mutants import report
from tests.mutants.catalogue import CATALOGUE, find
from tests.mutants.jobs import DIRECTED, EXAMPLES, HUNT, PROFILE, RANDOM, SHRINK, Job, Task
from tests.mutants.kept import KeptError, KeptOutcomes
from tests.mutants.mutant import ENGINE
from tests.mutants.options import DESCRIPTION, add_options
from tests.mutants.results import sum_up
from tests.mutants.runner import WorkerFailed, run
from tests.mutants.shortest import SHORTEST, Shrunk

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tests.mutants.jobs import Outcome
    from tests.mutants.mutant import Mutant

_COMMAND = "python -m tests.mutants"
_RANDOM_SEEDS = 3
"""Number of seeds compared with random operations, which take longer than the search."""
_SEEDS_OF_A_JOB = 4
"""Number of seeds that search an engine or an unbroken copy in one job, one after the other."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog=_COMMAND, description=DESCRIPTION)
    add_options(parser)
    args = parser.parse_args(argv)
    try:
        mutants = [find(name) for name in args.names] or list(CATALOGUE)
        _check_targets(args)
        if args.write_docs:
            report.require_page(Path(args.write_docs))
    except PageError as error:
        print(f"--write-docs: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"{error.args[0]}; --list names them all", file=sys.stderr)
        return 2
    except TargetError as error:
        print(f"--targets: {error}", file=sys.stderr)
        return 2
    if args.list:
        _list(mutants)
        return 0
    try:
        if args.false_alarms:
            return _search_for_false_alarms(args)
        if args.smallest:
            return _shrink(args)
        return _search_for_bugs(args, mutants)
    except (KeptError, WorkerFailed) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cut off; with --resume FILE, the same command goes on next time", file=sys.stderr)
        return 130


def _check_targets(args: argparse.Namespace) -> None:
    if not args.targets:
        return
    if not args.false_alarms:
        raise TargetError("planted bugs have their own; use it with --false-alarms")
    choose_kernel_runtime()
    for name in args.targets:  # all before the first import, which takes seconds
        require_target(name)
    for name in args.targets:
        load_target(name)


def _list(mutants: Sequence[Mutant]) -> None:
    try:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.wrong}")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        # Python flushes the buffer at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def jobs_for(
    mutants: Sequence[Mutant], *, seeds: int, compare: bool, profile: str = PROFILE
) -> list[Job]:
    """Return the tasks on each mutant; with ``compare``, random operations and examples too.

    Searches of the engine, which take longest, come first and have several jobs for each bug.
    """
    jobs = []
    effort = PROFILES[profile]
    for mutant in mutants:
        comparable = compare and bool(mutant.module)  # examples test this distribution's cache
        tasks = [Task(DIRECTED)] if mutant.directed else []
        for seed in range(seeds if mutant.targets else 0):
            tasks.append(Task(HUNT, seed))
            if comparable and seed < _RANDOM_SEEDS:
                tasks.append(Task(RANDOM, seed))
        if comparable:
            tasks.append(Task(EXAMPLES))
        starts = [0]
        if ENGINE in mutant.targets:
            hunts = [at for at, task in enumerate(tasks) if task.kind == HUNT]
            starts += hunts[_SEEDS_OF_A_JOB::_SEEDS_OF_A_JOB]
        for start, end in pairwise([*starts, len(tasks)]):
            part = tuple(tasks[start:end])
            jobs.append(Job(mutant, mutant.targets, part, effort.examples, effort.steps))
    return sorted(jobs, key=lambda job: ENGINE not in job.targets)


def alarm_jobs(seeds: int, targets: tuple[str, ...]) -> list[Job]:
    """Return jobs that run the dev profile on a copy without a bug, once for every seed."""
    tasks = [Task(HUNT, seed) for seed in range(seeds)]
    dev = PROFILES["dev"]
    return [
        Job(None, targets, tuple(tasks[at : at + _SEEDS_OF_A_JOB]), dev.examples, dev.steps)
        for at in range(0, seeds, _SEEDS_OF_A_JOB)
    ]


def control_jobs(mutants: Sequence[Mutant]) -> list[Job]:
    """Return a search of each target on a copy without a bug.

    Where that fails, as with a Triton whose interpreter fails, every bug counts as found.
    """
    planted = [mutant for mutant in mutants if mutant.module]  # other targets are broken themselves
    targets = dict.fromkeys(target for mutant in planted for target in mutant.targets)
    return [job for target in targets for job in alarm_jobs(1, (target,))]


def _search_for_bugs(args: argparse.Namespace, mutants: list[Mutant]) -> int:
    seeds = 1 if args.quick else args.seeds
    # The search is compared with its baselines at its highest effort only.
    compare = not args.quick and args.profile == PROFILE
    controls = [] if args.quick else control_jobs(mutants)
    jobs = [
        *controls,
        *jobs_for(mutants, seeds=seeds, compare=compare, profile=args.profile),
    ]
    path = Path(args.resume) if args.resume else None
    hunted = " ".join(args.names) or "all bugs"
    kept = KeptOutcomes(path, f"{args.profile}, {seeds} seeds: {hunted}")
    left = kept.left(jobs)
    without_bug = {job.name for job in controls}
    outcomes = chain([*kept.outcomes], kept.keep(run(left, processes=args.jobs)))
    with track_progress(sum(len(job.tasks) for job in jobs), "planted bugs", "tasks") as done:
        for outcome in outcomes:
            if outcome.killed and outcome.mutant in without_bug:
                print(f"{outcome.mutant}: {outcome.check}: {outcome.message}", file=sys.stderr)
                print("searches for bugs end here: they would find the same", file=sys.stderr)
                return 2
            done()
    results, seconds = sum_up(mutants, kept.outcomes), kept.seconds
    print(report.table(results))
    print(f"\n{report.summary(results, seconds)}")
    for result in results:
        for outcome in result.searches:
            if result.survived and outcome.killed:
                print(
                    f"  {outcome.mutant}, seed {outcome.seed}: {outcome.check}: {outcome.message}"
                )
    if args.write_docs:
        strength = report.strength(results, seeds, args.profile)
        page, command_line = Path(args.write_docs), _command(args)
        if args.profile == PROFILE:
            report.write_results(page, results, seconds, command_line)
        else:
            report.write_profile(page, results, strength, seconds, command_line)
        if not args.names and not args.quick:
            strength.write()
    return int(any(result.survived for result in results))


def _search_for_false_alarms(args: argparse.Namespace) -> int:
    targets = tuple(args.targets or SHIPPED_TARGETS)
    outcomes, seconds = _do(alarm_jobs(args.false_alarms, targets), args.jobs, "seeds")
    summary = report.alarms(outcomes, targets, seconds)
    print(summary)
    if args.write_docs:
        report.write_alarms(Path(args.write_docs), summary, _command(args))
    return int(any(outcome.killed for outcome in outcomes))


def _shrink(args: argparse.Namespace) -> int:
    counted = [each for each in SHORTEST if each.bug in (args.names or [each.bug])]
    tasks = tuple(Task(SHRINK, seed) for seed in range(args.seeds))
    mutants = [find(each.bug) for each in counted]
    jobs = [Job(mutant, mutant.targets, tasks) for mutant in mutants]
    outcomes, _ = _do(jobs, args.jobs, "bugs whose smallest example is known")
    shrunk = Shrunk(counted, outcomes)
    print(report.smallest(shrunk))
    for outcome in outcomes:
        if not shrunk.small_enough(outcome):
            print(f"\n{outcome.mutant}, seed {outcome.seed}: {outcome.message}")
    if args.write_docs:
        report.write_smallest(Path(args.write_docs), shrunk, _command(args))
    return int(not shrunk.nearly_all)


def _do(jobs: Sequence[Job], processes: int, name: str) -> tuple[list[Outcome], float]:
    start = time.perf_counter()
    outcomes: list[Outcome] = []
    with track_progress(sum(len(job.tasks) for job in jobs), name, "tasks") as done:
        for outcome in run(jobs, processes=processes):
            outcomes.append(outcome)
            done()
    return outcomes, time.perf_counter() - start


def _command(args: argparse.Namespace) -> str:
    parts = [_COMMAND, *args.names]
    if args.false_alarms:
        parts += [f"--false-alarms {args.false_alarms}"]
        parts += ["--targets", *args.targets] if args.targets else []
    else:
        parts += [f"--profile {args.profile}"] if args.profile != PROFILE else []
        parts += ["--quick"] * args.quick + ["--smallest"] * args.smallest
        parts += [f"--seeds {args.seeds}"] * (args.seeds != 10 and not args.quick)
    return " ".join([*parts, f"--write-docs {args.write_docs}"])
