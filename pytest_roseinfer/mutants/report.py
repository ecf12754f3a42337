"""The results as a table, for the terminal and for the documentation."""

from __future__ import annotations

import datetime
import platform
import re
from importlib.metadata import version
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_roseinfer.mutants.catalogue import NOT_PLANTED
from pytest_roseinfer.mutants.known_bugs import KNOWN_BUGS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_roseinfer.mutants.jobs import Outcome
    from pytest_roseinfer.mutants.results import Result

_PAGE = """\
# Planted bugs

The proof that the harness finds bugs: each of these was planted alone in a copy of the
engine's sources, and the copy was searched as `pytest --roseinfer-profile=ci` does. A bug that
any seed misses fails the command.

- *row*: the known bugs of real caches (below) that this one stands for.
- *killed*: in how many searches it was found, one for each seed. *by*: the checks that failed
  first. "directed" stands for a check of its own, where no history on a small cache can show
  the bug.
- *examples*: histories, or mixes of requests, tried until then, the one that failed included;
  the median over the seeds and the most. *s*: median seconds.
- *random*: the same number of operations as the search needed (at least 40), drawn uniformly
  and independently, followed by the same checks: how many seeds found the bug.
- *by example*: whether the usual tests made of examples find it.

"""
_RESULTS, _ALARMS, _KNOWN, _LEFT_OUT = "results", "false-alarms", "known-bugs", "not-planted"
_NO_ALARMS = "Not run yet.\n"


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
    _put(file, _RESULTS, "\n".join(body))
    _put(file, _KNOWN, known_bugs())
    _put(file, _LEFT_OUT, left_out())


def write_alarms(file: Path, said: str, command: str) -> None:
    """Put what ``alarms`` said into the page."""
    _put(file, _ALARMS, f"{_how(command)}\n{said}\n")


def _how(command: str) -> str:
    packages = ("roseinfer", "torch", "triton", "hypothesis")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return (
        f"`{command}` on {today}, Python {platform.python_version()}, {versions}, "
        f"{platform.machine()}, Triton's interpreter.\n"
    )


def _put(file: Path, section: str, body: str) -> None:
    """Replace one section of the page, or begin the page."""
    text = file.read_text() if file.exists() else _new_page()
    pattern = re.compile(rf"(?<=<!-- {section} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{file} has no section {section}: it is no page of this command")
    file.write_text(pattern.sub(lambda _: body, text, count=1))


def _new_page() -> str:
    return (
        f"{_PAGE}{_section(_RESULTS, '')}\n"
        f"## No false alarms\n\n{_section(_ALARMS, _NO_ALARMS)}\n"
        f"## The known bugs they stand for\n\n{_section(_KNOWN, known_bugs())}\n"
        f"## Not planted\n\n{_section(_LEFT_OUT, left_out())}"
    )


def known_bugs() -> str:
    rows = [(row, *bug) for row, bug in KNOWN_BUGS.items()]
    return tabulate(rows, ["row", "where it was", "what was wrong"], tablefmt="github") + "\n"


def left_out() -> str:
    return "".join(f"- {what}: {why}\n" for what, why in NOT_PLANTED.items())


def _section(name: str, body: str) -> str:
    return f"<!-- {name} -->\n{body}<!-- end -->\n"
