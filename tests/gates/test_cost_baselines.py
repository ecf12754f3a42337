"""Baselines for the work of steps: missing, broken, stale and updated ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.gates.costs_project import (
    ENGINE,
    FILE,
    PYTHON,
    TEST,
    TORCH,
    UPDATE,
    change,
    costs,
    entry,
    write,
)
from tests.gates.costs_project import gated_project as gated_project

if TYPE_CHECKING:
    from tests.project import Project


def test_missing_baseline_fails(gated_project: Project) -> None:
    baselines, step_baseline = entry(gated_project)
    step_baseline["torch 1.0"] = step_baseline.pop(TORCH)
    write(gated_project, baselines)
    stdout = gated_project.pytest().stdout
    stdout.fnmatch_lines(
        [f"*no baseline for 'steady' of * with {TORCH} in *{FILE}, which has torch 1.0: {UPDATE} *"]
    )
    stdout.no_fnmatch_line("*another exception occurred*")
    step_baseline["tokens"] = 3
    step_baseline[TORCH] = step_baseline["torch 1.0"]
    write(gated_project, baselines)
    gated_project.pytest().stdout.fnmatch_lines(["*generates 4 tokens, and its baseline 3: *"])
    (gated_project.path / FILE).unlink()
    result = gated_project.pytest()
    result.assert_outcomes(failed=1)
    message = (
        f"*no baseline for 'steady' of * on cpu since *{FILE} does not exist: {UPDATE} records one*"
    )
    result.stdout.fnmatch_lines([message])
    result = gated_project.pytest("--roseinfer-costs", "misspelt.json")
    result.stdout.fnmatch_lines(["*no baseline for * since *misspelt.json does not exist: *"])


def test_baseline_of_another_device_is_named(gated_project: Project) -> None:
    baselines, step_baseline = entry(gated_project)
    baselines["steps"]["test_costs.py::test_decode"]["steady"] = {"cuda": step_baseline}
    write(gated_project, baselines)
    result = gated_project.pytest()
    result.assert_outcomes(failed=1)
    message = f"*no baseline for 'steady' of * on cpu in *{FILE}, which has one on cuda: {UPDATE} *"
    result.stdout.fnmatch_lines([message])
    baselines["steps"]["test_costs.py::test_decode"] = {}
    write(gated_project, baselines)
    gated_project.pytest().stdout.fnmatch_lines(
        [f"*no baseline for * on cpu in *{FILE}: {UPDATE} records*"]
    )


BROKEN = {
    "{": " cannot be read: ",
    '{"format": 9}': " is not of format 1. ",
    '{"format": 1, "steps": {"test": 3}}': ": steps.test must be an object. ",
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("text", BROKEN)
def test_broken_file_fails_the_test_and_is_not_overwritten(
    gated_project: Project, text: str
) -> None:
    write(gated_project, text)
    for options in ((), (UPDATE,)):
        result = gated_project.pytest(*options)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"*steady: *{FILE}{BROKEN[text]}*Restore it from git, or *"])
    assert (gated_project.path / FILE).read_text() == text


def test_unknown_counter_that_must_not_drop_fails(gated_project: Project) -> None:
    written = (gated_project.path / FILE).read_text()
    for counters in ("must_not_drop=['fastpath']", "must_not_drop=['fast_path', 'fastpath']"):
        gated_project.write(test_costs=TEST.replace('must_not_drop=["fast_path"]', counters))
        for options in ((), (UPDATE,)):
            result = gated_project.pytest(*options)
            result.assert_outcomes(failed=1)
            result.stdout.fnmatch_lines(
                [
                    "*must_not_drop: not counters of the step: fastpath; counters= returned "
                    "fast_path, rows_uploaded*"
                ]
            )
    assert (gated_project.path / FILE).read_text() == written


def test_step_without_work_gets_no_baseline(project: Project) -> None:
    test = TEST.replace("engine.step", "lambda: None").replace(
        ", counters=lambda: engine.counts", ""
    )
    test = test.replace('(packages=["my_engine"], must_not_drop=["fast_path"])', "")
    project.write(my_engine=ENGINE, test_costs=test)
    result = project.pytest(UPDATE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*steady: the step did nothing that is counted besides *"])


def test_update_keeps_other_versions_tests_and_devices(gated_project: Project) -> None:
    baselines, step_baseline = entry(gated_project)
    step_baseline["python 2.7"] = {"python_calls": {"reduce": 1}}
    baselines["steps"]["test_other.py::test"] = {"steady": {"cuda": {"tokens": 1}}}
    write(gated_project, baselines)
    change(gated_project, "range(4)", "range(2)")
    gated_project.pytest(UPDATE).assert_outcomes(passed=1)
    step_baseline[PYTHON]["python_calls"]["my_engine.look_up"] = 2
    assert costs(gated_project) == baselines


def stale_baselines_named(result: pytest.RunResult) -> list[str]:
    lines = [line for line in result.outlines if "that nothing checks" in line]
    return [line.partition("that nothing checks: ")[2] for line in lines]


@pytest.mark.parametrize("workers", [(), pytest.param(("-n1",), marks=pytest.mark.slow)])
def test_update_names_stale_baselines(gated_project: Project, workers: tuple[str, ...]) -> None:
    """A stale baseline may name a test, a file or a step; tests not selected are left alone."""
    gated_project.write(test_gone=TEST, test_costs=TEST + TEST.replace("_decode", "_again"))
    gated_project.pytest(UPDATE).assert_outcomes(passed=3)
    (gated_project.path / "test_gone.py").unlink()
    gated_project.write(test_costs=TEST.replace("_decode", "_decoding"), test_more=TEST)
    old = ("test_costs.py::test_again", "test_costs.py::test_decode")
    deleted = "test_gone.py::test_decode"
    partial_result = gated_project.pytest(UPDATE, *workers, "test_costs.py::test_decoding")
    assert stale_baselines_named(partial_result) == [f"{deleted}; delete them there"]
    result = gated_project.pytest(UPDATE, *workers, "-k", "test_decoding or test_more")
    result.assert_outcomes(passed=2)
    assert stale_baselines_named(result) == [f"{'; '.join([*old, deleted])}; delete them there"]
    baselines = costs(gated_project)
    for name in (*old, deleted):
        del baselines["steps"][name]
    write(gated_project, baselines)
    assert stale_baselines_named(gated_project.pytest(UPDATE, *workers, "-k", "more")) == []
    gated_project.write(test_more=TEST.replace("steady", "decode"))
    result = gated_project.pytest(UPDATE, *workers)
    assert stale_baselines_named(result) == ["test_more.py::test_decode, steady; delete them there"]


def test_tests_that_a_conftest_deselects_are_not_stale(project: Project) -> None:
    project.write(my_engine=ENGINE, test_costs=TEST + TEST.replace("_decode", "_again"))
    project.pytest(UPDATE).assert_outcomes(passed=2)
    project.write(conftest="def pytest_collection_modifyitems(items): del items[-1]")
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    assert stale_baselines_named(result) == []


def test_tests_that_last_failed_deselects_are_not_stale(project: Project) -> None:
    project.write(my_engine=ENGINE, test_costs=TEST + TEST.replace("_decode", "_again"))
    project.pytest(UPDATE).assert_outcomes(passed=2)
    failing = TEST.replace("_decode", "_again").replace("tokens=4", "tokens=0")
    project.write(test_costs=TEST + failing)
    project.pytest("-p", "cacheprovider").assert_outcomes(passed=1, failed=1)
    project.write(test_costs=TEST + TEST.replace("_decode", "_again"))
    result = project.pytest(UPDATE, "-p", "cacheprovider", "--lf")
    result.assert_outcomes(passed=1)
    assert stale_baselines_named(result) == []


TEST_OF_SIX_STEPS = """
    import pytest
    from my_engine import Engine

    @pytest.mark.parametrize("name", "abcdef")
    def test_decode(roseinfer_costs, name):
        roseinfer_costs.check(name, Engine().step, tokens=4)
"""


@pytest.mark.slow
def test_xdist_workers_compare_and_update_every_baseline(project: Project) -> None:
    project.write(my_engine=ENGINE, test_costs=TEST_OF_SIX_STEPS)
    project.pytest(UPDATE, "-n", "2").assert_outcomes(passed=6)
    assert len(costs(project)["steps"]) == 6
    result = project.pytest("--roseinfer-costs", FILE, "-n", "2")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["6 did no more than their baselines"])


def test_baseline_file_is_set_by_ini_or_option(project: Project) -> None:
    project.ini("roseinfer_costs = kept/by-ini.json")
    project.write(my_engine=ENGINE, test_costs=TEST)
    project.pytest(UPDATE).assert_outcomes(passed=1)
    assert list(costs(project, "kept/by-ini.json")["steps"]) == ["../test_costs.py::test_decode"]
    project.pytest(UPDATE, "--roseinfer-costs", "by-option.json").assert_outcomes(passed=1)
    assert list(costs(project, "by-option.json")["steps"]) == ["test_costs.py::test_decode"]
    assert not (project.path / FILE).exists()
