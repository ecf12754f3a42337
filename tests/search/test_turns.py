"""Additional rounds of a search, for paths and conditions that were reached too rarely."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import find

from pytest_roseinfer import FastPath, settings
from pytest_roseinfer.histories.strategies import switches
from pytest_roseinfer.run.coverage import (
    CONCLUSIVE_EXAMPLES,
    REQUIRED_TIMES,
    TargetCoverage,
    repeat_searches,
    split_examples,
)
from pytest_roseinfer.settings import Part
from tests.capabilities.caches.paged_cache import PagedCache
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.project import Project

LATE_CACHE = """
    from caches.adversaries import NeverTakesItsFastPath
    from caches.paged_cache import PagedCache
    from pytest_roseinfer import conformance

    class FastFromThe{first}th(NeverTakesItsFastPath):
        made = 0

        def make(self, spec):
            super().make(spec)
            type(self).made += 1

        def write(self, *rows):
            late = type(self).made >= {first}
            (PagedCache if late else NeverTakesItsFastPath).write(self, *rows)

    TestLate = conformance(FastFromThe{first}th)
"""
LATE_ENGINE = """
    from collections import Counter

    from pytest_roseinfer import FastPath, conformance
    from tests.engine_capabilities.engines.toy_engine import ToyForks

    class Late(ToyForks):
        paths = {**ToyForks.paths, "late": FastPath(equals="by itself")}
        conditions = (*ToyForks.conditions, "forked")
        made = 0

        def make(self, mix):
            super().make(mix)
            type(self).made += 1

        def fork(self, prompt, samplings):
            self.engine.counts["forked"] += 1
            return super().fork(prompt, samplings)

        def path_counts(self):
            return self.engine.counts + Counter(late=int(self.made >= 30))

    TestLate = conformance(Late)
