"""Results of a hunt: tables for the terminal, and lists for the documentation."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import version
from textwrap import fill
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_roseinfer.plugin.reference import entry, put_section, read_section
from pytest_roseinfer.report.verdict import Strength
from tests.mutants.catalogue import NOT_PLANTED
from tests.mutants.known_bugs import KNOWN_BUGS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.mutants.jobs import Outcome
    from tests.mutants.mutant import Mutant
    from tests.mutants.results import Result
    from tests.mutants.shortest import Shortest, Shrunk

_RESULTS, _ALARMS, _KNOWN, _NOT_PLANTED = "results", "false-alarms", "known-bugs", "not-planted"
_SMALLEST = "smallest"


def table(results: Sequence[Result]) -> str:
    """Return a row of figures for each bug."""
    headers = ["bug", "row", "killed", "by", "examples", "most", "s", "random", "by example"]
    rows = [
        (
            result.mutant.name,
            ", ".join(map(str, result.mutant.rows)),
            result.killed,
            result.checks,
            f"{result.median_examples:g}",
            result.max_examples,
            f"{result.median_seconds:.2f}",
            result.killed_by_random,
            result.killed_by_examples,
        )
        for result in results
    ]
    return tabulate(rows, headers, disable_numparse=True)


def listing(results: Sequence[Result]) -> str:
    """Return a list entry for each bug: what is wrong, and its figures."""
    return "".join(f"{bug(result.mutant)}\n{_figures(result)}\n" for result in results)


def bug(mutant: Mutant) -> str:
    """Return the first lines of a bug's entry: its name and what is wrong."""
    return entry(f"`{mutant.name}`", mutant.wrong)


def _figures(result: Result) -> str:
    figures = [
        f"{result.killed} by {result.checks}" if result.checks else result.killed,
        f"examples {result.median_examples:g}, most {result.max_examples}",
        f"{result.median_seconds:.2f} s",
    ]
    optional = {
        "random": result.killed_by_random,
        "by example": result.killed_by_examples,
        "row": ", ".join(map(str, result.mutant.rows)),
    }
    figures += [f"{name} {value}" for name, value in optional.items() if value]
    return fill("; ".join(figures), 120, initial_indent="  ", subsequent_indent="  ")


def summary(results: Sequence[Result], seconds: float) -> str:
    survivors = [result.mutant.name for result in results if result.survived]
    missed = sum(result.killed_by_examples == "no" for result in results)
    random = [outcome for result in results for outcome in result.random]
    lines = [
        f"{len(results) - len(survivors)} of {len(results)} planted bugs found in {seconds:.0f} s"
    ]
    if random:
        share = sum(outcome.killed for outcome in random) / len(random)
        lines.append(
            f"random operations found {share:.0%} of those that histories can reach; tests by "
            f"example missed {missed} of {len(results)}"
        )
    lines += [f"SURVIVED: {name}" for name in survivors]
    return "\n".join(lines)


def alarms(outcomes: Sequence[Outcome], targets: Sequence[str], seconds: float) -> str:
    failed = [outcome for outcome in outcomes if outcome.killed]
    lines = [
        f"{len(outcomes)} seeds of the dev profile on each of these, without a planted bug: "
        f"{len(failed)} failed ({seconds:.0f} s)",
        *(f"- {name}" for name in targets),
    ]
    lines += [f"seed {alarm.seed}: {alarm.check}: {alarm.message}" for alarm in failed]
    return "\n".join(lines)


def write_results(file: Path, results: Sequence[Result], seconds: float, command: str) -> None:
    body = [
        provenance(command),
        summary(results, seconds) + ".\n",
        listing(results),
    ]
    put_section(file, _RESULTS, "\n".join(body))
    put_section(file, _KNOWN, known_bugs())
    put_section(file, _NOT_PLANTED, not_planted())


def write_profile(
    file: Path, results: Sequence[Result], strength: Strength, seconds: float, command: str
) -> None:
    """Put the results of a profile other than the default one into the page."""
    summed_up = f"{_sentence(str(strength))} The hunt took {seconds:.0f} s."
    body = f"{provenance(command)}\n{fill(summed_up, 100, break_on_hyphens=False)}\n"
    if missed := [result for result in results if result.survived]:
        body += "\nMissed by some of the seeds:\n\n"
        body += listing(missed)
    put_section(file, strength.profile, body)


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def strength(results: Sequence[Result], seeds: int, profile: str) -> Strength:
    """Return the strength of the search by the results of every planted bug."""
    return Strength(
        profile=profile,
        planted=len(results),
        seeds=seeds,
        missed={
            result.mutant.name: sum(outcome.killed for outcome in result.searches)
            for result in results
            if result.survived
        },
        version=version("roseinfer"),
        date=str(_today()),
    )


def write_alarms(file: Path, text: str, command: str) -> None:
    """Put the text of ``alarms`` into the page."""
    put_section(file, _ALARMS, f"{provenance(command)}\n{text}\n")


def smallest(shrunk: Shrunk) -> str:
    """Return each bug's smallest example, and how many seeds shrank a failure to its size."""
    rows = [(each.bug, each.example, *each.size, _seeds(shrunk, each)) for each in shrunk.counted]
    headers = ["bug", "smallest example, by hand", "steps", "tokens", "seeds"]
    return f"{_summary(shrunk)}\n\n" + tabulate(rows, headers, disable_numparse=True)


def _summary(shrunk: Shrunk) -> str:
    num_smallest, num_counted = len(shrunk.smallest), len(shrunk.counted)
    return f"{num_smallest} of {num_counted} are shrunk to the smallest size by every seed."


def _seeds(shrunk: Shrunk, counted: Shortest) -> str:
    """Return how many seeds shrank it to the smallest size: ``9/10``."""
    outcomes = shrunk.of(counted.bug)
    return f"{sum(map(shrunk.small_enough, outcomes))}/{len(outcomes)}"


def write_smallest(file: Path, shrunk: Shrunk, command: str) -> None:
    """Put the smallest examples into the page, and how many seeds shrank to their size."""
    entries = [
        entry(f"`{each.bug}`", each.example, f"{each.size}; {_seeds(shrunk, each)}")
        for each in shrunk.counted
    ]
    body = "\n".join([provenance(command), f"{_summary(shrunk)}\n", *entries])
    put_section(file, _SMALLEST, f"{body}\n")


def provenance(command: str) -> str:
    packages = ("roseinfer", "torch", "triton", "hypothesis")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"`{command}` on {_today()},\n"
        f"Python {platform.python_version()}, {versions}, {platform.machine()}, "
        "Triton's interpreter.\n"
    )


def _today() -> datetime.date:
    return datetime.datetime.now(tz=datetime.UTC).date()


def require_page(file: Path) -> None:
    """Raise unless the file has every section that the command writes."""
    for section in (_RESULTS, _ALARMS, _KNOWN, _NOT_PLANTED):
        read_section(file, section)


def known_bugs() -> str:
    """Return a list entry for each row: where the bug was, and what was wrong."""
    return "".join(f"{entry(row, wrong, where)}\n" for row, (where, wrong) in KNOWN_BUGS.items())


def not_planted() -> str:
    return "".join(f"{entry(change, reason)}\n" for change, reason in NOT_PLANTED.items())
