"""Docstrings, messages and pages are written in plain words (docs/reference/glossary.md)."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPENING = re.compile(
    r"(?:Of|Whether|What|Who|Whose|Those|That|These|One of|As|Behind|Where|How|Like|Nobody|"
    r"Somebody)\b"
)
"""Words that no docstring begins with: its first words are a noun phrase or an imperative."""
PHRASES = re.compile(
    r"\b(?:nobody|somebody|whoever|who then|lets? go|let go|gave up|given up|hand(?:s|ed)? on|"
    r"in front of|there (?:is|are) none|likeliest|(?:is|are|be) told|told of|(?:is|are) said|"
    r"hears?|heard|(?:is|are) asked|asked for|so many|say so|says so|for lack of|"
    r"tells? (?:of|how|what|if|whether)|beside|behind|on its way|entrants?)\b",
    re.IGNORECASE,
)
"""Phrases that the field has other words for."""
MAX_HITS_IN_CODE, MAX_HITS_IN_PAGES = 40, 1
"""Most hits allowed, for places in which a phrase is right."""
LAB = sorted((ROOT / "docs" / "lab").glob("*.md"))
"""Logs and full results, which quote messages and names of their day."""
PAGES = [*sorted({*(ROOT / "docs").rglob("*.md")} - {*LAB}), ROOT / "README.md"]
MAX_COLUMNS, MAX_TABLE_COLUMNS = 120, 100


def test_code_is_in_plain_words() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line}: {hit}"
        for package in ("roseinfer", "pytest_roseinfer")
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text, is_docstring in prose(ast.parse(path.read_text()))
        for hit in hits_of(text, opens=is_docstring)
    ]
    assert len(hits) <= MAX_HITS_IN_CODE, "\n".join(hits)


def test_pages_are_in_plain_words() -> None:
    hits = [
        f"{path.name}: {hit}"
        for path in PAGES
        for hit in hits_of(without_code(path.read_text()), opens=False)
    ]
    assert len(hits) <= MAX_HITS_IN_PAGES, "\n".join(hits)


@pytest.mark.parametrize("page", [*PAGES, *LAB], ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_pages_are_short(page: Path) -> None:
    assert too_long(page.read_text()) == []


def test_a_long_line_is_seen() -> None:
    text, row = "x " * 61, f"| {'x' * 98} |"
    assert too_long(f"{text}\n{row}\n```text\n{text}\n```\n{row}") == [text, row, row]


@pytest.mark.parametrize(
    "text", ["Whether it is on.", "Drop the likeliest token.", "The request is told so."]
)
def test_docstring_with_a_listed_phrase_is_found(text: str) -> None:
    module = ast.parse(f'def run():\n    """{text}"""\n')
    ((_, docstring, is_docstring),) = prose(module)
    assert len(list(hits_of(docstring, opens=is_docstring))) == 1


def test_attribute_docs_and_messages_are_searched() -> None:
    module = ast.parse('limit = 3\n"""Of rows."""\nraise ValueError("nobody is here now")\n')
    assert [hit for _, text, doc in prose(module) for hit in hits_of(text, opens=doc)] == [
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


def too_long(page: str) -> list[str]:
    """Return the lines outside of code that are too long for their kind."""
    lines = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.DOTALL | re.MULTILINE).splitlines()
    return [
        line
        for line in lines
        if len(line) > (MAX_TABLE_COLUMNS if line.startswith("|") else MAX_COLUMNS)
    ]


def without_code(page: str) -> str:
    """Return a page without its blocks of code, comments and headings of tables."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    return re.sub(r"<!-- \w+.*? -->.*?<!-- end -->", "", page, flags=re.DOTALL)
