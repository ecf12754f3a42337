"""The outcomes as tables, for the terminal and for a page of the documentation."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_roseinfer.plugin.reference import put_section, read_section
from tests.sweep.outcome import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.sweep.outcome import Outcome
    from tests.sweep.subject import Subject

    Found = Mapping[Subject, Outcome]

VERSIONS, CLASSES, VARIANTS = "versions", "classes", "variants"
_HEADERS = {CLASSES: ("class", "config", "outcome"), VARIANTS: ("class", "variant", "outcome")}
_COUNTED = {
    Kind.AGREES: "agree",
    Kind.REFUSED: "are refused",
    Kind.NOT_BUILT: "could not be built",
    Kind.WRONG: "are WRONG",
}


def tables(found: Found, *, style: str = "simple") -> str:
    """Return a table for every section that has a subject."""
    return "\n".join(_table(found, each, style) for each in _HEADERS if _part(found, each))


def write(page: Path, found: Found, command: str) -> None:
    """Put the outcomes of everything into the page."""
    put_section(page, VERSIONS, f"`{command}` with {_versions()}:\n")
    for section in _HEADERS:
        put_section(page, section, _table(found, section, "github"))


def require(page: Path) -> None:
    """Raise unless the page has every section that is written into it."""
    for section in (VERSIONS, CLASSES, VARIANTS):
        read_section(page, section)


def is_of_these_versions(page: Path) -> bool:
    return _versions() in read_section(page, VERSIONS)


def differences(page: Path, found: Found) -> list[str]:
    """Say for which subjects the page has another kind of outcome than was found, or no row."""
    said = {(section, *row[:2]): row[2] for section in _HEADERS for row in _rows(page, section)}
    wrong = []
    for subject, outcome in found.items():
        model, which, now = _row(subject, outcome)
        then = said.get((_section(subject), model, which), "nothing")
        if not then.startswith(outcome.kind):
            wrong.append(f"{subject}: {page.name} has {then!r}, and now it is {now!r}")
    return wrong


def _rows(page: Path, section: str) -> list[list[str]]:
    lines = read_section(page, section).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if len(row) == len(_HEADERS[section])]


def _row(subject: Subject, outcome: Outcome) -> list[str]:
    told = " ".join(str(outcome).split()).replace("|", "/")
    return [subject.model_class, subject.variant or subject.config_class, told]


def _part(found: Found, section: str) -> dict[Subject, Outcome]:
    return {each: found[each] for each in found if _section(each) == section}


def _table(found: Found, section: str, style: str) -> str:
    """Return how many there are of each outcome, and a row for each class or variant."""
    part = _part(found, section)
    kinds = Counter(outcome.kind for outcome in part.values())
    counts = ", ".join(f"{kinds[kind]} {words}" for kind, words in _COUNTED.items() if kinds[kind])
    rows = [_row(subject, outcome) for subject, outcome in part.items()]
    body = tabulate(rows, _HEADERS[section], tablefmt=style, disable_numparse=True)
    return f"Of {len(rows)} {section}, {counts}.\n\n{body}\n"


def _section(subject: Subject) -> str:
    return VARIANTS if subject.variant else CLASSES


def _versions() -> str:
    return f"transformers {version('transformers')} and roseinfer {version('roseinfer')}"
