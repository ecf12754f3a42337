"""Docstrings, messages and pages are written in plain words (docs/glossary.md)."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

OPENING = re.compile(
    r"(?:Of|Whether|What|Who|Whose|Those|That|These|One of|As|Behind|Where|How|Like|Nobody|"
    r"Somebody)\b"
)
"""Words that a docstring does not begin with: its first words name a thing, or say what to do."""
PHRASES = re.compile(
    r"\b(?:nobody|somebody|whoever|who then|lets? go|let go|gave up|given up|hand(?:s|ed)? on|"
    r"in front of|there (?:is|are) none|likeliest|(?:is|are|be) told|told of|(?:is|are) said|"
    r"hears?|heard|(?:is|are) asked|asked for|so many|say so|says so|for lack of|"
    r"tells? (?:of|how|what|if|whether)|beside|behind|on its way|entrants?)\b",
    re.IGNORECASE,
)
"""Phrases that the field has other words for."""
MOST_IN_CODE, MOST_IN_PAGES = 40, 30
"""Hits at most, for the few places in which a phrase is the right one."""
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
LISTS_OF_FINDINGS = ("found.md", "mutants.md", "performance.md", "models.md", "changelog.md")
"""Pages that report what was measured or found."""


def test_code_is_in_plain_words() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {found}"
        for package in ("roseinfer", "pytest_roseinfer")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text, is_docstring in prose(ast.parse(path.read_text()))
        for found in hits_of(text, opens=is_docstring)
    ]
    assert len(hits) <= MOST_IN_CODE, "\n".join(hits)


def test_pages_are_in_plain_words() -> None:
    hits = [
        f"{path.name}: {found}"
        for path in PAGES
        if path.name not in LISTS_OF_FINDINGS
        for found in hits_of(without_code(path.read_text()), opens=False)
    ]
    assert len(hits) <= MOST_IN_PAGES, "\n".join(hits)


@pytest.mark.parametrize(
    "text", ["Whether it is on.", "Drop the likeliest token.", "The request is told so."]
)
def test_a_docstring_in_other_words_is_seen(text: str) -> None:
    module = ast.parse(f'def run():\n    """{text}"""\n')
    ((_, found, is_docstring),) = prose(module)
    assert len(list(hits_of(found, opens=is_docstring))) == 1


def test_attributes_and_messages_are_looked_at() -> None:
    module = ast.parse('limit = 3\n"""Of rows."""\nraise ValueError("nobody is here now")\n')
    assert [found for _, text, doc in prose(module) for found in hits_of(text, opens=doc)] == [
        "Of rows.",
        "nobody",
    ]


def hits_of(text: str, *, opens: bool) -> Iterator[str]:
    plain = " ".join(re.sub(r"``?[^`]*``?", "x", text).split())
    if opens and OPENING.match(plain):
        yield plain[:60]
    yield from PHRASES.findall(plain)


def prose(module: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield docstrings, those of attributes too, and messages: texts of three words or more."""
    docstrings = set()
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                docstrings.add(id(each.value))
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_docstring = id(node) in docstrings
            if is_docstring or len(re.findall(r"[A-Za-z]+ ", node.value)) >= 2:
                yield node.lineno, node.value, is_docstring


def without_code(page: str) -> str:
    """Return a page without its blocks of code, comments and headings of tables."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return re.sub(r"<!-- \w+.*? -->.*?<!-- end -->", "", page, flags=re.DOTALL)
