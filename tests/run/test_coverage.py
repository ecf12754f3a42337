"""Coverage of paths and conditions: summed over workers, and judged where it was searched."""

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
SHORT_SEARCH = ("--roseinfer-examples=25", "--roseinfer-seed=4")


def coverage_with(**counts: int) -> TargetCoverage:
    target = TargetCoverage({"fast": "slow", "faster": "slow"}, ["rare"], searched=True)
    target.counts.update(counts)
    target.histories = 10
    target.eligible_examples.update(
        dict.fromkeys((*target.paths, *target.conditions), CONCLUSIVE_EXAMPLES)
    )
    return target


def test_path_share_of_zero_is_refused() -> None:
    with pytest.raises(TypeError, match="share=0: expected a number above 0"):
        FastPath("slow", share=0)


@pytest.fixture
def dev() -> Iterator[None]:
    """Use the settings of a run without options."""
    with fresh_run(settings.Settings()):
        yield


@pytest.mark.usefixtures("dev")
def test_condition_unreached_by_enough_histories_is_a_problem() -> None:
    target = coverage_with(fast=REQUIRED_TIMES, faster=REQUIRED_TIMES - 1)
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
def test_rarely_reached_path_is_a_warning_with_a_remedy() -> None:
    target = coverage_with(fast=REQUIRED_TIMES - 1)
    target.aimed_paths = ["faster"]
    target.eligible_examples.update(faster=-1, rare=-CONCLUSIVE_EXAMPLES + 70)
    target.large_counts["rare"] = 4
    assert TargetVerdict(target).problems(require_paths=True) == []
    assert TargetVerdict(target).warnings() == [
        f"path 'fast' was reached 2 times by {CONCLUSIVE_EXAMPLES} histories that could reach it, "
        "of 3 required: it has no aims, so searches cannot aim at it; make its requirement a "
        "switch of option_choices (such as a smaller minimum batch) and name that in aims, or "
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
    )  # however many small histories did not


@pytest.mark.parametrize(
    ("profile", "remedy"),
    [
        ("dev", "--roseinfer-profile=ci"),
        ("ci", "--roseinfer-profile=nightly"),
        ("nightly", "more --roseinfer-examples"),
    ],
)
def test_warning_suggests_the_next_profile(profile: str, remedy: str) -> None:
    with fresh_run(settings.Settings(profile=profile)):
        (fast, *_) = TargetVerdict(coverage_with(fast=1)).warnings()
    assert fast.endswith(f"or search harder: {remedy}")


def test_unrequired_paths_cause_no_warning() -> None:
    with fresh_run(settings.Settings(require_paths=False)):
        assert TargetVerdict(coverage_with(fast=1)).warnings() == []


