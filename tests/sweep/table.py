"""Outcomes as tables for the terminal, and as lists for a page of the documentation."""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import version
from typing import TYPE_CHECKING

from tabulate import tabulate

from pytest_roseinfer.plugin.reference import entry, put_section, read_section
from tests.sweep.outcome import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.sweep.outcome import Outcome
    from tests.sweep.subject import Subject

    Outcomes = Mapping[Subject, Outcome]

VERSIONS, CLASSES, VARIANTS = "versions", "classes", "variants"
_HEADERS = {CLASSES: ("class", "config", "outcome"), VARIANTS: ("class", "variant", "outcome")}
_COUNTED = {
    Kind.AGREES: "agree",
    Kind.REFUSED: "are refused",
    Kind.NOT_BUILT: "could not be built",
    Kind.WRONG: "are WRONG",
}


def tables(outcomes: Outcomes) -> str:
    """Return a table for every section that has a subject."""
    return "\n".join(_table(outcomes, each) for each in _HEADERS if _of_section(outcomes, each))


def write(page: Path, outcomes: Outcomes, command: str) -> None:
    """Put the outcomes of all subjects into the page."""
    put_section(page, VERSIONS, f"`{command}` with {_versions()}:\n")
    for section in _HEADERS:
        put_section(page, section, _listing(outcomes, section))


def require(page: Path) -> None:
    """Raise unless the page has every section that ``write`` replaces."""
    for section in (VERSIONS, CLASSES, VARIANTS):
        read_section(page, section)


def is_of_these_versions(page: Path) -> bool:
    return _versions() in read_section(page, VERSIONS)


def differences(page: Path, outcomes: Outcomes) -> list[str]:
    """List the subjects of which the page has another kind of outcome, or none."""
    recorded = outcomes_of(page, CLASSES) | outcomes_of(page, VARIANTS)
    wrong = []
    for subject, outcome in outcomes.items():
        before = recorded.get(str(subject), "nothing")
        if not before.startswith(outcome.kind):
            now = _in_words(outcome)
            wrong.append(f"{subject}: {page.name} has {before!r}, and now it is {now!r}")
    return wrong


def outcomes_of(page: Path, section: str) -> dict[str, str]:
    """Return the outcomes that a section of the page has, by subject."""
    text = " ".join(read_section(page, section).split())
    return dict(re.findall(r"(?<= - )(\w+ by \w+.*?): (.*?)(?= - \w+ by \w+|$)", text))


def _in_words(outcome: Outcome) -> str:
    return " ".join(str(outcome).split()).replace("|", "/")


def _of_section(outcomes: Outcomes, section: str) -> dict[Subject, Outcome]:
    return {each: outcomes[each] for each in outcomes if _section(each) == section}


def _table(outcomes: Outcomes, section: str) -> str:
    """Return the number of each kind of outcome, and a row for each class or variant."""
    rows = [
        (subject.model_class, subject.variant or subject.config_class, _in_words(outcome))
        for subject, outcome in _of_section(outcomes, section).items()
    ]
    body = tabulate(rows, _HEADERS[section], disable_numparse=True)
    return f"{_counts(outcomes, section)}\n\n{body}\n"


def _listing(outcomes: Outcomes, section: str) -> str:
    """Return the number of each kind of outcome, and a list entry for each class or variant."""
    entries = [
        entry(str(subject), _in_words(outcome))
        for subject, outcome in _of_section(outcomes, section).items()
    ]
    return "\n".join([_counts(outcomes, section), "", *entries, ""])


def _counts(outcomes: Outcomes, section: str) -> str:
    part = _of_section(outcomes, section)
    kinds = Counter(outcome.kind for outcome in part.values())
    counts = ", ".join(f"{kinds[kind]} {words}" for kind, words in _COUNTED.items() if kinds[kind])
    return f"Of {len(part)} {section}, {counts}."


def _section(subject: Subject) -> str:
    return VARIANTS if subject.variant else CLASSES


def _versions() -> str:
    return f"transformers {version('transformers')} and roseinfer {version('roseinfer')}"
