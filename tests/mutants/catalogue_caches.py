"""Broken caches of the tests: bugs in parts that this distribution's cache does not have.

Their docstrings begin with the rows of the known bugs that they stand for, followed by a
description of the bug.
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
_ROWS = re.compile(r"([ST]?\d+(?:, [ST]?\d+)*)[:,] ")
_WITHOUT_ROW = {
    "RevivesWithoutItsKey",
    "HandsBackAFullHandle",
    "LeavesASlotActive",
    "RenewsOnARefusal",
    "EvictsWhileBlocksAreFree",
    "FindsWhatWasCut",
    "CountsABlockOfTwoAsFree",
    "MissesABlockOfTwo",
    "ChecksGroupByGroup",
    "TruncatesWithoutACheckpoint",
    "ForksWithoutCheckpoints",
    "SharesCheckpointsWithForks",
    "KeepsCheckpointsOfCutTokens",
    "KeepsCheckpointsOfTheName",
    "LeaksLookaheadBlocks",
    "SharesLookaheadBlocks",
    "LooksAheadTooFar",
    "KeepsTheBlocksOfAllDrafts",
    "RegistersLookaheadBlocks",
    "SharesTheStateOfAFork",
    "UpdatesACheckpointInPlace",
    "KeepsTheStateOnResume",
    "MixesLayersOfACheckpoint",
    "KeepsOldStatesOfANewText",
    "GoesOnAfterATruncation",
    "ResumesWithoutIndexerKeys",
    "IndexesAFoundPrefixAgain",
    "IndexesInOneTable",
    "IndexesOnTheFirstRank",
    "IndexesPaddingRows",
    "IndexesLayersAsOne",
    "KeepsTheVectorsOfAWrite",
    "MovesInTheFirstLayer",
    "MovesKeysOnly",
    "MovesIntoOneBlock",
    "NeverFindsAcceptedDrafts",
    "LeaksDroppedBeams",
    "LeavesDroppedBeams",
    "SelectsKeysOnly",
    "SelectsInTheFirstLayer",
    "LeaksReleasedSessions",
    "KeepsFullBlocks",
    "ForgetsTheSessionsBlocks",
}
"""Bugs that stand for no reported one."""


def _broken_caches() -> Iterator[Mutant]:
    for file in sorted(_FOLDER.glob("*_caches.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and (docstring := ast.get_docstring(node)):
                rows = _ROWS.match(docstring)
                if rows or node.name in _WITHOUT_ROW:
                    target = f"{_PACKAGE}.{file.stem}:{node.name}"
                    yield _mutant(node.name, target, docstring, rows)


def _mutant(cache: str, target: str, docstring: str, rows: re.Match[str] | None) -> Mutant:
    wrong = " ".join(docstring[rows.end() if rows else 0 :].split())
    return Mutant(
        re.sub(r"(?<!^)(?=[A-Z])", "-", cache).lower(),
        wrong[0].upper() + wrong[1:],
        rows=tuple(rows[1].split(", ")) if rows else (),
        targets=(target,),
    )


MUTANTS = tuple(_broken_caches())
