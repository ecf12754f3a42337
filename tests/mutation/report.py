"""Score and survivors of a run: for the terminal, and for the page."""

from __future__ import annotations

from collections import Counter
from textwrap import fill
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_roseinfer.plugin.reference import put_section
from tests.mutants.report import provenance
from tests.mutation.attempts import SUITE, SURVIVED, TIME, UNIT, Result
from tests.mutation.verdicts import VERDICTS, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SECTION = "results"


def verdict_of(result: Result) -> Verdict | None:
    """Return the verdict on a survivor; None if nobody has judged it."""
    return next((each for each in VERDICTS if each.key == result.key), None)


def unmarked(results: Sequence[Result]) -> list[Result]:
    """Return the survivors without a verdict."""
    return [each for each in _survivors(results) if verdict_of(each) is None]


def summary(results: Sequence[Result]) -> str:
    """Return a row for each folder: mutants, and what became of them."""
    folders = sorted({_folder(each) for each in results})
    rows = [_row(name, [each for each in results if _folder(each) == name]) for name in folders]
    headers = ["mutants of", "all", SUITE, UNIT, TIME, "equal", "gaps", "score"]
    table = tabulate([*rows, _row("all", results)], headers, "github", disable_numparse=True)
    return str(table)


def _row(name: str, results: Sequence[Result]) -> list[str]:
    counts = Counter(each.killed_by for each in results)
    equal = sum(_is_equal(each) for each in _survivors(results))
    killed = len(results) - counts[SURVIVED]
    numbers = [len(results), counts[SUITE], counts[UNIT], counts[TIME], equal]
    numbers.append(counts[SURVIVED] - equal)
    score = killed / max(1, len(results) - equal)
    return [name, *map(str, numbers), f"{score:.1%}"]


def _folder(result: Result) -> str:
    parts = result.file.split("/")
    return f"`{parts[1]}/`" if len(parts) > 2 else "sampling"


def _survivors(results: Sequence[Result]) -> list[Result]:
    survivors = [each for each in results if each.killed_by == SURVIVED]
    return sorted(survivors, key=lambda each: (each.file, each.line))


def _is_equal(result: Result) -> bool:
    verdict = verdict_of(result)
    return verdict is not None and verdict.equal


def describe(result: Result) -> str:
    """Return what a mutant changes."""
    before, after = (
        _prefixed(text, sign) for text, sign in ((result.before, "-"), (result.after, "+"))
    )
    return f"`{result.function}` ({result.file})\n\n```diff\n{before}{after}```\n"


def _prefixed(text: str, sign: str) -> str:
    return "".join(f"{sign}{line}\n" for line in text.splitlines())


def write(file: Path, results: Sequence[Result], generated: int, command: str) -> None:
    """Put the score and the survivors into the page."""
    survivors = _survivors(results)
    gaps = [each for each in survivors if not _is_equal(each)]
    equal = [each for each in survivors if _is_equal(each)]
    body = [
        provenance(command),
        f"{len(results)} mutants, drawn from {generated}.\n",
        f"{summary(results)}\n",
        f"### Gaps\n\n{_listing(gaps)}",
        f"### Equal\n\n{_listing(equal)}",
    ]
    put_section(file, _SECTION, "\n".join(body))


def _listing(survivors: Sequence[Result]) -> str:
    if not survivors:
        return "None.\n"
    parts = []
    for each in survivors:
        verdict = verdict_of(each)
        why = verdict.why if verdict else "Nobody has judged it."
        parts.append(f"{describe(each)}\n{fill(why, 100, break_on_hyphens=False)}\n")
    return "\n".join(parts)
