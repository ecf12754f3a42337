"""docs/explanation/by-hand.md: both tests of the cache run, and its list has every planted bug."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import Phase, seed
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from pytest_roseinfer import settings
from tests.tutorials import paged_kv
from tests.tutorials.by_hand import ByHand
from tests.tutorials.planted_bugs import PLANTED, PlantedBug, load
from tests.tutorials.printed import adapter_of_paged_kv, harness_on, page

PAGE = page("explanation/by-hand.md")
SHORT = hypothesis_settings(
    max_examples=15, stateful_step_count=12, phases=[Phase.generate], database=None, deadline=None
)


def test_tutorial_cache_passes_the_test_by_hand() -> None:
    run_state_machine_as_test(seed(1)(ByHand), settings=SHORT)


@pytest.mark.usefixtures("short_run")
def test_tutorial_cache_passes_the_harness() -> None:
    settings.set_current(settings.Settings(examples=20, seed=1))
    harness_on(paged_kv).test_histories()


def test_test_by_hand_finds_a_planted_bug() -> None:
    broken = type("Broken", (ByHand,), {"library": load(PLANTED[0].source())})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(seed(1)(broken), settings=SHORT)


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_planted_bug_is_valid_source(bug: PlantedBug) -> None:
    ast.parse(bug.source())


def rows() -> dict[str, list[str]]:
    """Return "yes" or "no" for the harness and for the test by hand, for each planted bug."""
    entry = r"- \*\*(.*?)\*\* \(harness: (yes|no), by hand: (yes|no)\)"
    return {words: columns for words, *columns in re.findall(entry, " ".join(PAGE.split()))}


def test_list_has_every_planted_bug() -> None:
    assert list(rows()) == ["nothing", *(bug.name for bug in PLANTED)]


@pytest.mark.parametrize(("subject", "column"), [("The harness", 0), ("The test by hand", 1)])
def test_totals_equal_the_list(subject: str, column: int) -> None:
    num_found = sum(rows()[bug.name][column] == "yes" for bug in PLANTED)
    assert f"{subject} finds {num_found} of {len(PLANTED)}" in PAGE


def test_page_has_the_right_numbers_of_lines() -> None:
    by_hand = (Path(__file__).with_name("by_hand.py")).read_text(encoding="utf-8")
    assert f"{lines_of(by_hand)} lines by hand" in PAGE
    assert f"{lines_of(adapter_of_paged_kv())} lines of adapter" in PAGE


def lines_of(code: str) -> int:
    """Return the number of non-empty lines."""
    return sum(bool(line.strip()) for line in code.splitlines())
