"""The catalogue of planted bugs covers every known one, and the page shows it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import KVCacheAdapter
from pytest_roseinfer.adapters.load_target import load_target
from tests.mutants import command, report
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.install import source_of
from tests.mutants.known_bugs import KNOWN_BUGS
from tests.mutants.planted import DOCS

if TYPE_CHECKING:
    from tests.mutants.mutant import Mutant

APPLICABLE = {*map(str, range(1, 36)), *(f"S{row}" for row in range(1, 20))} - {"22"}
"""Rows of the lists of known bugs that our engine or a small cache of the tests has a part for."""


@pytest.mark.parametrize(
    "mutant",
    [each for each in CATALOGUE if each.module],
    ids=lambda mutant: mutant.name,
)
def test_a_planted_bug_changes_the_code_it_was_made_for(mutant: Mutant) -> None:
    source = source_of(mutant.module).read_text()
    broken = mutant.applied_to(source)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    "mutant", [each for each in CATALOGUE if not each.module], ids=lambda mutant: mutant.name
)
def test_a_broken_cache_is_there_to_be_searched(mutant: Mutant) -> None:
    (target,) = mutant.targets
    assert issubclass(load_target(target), KVCacheAdapter)


def test_the_catalogue_covers_every_known_bug_that_applies() -> None:
    assert len(CATALOGUE) >= 30
    assert len({mutant.name for mutant in CATALOGUE}) == len(CATALOGUE)
    assert {row for mutant in CATALOGUE for row in mutant.rows} == APPLICABLE == KNOWN_BUGS.keys()


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_searched_for_in_one_way(mutant: Mutant) -> None:
    assert bool(mutant.targets) != bool(mutant.directed)


def test_the_page_shows_the_catalogue_as_it_is() -> None:
    """Else: ``python -m tests.mutants --write-docs docs/mutants.md``."""
    rows = [line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    shown = {row[1].strip(): row[2].strip() for row in rows if len(row) > 8}
    shown.pop("bug")
    assert shown == {mutant.name: mutant.wrong for mutant in CATALOGUE}
    page = DOCS.read_text()
    assert "SURVIVED" not in page
    assert report.known_bugs() in page
    assert report.left_out() in page


def test_the_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    offered = re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.M)
    assert sorted(re.findall(r"^\| `(--[\w-]+)`", DOCS.read_text(), re.M)) == sorted(
        set(offered) - {"--help"}
    )
