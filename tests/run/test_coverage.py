"""What was reached decides the run: added up, judged where it was searched, and only there."""

from __future__ import annotations

import gc
import re
import weakref
from typing import TYPE_CHECKING, ClassVar

import pytest

from pytest_roseinfer import CacheSpec, FastPath, settings
from pytest_roseinfer.report.verdict import TargetVerdict, pairs
from pytest_roseinfer.run import coverage
from pytest_roseinfer.run.coverage import (
    CONCLUSIVE_EXAMPLES,
    REQUIRED_TIMES,
    Coverage,
    TargetCoverage,
)
from tests.capabilities.caches.list_cache import ListCache
from tests.fresh_run import fresh_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.project import Project

TWO_CACHES = """
    from caches.adversaries import NeverTakesItsFastPath
    from caches.paged_cache import PagedCache
    from pytest_roseinfer import conformance

    TestPaged = conformance(PagedCache)
    TestNeverFast = conformance(NeverTakesItsFastPath)
"""
FEW = ("--roseinfer-examples=25", "--roseinfer-seed=4")


def reached(**counts: int) -> TargetCoverage:
    target = TargetCoverage({"fast": "slow", "faster": "slow"}, ["rare"], searched=True)
    target.counts.update(counts)
    target.histories = 10
    target.eligible_examples.update(
        dict.fromkeys((*target.paths, *target.conditions), CONCLUSIVE_EXAMPLES)
    )
    return target


def test_a_path_without_a_share_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="share=0: expected a number above 0"):
        FastPath("slow", share=0)


@pytest.fixture
def dev() -> Iterator[None]:
    """Have the settings of a run without options."""
    with fresh_run(settings.Settings()):
        yield


@pytest.mark.usefixtures("dev")
def test_what_enough_histories_never_reached_is_a_problem_by_name() -> None:
    target = reached(fast=REQUIRED_TIMES, faster=REQUIRED_TIMES - 1)
    assert TargetVerdict(target).problems(require_paths=True) == [
        f"condition 'rare' was never reached, by none of {CONCLUSIVE_EXAMPLES} histories that "
        "could reach "
        "it: a check that did not run is not a pass"
    ]
    assert [row.verdict for row in TargetVerdict(target).rows()] == [
        "equal",
        "too rarely",
        "NOT REACHED",
    ]
    assert TargetVerdict(target).problems(require_paths=False) == []


@pytest.mark.usefixtures("dev")
def test_what_was_reached_too_rarely_is_a_warning_with_its_remedy() -> None:
    target = reached(fast=REQUIRED_TIMES - 1)
    target.aimed_paths = ["faster"]
    target.eligible_examples.update(faster=-1, rare=-CONCLUSIVE_EXAMPLES + 70)
    target.large_counts["rare"] = 4
    assert TargetVerdict(target).problems(require_paths=True) == []
    assert TargetVerdict(target).warnings() == [
        f"path 'fast' was reached 2 times by {CONCLUSIVE_EXAMPLES} histories that could reach it, "
        "of 3 required: its runs_with is empty, so searches cannot aim at it; make its "
        "requirement a switch of option_choices (such as a smaller minimum batch) and name that "
        "in runs_with, or "
        "search harder: --roseinfer-profile=ci",
        f"path 'faster' was not reached by {CONCLUSIVE_EXAMPLES - 1} histories that could reach "
        "it, too "
        f"few for a verdict ({CONCLUSIVE_EXAMPLES}): search harder: --roseinfer-profile=ci",
        "condition 'rare' was reached by large histories alone, 4 times: search harder: "
        "--roseinfer-profile=ci",
    ]
    target.large_counts["faster"], target.eligible_examples["faster"] = 1, 10 * CONCLUSIVE_EXAMPLES
    assert (
        TargetVerdict(target).problems(require_paths=True) == []
    )  # however many small ones did not


