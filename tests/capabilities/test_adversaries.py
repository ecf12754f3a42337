"""Caches made to fool the harness: each is rejected, and the message says why."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from tests.project import Project

POISONED = "expected sequence 0, token 0, found poison"
REASONS = {
    "ReturnsItsInputs": POISONED,
    "IgnoresAppends": "expected shape [1, 1, 1], found [0, 1, 1]",
    "WritesNothing": POISONED,
    "PeekSharesMemory": POISONED,
    "ChangesItsInputs": "the write changed its input keys",
    "UploadsItsTableLate": "found poison (the block was freed",
    "ClaimsAPathItsRowsRuleOut": (
        "path 'all_rows' was counted, which writes one position for all rows; these rows needed "
        "positions ["
    ),
    "ClaimsAPathItsSwitchesRuleOut": "path 'all_rows' was counted, which batched=False rules out",
    "ClaimsAPathForNothing": "paths ['all_rows'] were counted though nothing was written",
    "ClaimsNoPath": "tokens were written and no path was counted",
    "TakesAnUndeclaredPath": "'shortcut' was counted, and is in neither paths nor conditions",
}
NEVER_FAST = "NeverTakesItsFastPath"
SEARCH = ("--roseinfer-examples=40", "--roseinfer-seed=1")


@pytest.mark.parametrize(
    "names",
    [["WritesNothing", "ClaimsNoPath"], pytest.param([*REASONS], marks=pytest.mark.slow)],
    ids=["two", "all"],
)
def test_each_adversary_is_rejected_with_its_reason(project: Project, names: list[str]) -> None:
    project.copy_caches()
    project.set_conclusive_examples(100)
    chosen = ("-k", f"histories and ({' or '.join([*names, NEVER_FAST])})")
    file = "caches/adversaries.py"
    result = project.pytest("-v", file, *chosen, *SEARCH, "--junitxml=results.xml")
    messages = failures(project)
    assert {*messages} == {*names}
    missed = {name: messages[name] for name in names if REASONS[name] not in messages[name]}
    assert missed == {}
    # The run fails, and no test: a path that never runs cannot be wrong.
    result.stdout.fnmatch_lines(
        [
            f"*adversaries:{NEVER_FAST}*",
            "path * all_rows * row_by_row * 0 *NOT REACHED",
            "FAILED: path 'all_rows' was never reached, by none of 100 *",
        ]
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def failures(project: Project) -> dict[str, str]:
    """Return the message of every failed test, by the name of the cache."""
    cases = ElementTree.parse(project.path / "results.xml").iter("testcase")
    return {
        case.attrib["classname"].rpartition(".Test")[2]: str(failure.text)
        for case in cases
        for failure in case.iter("failure")
    }
