"""Catalogue of planted bugs: anchors, known bugs, and the pages."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import EngineAdapter, KVCacheAdapter
from pytest_roseinfer.adapters.load_target import load_target
from pytest_roseinfer.plugin.reference import read_section
from tests.mutants import command, report
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.install import source_of
from tests.mutants.known_bugs import KNOWN_BUGS
from tests.mutants.planted import RESULTS_PAGE, SUMMARY_PAGE

if TYPE_CHECKING:
    from tests.mutants.mutant import Mutant

APPLICABLE = {
    *map(str, range(1, 36)),
    *(f"S{row}" for row in range(1, 20)),
    *(f"T{row}" for row in range(1, 33)),
} - {"22"}
"""Rows of known bugs in parts that the engine or a small cache of the tests has."""


@pytest.mark.sampled_cases
@pytest.mark.parametrize(
    "mutant",
    [each for each in CATALOGUE if each.module],
    ids=lambda mutant: mutant.name,
)
def test_planted_bug_changes_its_module(mutant: Mutant) -> None:
    source = source_of(mutant.module).read_text()
    broken = mutant.applied_to(source)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    "mutant", [each for each in CATALOGUE if not each.module], ids=lambda mutant: mutant.name
)
def test_broken_class_exists(mutant: Mutant) -> None:
    (target,) = mutant.targets
    assert issubclass(load_target(target), KVCacheAdapter | EngineAdapter)


def test_catalogue_covers_every_applicable_known_bug() -> None:
    assert len(CATALOGUE) >= 30
    assert len({mutant.name for mutant in CATALOGUE}) == len(CATALOGUE)
    assert {row for mutant in CATALOGUE for row in mutant.rows} == APPLICABLE == KNOWN_BUGS.keys()


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.name)
def test_planted_bug_has_targets_or_a_directed_check(mutant: Mutant) -> None:
    assert bool(mutant.targets) != bool(mutant.directed)


def test_page_has_the_whole_catalogue() -> None:
    """Else: ``python -m tests.mutants --write-docs docs/lab/mutants.md``."""
    results = read_section(RESULTS_PAGE, "results")
    assert re.findall(r"^- `([\w-]+)`: ", results, re.M) == [mutant.name for mutant in CATALOGUE]
    assert [mutant for mutant in CATALOGUE if f"{report.bug(mutant)}\n  " not in results] == []
    page = RESULTS_PAGE.read_text()
    assert "SURVIVED" not in page
    assert report.known_bugs() in page
    assert report.not_planted() in page


def test_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    offered = re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, re.M)
    assert sorted(re.findall(r"^\| `(--[\w-]+)`", SUMMARY_PAGE.read_text(), re.M)) == sorted(
        set(offered) - {"--help"}
    )
