"""Broken caches of the tests: bugs that take a part which our own cache does not have.

Their docstrings begin with the rows of the list of known bugs that they stand for, and go on
with what is wrong.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.mutants.mutant import Mutant

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGE = "tests.capabilities.caches"
_FOLDER = Path(__file__).parents[1] / "capabilities" / "caches"
_ROWS = re.compile(r"(S?\d+(?:, S?\d+)*)[:,] ")
_OF_NO_ROW = {"RevivesWithoutItsKey", "HandsBackAFullHandle", "LeavesASlotActive"}
"""Caches lost data in these ways too, which nobody has reported."""


def _broken_caches() -> Iterator[Mutant]:
    for file in sorted(_FOLDER.glob("*_caches.py")):
        for found in ast.parse(file.read_text()).body:
            if isinstance(found, ast.ClassDef) and (said := ast.get_docstring(found)):
                rows = _ROWS.match(said)
                if rows or found.name in _OF_NO_ROW:
                    target = f"{_PACKAGE}.{file.stem}:{found.name}"
                    yield _mutant(found.name, target, said, rows)


def _mutant(cache: str, target: str, said: str, rows: re.Match[str] | None) -> Mutant:
    wrong = " ".join(said[rows.end() if rows else 0 :].split())
    return Mutant(
        re.sub(r"(?<!^)(?=[A-Z])", "-", cache).lower(),
        wrong[0].upper() + wrong[1:],
        rows=tuple(rows[1].split(", ")) if rows else (),
        targets=(target,),
    )


MUTANTS = tuple(_broken_caches())
