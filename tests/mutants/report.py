"""The results as a table, for the terminal and for the documentation."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_roseinfer.plugin.reference import put_section, read_section
from pytest_roseinfer.report.verdict import Strength
from tests.mutants.catalogue import NOT_PLANTED
from tests.mutants.known_bugs import KNOWN_BUGS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.mutants.jobs import Outcome
    from tests.mutants.results import Result
    from tests.mutants.shortest import Made

_RESULTS, _ALARMS, _KNOWN, _LEFT_OUT = "results", "false-alarms", "known-bugs", "not-planted"
_SMALLEST = "smallest"


def table(results: Sequence[Result], *, style: str = "simple", words: bool = False) -> str:
    headers = ["bug", "row", "killed", "by", "examples", "most", "s", "random", "by example"]
    rows = []
    for result in results:
        mutant = result.mutant
        row: list[object] = [
            mutant.name,
            ", ".join(map(str, mutant.rows)),
            result.killed,
            result.checks,
            f"{result.median_examples:g}",
            result.most_examples,
            f"{result.median_seconds:.2f}",
            result.killed_by_random,
            result.killed_by_examples,
        ]
        if words:
            row.insert(1, mutant.wrong)
        rows.append(row)
    if words:
        headers.insert(1, "what is wrong")
    return tabulate(rows, headers, tablefmt=style, disable_numparse=True)


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
    lines += [f"seed {alarm.seed}: {alarm.check}: {alarm.what}" for alarm in failed]
    return "\n".join(lines)


def write_results(file: Path, results: Sequence[Result], seconds: float, command: str) -> None:
    body = [
        _how(command),
        summary(results, seconds) + ".\n",
        table(results, style="github", words=True) + "\n",
    ]
    put_section(file, _RESULTS, "\n".join(body))
    put_section(file, _KNOWN, known_bugs())
    put_section(file, _LEFT_OUT, left_out())


def write_profile(
    file: Path, results: Sequence[Result], strength: Strength, seconds: float, command: str
) -> None:
    """Put into the page what a profile other than the usual one finds, and what it misses."""
    body = f"{_how(command)}\n{_sentence(str(strength))} The hunt took {seconds:.0f} s.\n"
    if missed := [result for result in results if result.survived]:
        body += "\nMissed by some of the seeds:\n\n"
        body += table(missed, style="github", words=True) + "\n"
    put_section(file, strength.profile, body)


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def strength(results: Sequence[Result], seeds: int, profile: str) -> Strength:
    """What these results, of every planted bug, say of the search."""
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


def write_alarms(file: Path, said: str, command: str) -> None:
    """Put what ``alarms`` said into the page."""
    put_section(file, _ALARMS, f"{_how(command)}\n{said}\n")


def smallest(made: Made, *, style: str = "simple") -> str:
    """Say of each bug how small an example can be, and how many seeds made it that small."""
    rows = [
        (
            each.bug,
            each.example,
            *each.size,
            f"{sum(map(made.small_enough, made.of(each.bug)))}/{len(made.of(each.bug))}",
        )
        for each in made.known
    ]
    headers = ["bug", "smallest example, by hand", "steps", "tokens", "made as small"]
    return (
        f"{len(made.as_small)} of {len(rows)} are made as small as can be by every seed.\n\n"
        + tabulate(rows, headers, tablefmt=style, disable_numparse=True)
    )


def write_smallest(file: Path, made: Made, command: str) -> None:
    """Put what ``smallest`` says into the page."""
    put_section(file, _SMALLEST, f"{_how(command)}\n{smallest(made, style='github')}\n")


def _how(command: str) -> str:
    packages = ("roseinfer", "torch", "triton", "hypothesis")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"`{command}` on {_today()}, Python {platform.python_version()}, {versions}, "
        f"{platform.machine()}, Triton's interpreter.\n"
    )


def _today() -> datetime.date:
    return datetime.datetime.now(tz=datetime.UTC).date()


def require_page(file: Path) -> None:
    """Raise unless the file has every section that is written into it."""
    for section in (_RESULTS, _ALARMS, _KNOWN, _LEFT_OUT):
        read_section(file, section)


def known_bugs() -> str:
    rows = [(row, *bug) for row, bug in KNOWN_BUGS.items()]
    return tabulate(rows, ["row", "where it was", "what was wrong"], tablefmt="github") + "\n"


def left_out() -> str:
    return "".join(f"- {what}: {why}\n" for what, why in NOT_PLANTED.items())