@pytest.mark.parametrize(
    ("options", "eligible"),
    [
        ({"fused": True, "wide": False}, {"plain", "wide_off", "rare"}),
        ({"fused": False, "wide": False}, {"plain", "wide_off", "unfused", "rare"}),
        ({"fused": False, "wide": True}, {"plain", "unfused", "rare"}),
    ],
)
def test_example_is_eligible_for_paths_its_options_allow(
    options: dict[str, bool], eligible: set[str]
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
    assert {*target.eligible_examples} - {"on_a_gpu"} == eligible
    on_a_gpu = FastPath("slow", device="cuda").runs_on(settings.current().device)
    assert ("on_a_gpu" in target.eligible_examples) == on_a_gpu


def test_coverage_without_a_search_is_not_judged() -> None:
    target = coverage_with()
    target.searched = False
    assert TargetVerdict(target).problems(require_paths=True) == []
    assert {row.verdict for row in TargetVerdict(target).rows()} == {"not searched"}


def test_coverage_of_a_failed_search_is_not_judged() -> None:
    target = coverage_with()
    target.note_failure()
    assert TargetVerdict(target).problems(require_paths=True) == []
    assert {row.verdict for row in TargetVerdict(target).rows()} == {"see failures"}


def test_search_without_histories_is_always_a_problem() -> None:
    target = coverage_with(fast=5, faster=5, rare=5)
    target.histories = 0
    for required in (True, False):
        (problem,) = TargetVerdict(target).problems(require_paths=required)
        assert "ran no history" in problem


def test_paths_are_counted_with_conditions_of_the_same_step() -> None:
    target = coverage_with()
    target.note({"fast": 2, "rare": 5})
    target.note({"slow": 1})
    target.note({"fast": 1})
    assert target.counts == {"fast": 3, "slow": 1, "rare": 5}
    assert target.conditions_by_path["fast"] == {"rare": 1}
    assert target.conditions_by_path["slow"] == {}


def test_coverage_of_workers_is_summed() -> None:
    whole = Coverage()
    for counts in ({"fast": 2}, {"fast": 1, "rare": 4}):
        part = Coverage()
        part._targets["mine:Cache"] = coverage_with(**counts)
        part._targets["mine:Cache"].invariant_checks.update(read_back=4, attention=0)
        part._targets["mine:Cache"].batches.update(boundary=2, shared=0)
        whole.add(part.to_json())
    target = whole.targets["mine:Cache"]
    assert (target.histories, target.searched, target.failed) == (20, True, False)
    assert target.counts == {"fast": 3, "rare": 4}
    assert pairs(+target.invariant_checks) == "read_back 8"
    assert pairs(target.batches) == "boundary 4, shared 0"
    assert target.eligible_examples["faster"] == 2 * CONCLUSIVE_EXAMPLES


@pytest.mark.slow
def test_verdict_with_workers_equals_that_without(project: Project) -> None:
    project.copy_caches()
    project.write(test_mine=TWO_CACHES)
    project.set_conclusive_examples(40)
    single = project.pytest(*SHORT_SEARCH)
    parallel = project.pytest(*SHORT_SEARCH, "-n", "2")
    assert single.ret == parallel.ret == pytest.ExitCode.TESTS_FAILED
    assert single.parseoutcomes() == parallel.parseoutcomes() == {"passed": 6, "skipped": 4}
    assert summary(single) == summary(parallel)
    (problem,) = [line for line in summary(single) if "FAILED" in line]
    assert problem.startswith("FAILED: path 'all_rows' was never reached")


def summary(result: pytest.RunResult) -> list[str]:
    """Return the lines from the first table to the last line before the count of tests."""
    lines = result.outlines
    first_line = next(at for at, line in enumerate(lines) if "= roseinfer: caches." in line)
    return [re.sub(r" in \d+ s,", ",", line) for line in lines[first_line:-1] if line]


def test_nested_run_does_not_change_the_outer_one(project: Project) -> None:
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


def test_deselected_search_is_not_a_problem(project: Project) -> None:
    project.copy_caches()
    project.write(test_mine=TWO_CACHES)
    result = project.pytest("-v", *SHORT_SEARCH, "-k", "split")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "its histories were not searched in this run, so its paths are not judged",
            "path * all_rows * row_by_row * 0 *not searched",
        ]
    )


def test_requested_target_must_be_tested(project: Project) -> None:
    """The option is easily given without the suite that uses it."""
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
    # A run that failed for another reason may not have come to the target.
    project.write(test_plain="def test_plain(): assert 0")
    assert "no test of this run" not in project.pytest(target, "-x").stdout.str()


SHOW_DEVICES = """
    import os, pathlib, pytest, time

    @pytest.mark.parametrize("at", range(6))
    def test_device(at, roseinfer_device):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        pathlib.Path(f"{worker} {roseinfer_device}").touch()
        time.sleep(0.2)  # so that every worker gets some tests
"""


@pytest.mark.slow
def test_workers_are_spread_over_gpus(project: Project) -> None:
    project.write(test_device=SHOW_DEVICES)
    gpu = project.pretend_gpus(count=2)
    project.pytest(*gpu, "-n", "3").assert_outcomes(passed=6)
    single = project.pytest(*gpu)
    single.assert_outcomes(passed=6)
    single.stdout.fnmatch_lines(["roseinfer: device cuda (2 x Imaginary GPU), *"])
    devices = {file.name for file in project.path.iterdir() if " " in file.name}
    assert devices == {"gw0 cuda:0", "gw1 cuda:1", "gw2 cuda:0", "alone cuda"}


def test_calls_are_counted_without_keeping_the_cache_alive() -> None:
    class Counted(ListCache):
        @staticmethod
        def match_prefix(token_ids: Sequence[int]) -> int:
            return len(token_ids)

    call_coverage = Coverage()
    cache = Counted()
    call_coverage.count_calls(cache)
    cache.make(CacheSpec())
    assert cache.match_prefix((1, 2)) == 2
    assert cache.match_prefix((1,)) == 1
    abilities = call_coverage.of(Counted).abilities
    assert (abilities["make"], abilities["match_prefix"], abilities["append"]) == (1, 2, 0)
    reference = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert reference() is None
    finally:
        gc.enable()
