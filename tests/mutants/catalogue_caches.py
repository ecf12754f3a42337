"""Broken caches and engines of the tests: bugs in parts that this distribution does not have.

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

_TESTS = Path(__file__).parents[1]
_FILES = ("capabilities/caches/*_caches.py", "engine_capabilities/engines/prefix_engines.py")
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
    "LetsAGroupRaiseTheLength",
    "LooksIntoOneStateGroup",
    "RoundsTheLogprobsOfAHit",
    "EvictsBeforeARefusal",
    "CountsRoomOfLaterCuts",
}
"""Bugs that stand for no reported one."""


def _broken_classes() -> Iterator[Mutant]:
    for file in (file for pattern in _FILES for file in sorted(_TESTS.glob(pattern))):
        module = ".".join(("tests", *file.relative_to(_TESTS).with_suffix("").parts))
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and (docstring := ast.get_docstring(node)):
                rows = _ROWS.match(docstring)
                if rows or node.name in _WITHOUT_ROW:
                    yield _mutant(node.name, f"{module}:{node.name}", docstring, rows)


def _mutant(name: str, target: str, docstring: str, rows: re.Match[str] | None) -> Mutant:
    wrong = " ".join(docstring[rows.end() if rows else 0 :].split())
    return Mutant(
        re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower(),
        wrong[0].upper() + wrong[1:],
        rows=tuple(rows[1].split(", ")) if rows else (),
        targets=(target,),
    )


MUTANTS = tuple(_broken_classes())