@pytest.mark.parametrize(
    ("profile", "harder"),
    [
        ("dev", "--roseinfer-profile=ci"),
        ("ci", "--roseinfer-profile=nightly"),
        ("nightly", "more --roseinfer-examples"),
    ],
)
def test_each_profile_names_what_searches_harder(profile: str, harder: str) -> None:
    with fresh_run(settings.Settings(profile=profile)):
        (fast, *_) = TargetVerdict(reached(fast=1)).warnings()
    assert fast.endswith(f"or search harder: {harder}")


def test_nothing_is_warned_of_where_nothing_is_required() -> None:
    with fresh_run(settings.Settings(require_paths=False)):
        assert TargetVerdict(reached(fast=1)).warnings() == []


@pytest.mark.parametrize(
    ("options", "tried"),
    [
        ({"fused": True, "wide": False}, {"plain", "wide_off", "rare"}),
        ({"fused": False, "wide": False}, {"plain", "wide_off", "unfused", "rare"}),
        ({"fused": False, "wide": True}, {"plain", "unfused", "rare"}),
    ],
)
def test_an_example_counts_for_what_its_switches_allow(
    options: dict[str, bool], tried: set[str]
) -> None:
    class Switched(ListCache):
        paths: ClassVar[Mapping[str, FastPath]] = {
            "plain": FastPath("slow"),
            "wide_off": FastPath("slow", never_with=[{"wide": True}]),
            "unfused": FastPath("slow", runs_with=[{"fused": False}]),
            "on_a_gpu": FastPath("slow", device="cuda"),
        }

    target = TargetCoverage(dict.fromkeys(Switched.paths, "slow"), ["rare"])
    target.note_tried(Switched, options)
    assert {*target.eligible_examples} == tried


def test_what_was_not_searched_is_not_judged() -> None:
    target = reached()
    target.searched = False
    assert TargetVerdict(target).problems(require_paths=True) == []
    assert {row.verdict for row in TargetVerdict(target).rows()} == {"not searched"}


def test_a_search_that_ended_in_a_failure_is_not_judged_by_what_it_reached() -> None:
    target = reached()
    target.failed = True
    assert TargetVerdict(target).problems(require_paths=True) == []
    assert {row.verdict for row in TargetVerdict(target).rows()} == {"see failures"}


def test_a_search_without_histories_is_a_problem_whatever_is_required() -> None:
    target = reached(fast=5, faster=5, rare=5)
    target.histories = 0
    for required in (True, False):
        (problem,) = TargetVerdict(target).problems(require_paths=required)
        assert "ran no history" in problem


def test_paths_are_counted_with_the_conditions_met_in_the_same_step() -> None:
    target = reached()
    target.note({"fast": 2, "rare": 5})
    target.note({"slow": 1})
    target.note({"fast": 1})
    assert target.counts == {"fast": 3, "slow": 1, "rare": 5}
    assert target.conditions_by_path["fast"] == {"rare": 1}
    assert target.conditions_by_path["slow"] == {}


def test_workers_add_up() -> None:
    whole = Coverage()
    for counts in ({"fast": 2}, {"fast": 1, "rare": 4}):
        part = Coverage()
        part._targets["mine:Cache"] = reached(**counts)
        part._targets["mine:Cache"].invariant_checks.update(read_back=4, attention=0)
        part._targets["mine:Cache"].batches.update(boundary=2, shared=0)
        whole.add(part.to_json())
    target = whole.targets["mine:Cache"]
    assert (target.histories, target.searched, target.failed) == (20, True, False)
    assert target.counts == {"fast": 3, "rare": 4}
    assert pairs(+target.invariant_checks) == "read_back 8"
    assert pairs(target.batches) == "boundary 4, shared 0"
    assert target.eligible_examples["faster"] == 2 * CONCLUSIVE_EXAMPLES


@pytest.mark.takes_long
def test_the_same_verdict_with_workers_as_without(project: Project) -> None:
    project.copy_caches()
    project.write(test_mine=TWO_CACHES)
    project.judge_after(40)
    alone = project.pytest(*FEW)
    together = project.pytest(*FEW, "-n", "2")
    assert alone.ret == together.ret == pytest.ExitCode.TESTS_FAILED
    assert alone.parseoutcomes() == together.parseoutcomes() == {"passed": 6, "skipped": 4}
    assert summary(alone) == summary(together)
    (problem,) = [line for line in summary(alone) if "FAILED" in line]
    assert problem.startswith("FAILED: path 'all_rows' was never reached")