"""
EXAMPLES = 12
SEARCH = (f"--roseinfer-examples={EXAMPLES}", "--roseinfer-seed=1")


def late_cache(project: Project, *, first: int, options: tuple[str, ...] = ()) -> pytest.RunResult:
    """Search a cache that takes its fast path from its ``first`` history on."""
    project.copy_caches()
    project.write(test_late=LATE_CACHE.format(first=first))
    return project.pytest("-v", "-k", "histories", *SEARCH, *options)


@pytest.mark.slow
def test_late_path_is_reached_by_additional_rounds(project: Project) -> None:
    result = late_cache(project, first=30)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["path * all_rows * row_by_row * equal"])


def test_search_ends_once_all_paths_are_reached(project: Project) -> None:
    result = late_cache(project, first=0)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([f"{EXAMPLES} histories of up to *"])


@pytest.mark.slow
def test_path_unreached_by_few_histories_is_a_warning(project: Project) -> None:
    result = late_cache(project, first=EXAMPLES + 100)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "path * all_rows * row_by_row * 0 *too rarely",
            "WARNING: path 'all_rows' was not reached by 72 histories that could reach it, *",
        ]
    )


@pytest.mark.slow
def test_path_unreached_by_enough_histories_is_a_failure(project: Project) -> None:
    project.set_conclusive_examples(70)
    result = late_cache(project, first=EXAMPLES + 100)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["FAILED: path 'all_rows' was never reached, by none of 72 histories that could reach it*"]
    )


@pytest.mark.slow
def test_unrequired_paths_cause_no_additional_rounds(project: Project) -> None:
    result = late_cache(project, first=30, options=("--roseinfer-required-paths=off",))
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([f"{EXAMPLES} histories of up to *", "*too rarely"])


def test_engines_have_additional_rounds_of_mixes_and_forks(project: Project) -> None:
    """Forks are searched again too, since requests without forks may not reach a path."""
    project.monkeypatch.setenv("PYTHONPATH", str(ROOT))
    project.write(test_late=LATE_ENGINE)
    result = project.pytest("-v", "-k", "requests_get", *SEARCH)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["path * late * by itself * equal", "condition * forked * met"])


def test_only_missing_paths_have_additional_rounds() -> None:
    target = TargetCoverage({"fast": "slow", "rare": "slow"}, ["met"])
    before = Counter(fast=10, rare=10, met=10)
    target.note(before + Counter(fast=REQUIRED_TIMES, rare=REQUIRED_TIMES - 1, met=1))
    aims = []
    for turn in repeat_searches(lambda tries: target.missing_paths(before, tries), 4, math.inf):
        aims.append(turn.aim)
        target.note({turn.aim or "met": 1})
    assert aims == ["rare", None, None]


@pytest.mark.parametrize(
    ("examples", "tries", "aims"),
    [
        (25, 0, ["never", "once", "dead"]),
        (25, 60, ["once"]),  # no number of short rounds proves that a path is never reached
        (100, 60, ["never", "once"]),
        (100, 1000, ["never", "once"]),
        (100, 1008, []),
    ],
)
@pytest.mark.usefixtures("short_run")
def test_missing_paths_depend_on_examples_and_tries(
    examples: int, tries: int, aims: list[str | None]
) -> None:
    settings.set_current(replace(settings.current(), examples=examples))
    target = TargetCoverage(dict.fromkeys(("never", "once", "often", "dead"), "slow"), [])
    target.counts.update(once=1, often=REQUIRED_TIMES)
    target.eligible_examples.update(
        never=CONCLUSIVE_EXAMPLES - 1, dead=CONCLUSIVE_EXAMPLES, once=CONCLUSIVE_EXAMPLES
    )
    assert target.missing_paths({}, tries) == aims


def test_rounds_have_distinct_names() -> None:
    def missing(tries: int) -> list[str | None]:
        return ["never", None] if tries < 40 else []

    names = [(turn.aim, turn.name) for turn in repeat_searches(missing, 4, math.inf)]
    assert len(names) == len(set(names)) > 2


class _Shares(PagedCache):
    paths: ClassVar[Mapping[str, FastPath]] = {
        "often": FastPath("slow", share=2),
        "usual": FastPath("slow"),
        "rare": FastPath("slow", share=0.25),
    }


@pytest.mark.usefixtures("short_run")
def test_examples_are_split_by_the_shares_of_paths() -> None:
    rounds = split_examples(_Shares, 130, 4)
    assert {
        aim: [turn.examples for turn in rounds if turn.aim == aim] for aim in _Shares.paths
    } == {
        "often": [8] * 10,
        "usual": [1] + [4] * 10,
        "rare": [1, 5, 5],
    }
    assert len({(turn.aim, turn.name) for turn in rounds}) == len(rounds)


@pytest.mark.usefixtures("short_run")
def test_each_path_has_an_example_after_the_first_turn_of_the_first_path() -> None:
    assert split_examples(_Shares, 130, 4)[:6] == [
        ("often", "0", 8, 0),
        ("usual", "first", 1, 0),
        ("rare", "first", 1, 0),
        ("usual", "0", 4, 1),
        ("rare", "0", 5, 1),
        ("often", "1", 8, 1),
    ]


class _ManySettings(PagedCache):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {"batched": (True, False, 2, 3, 4)}
    paths: ClassVar[Mapping[str, FastPath]] = {
        "often": FastPath("slow", aims=[{"batched": value} for value in (False, 2)]),
        "rare": FastPath("slow", share=0.1, aims=[{"batched": value} for value in (1, 2, 3, 4, 5)]),
    }


@pytest.mark.usefixtures("short_run")
def test_each_setting_of_a_path_begins_a_search() -> None:
    turns = split_examples(_ManySettings, 30, 4)
    rare = [(turn.name, turn.first_setting) for turn in turns if turn.aim == "rare"]
    assert rare == [("first", 0), ("0", 1), ("setting 2", 2), ("setting 3", 3), ("setting 4", 4)]
    assert [turn.first_setting for turn in turns if turn.aim == "often"] == [*range(7)]


@pytest.mark.parametrize("first_setting", range(7))
def test_simplest_example_of_a_search_has_its_first_setting(first_setting: int) -> None:
    strategy = switches(_ManySettings, "rare", first_setting)
    assert find(strategy, lambda _: True) == {"batched": first_setting % 5 + 1}


@pytest.mark.usefixtures("short_run")
def test_parts_cover_all_rounds_and_keep_a_path_together() -> None:
    whole = split_examples(_Shares, 130, 4)
    parts = []
    for number in (1, 2):
        settings.set_current(replace(settings.current(), part=Part(number, 2)))
        parts.append(split_examples(_Shares, 130, 4))
    assert sorted(parts[0] + parts[1]) == sorted(whole)
    assert [{turn.aim for turn in part} for part in parts] == [{"often", "rare"}, {"usual"}]


@pytest.mark.usefixtures("short_run")
def test_missing_path_is_searched_by_one_part() -> None:
    target = TargetCoverage({"fast": "slow", "rare": "slow"}, ["met"])
    missing = []
    for number in (1, 2):
        settings.set_current(replace(settings.current(), part=Part(number, 2)))
        missing.append(target.missing_paths({}))
    assert missing == [["fast", None], ["rare"]]