def summary(result: pytest.RunResult) -> list[str]:
    """Return the lines from the first table to the last one before the count of tests."""
    lines = result.outlines
    first = next(at for at, line in enumerate(lines) if "= roseinfer: caches." in line)
    return [re.sub(r" in \d+ s,", ",", line) for line in lines[first:-1] if line]


def test_a_run_inside_of_another_leaves_that_one_alone(project: Project) -> None:
    outer = (settings.current(), coverage.current())
    project.write(
        test_inner="""
            from pytest_roseinfer import FastPath, settings
            from pytest_roseinfer.run import coverage
            from pytest_roseinfer.run.coverage import TargetCoverage

            def test_inner():
                assert settings.current().examples == 77
                assert coverage.current().targets == {}
                coverage.current()._targets["inner"] = TargetCoverage({}, [], searched=True)
        """
    )
    inner = project.pytester.runpytest_inprocess("--roseinfer-examples=77")
    inner.stdout.fnmatch_lines(["FAILED: its search ran no history: *"])
    assert (settings.current(), coverage.current()) == outer


def test_a_deselected_search_is_not_missed(project: Project) -> None:
    project.copy_caches()
    project.write(test_mine=TWO_CACHES)
    result = project.pytest(*FEW, "-k", "split")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "its histories were not searched in this run, so its paths are not judged",
            "path * all_rows * row_by_row * 0 *not searched",
        ]
    )


def test_a_target_that_was_asked_for_must_be_tested(project: Project) -> None:
    """It is easy to give the option without the suite that it is for."""
    project.write(
        mine="""
            from pytest_roseinfer import KVCacheAdapter

            class Cache(KVCacheAdapter):
                pass
        """,
        test_plain="def test_plain(): pass",
    )
    target = "--roseinfer-target=mine:Cache"
    result = project.pytest(target)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "FAILED: --roseinfer-target mine:Cache: no test of this run checked it; its tests "
            "run with pytest --pyargs pytest_roseinfer.suite"
        ]
    )
    assert project.pytest(target, "--collect-only").ret == pytest.ExitCode.OK
    # A run that failed for another reason may have been on the way there.
    project.write(test_plain="def test_plain(): assert 0")
    assert "no test of this run" not in project.pytest(target, "-x").stdout.str()


SHOW_DEVICES = """
    import os, pathlib, pytest, time

    @pytest.mark.parametrize("at", range(6))
    def test_device(at, roseinfer_device):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        pathlib.Path(f"{worker} {roseinfer_device}").touch()
        time.sleep(0.2)  # so that every worker gets some
"""


def test_workers_spread_over_the_gpus(project: Project) -> None:
    project.write(test_device=SHOW_DEVICES)
    gpu = project.pretend_gpus(count=2)
    project.pytest(*gpu, "-n", "3").assert_outcomes(passed=6)
    alone = project.pytest(*gpu)
    alone.assert_outcomes(passed=6)
    alone.stdout.fnmatch_lines(["roseinfer: device cuda (2 x Imaginary GPU), *"])
    seen = {file.name for file in project.path.iterdir() if " " in file.name}
    assert seen == {"gw0 cuda:0", "gw1 cuda:1", "gw2 cuda:0", "alone cuda"}


def test_calls_are_counted_and_a_cache_is_gone_with_its_last_user() -> None:
    class Counted(ListCache):
        @staticmethod
        def match_prefix(said: Sequence[int]) -> int:
            return len(said)

    seen = Coverage()
    cache = Counted()
    seen.count_calls(cache)
    cache.make(CacheSpec())
    assert cache.match_prefix((1, 2)) == 2
    assert cache.match_prefix((1,)) == 1
    abilities = seen.of(Counted).abilities
    assert (abilities["make"], abilities["match_prefix"], abilities["append"]) == (1, 2, 0)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()
