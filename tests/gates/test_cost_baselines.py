"""The file of baselines for the work of steps: what is in it, missing, broken or left behind."""

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
from tests.gates.costs_project import gated as gated

if TYPE_CHECKING:
    from tests.project import Project


def test_a_baseline_that_is_not_there_fails(gated: Project) -> None:
    found, recorded = entry(gated)
    recorded["torch 1.0"] = recorded.pop(TORCH)
    write(gated, found)
    shown = gated.pytest().stdout
    shown.fnmatch_lines(
        [f"*no baseline for 'steady' of * with {TORCH} in *{FILE}, which has torch 1.0: {UPDATE} *"]
    )
    shown.no_fnmatch_line("*another exception occurred*")
    recorded["tokens"] = 3
    recorded[TORCH] = recorded["torch 1.0"]
    write(gated, found)
    gated.pytest().stdout.fnmatch_lines(["*generates 4 tokens, and its baseline 3: *"])
    (gated.path / FILE).unlink()
    result = gated.pytest()
    result.assert_outcomes(failed=1)
    lost = (
        f"*no baseline for 'steady' of * on cpu since *{FILE} does not exist: {UPDATE} records one*"
    )
    result.stdout.fnmatch_lines([lost])
    result = gated.pytest("--roseinfer-costs", "misspelt.json")
    result.stdout.fnmatch_lines(["*no baseline for * since *misspelt.json does not exist: *"])


def test_a_baseline_of_another_device_is_named(gated: Project) -> None:
    found, recorded = entry(gated)
    found["steps"]["test_costs.py::test_decode"]["steady"] = {"cuda": recorded}
    write(gated, found)
    result = gated.pytest()
    result.assert_outcomes(failed=1)
    said = f"*no baseline for 'steady' of * on cpu in *{FILE}, which has one on cuda: {UPDATE} *"
    result.stdout.fnmatch_lines([said])
    found["steps"]["test_costs.py::test_decode"] = {}
    write(gated, found)
    gated.pytest().stdout.fnmatch_lines(
        [f"*no baseline for * on cpu in *{FILE}: {UPDATE} records*"]
    )


BROKEN = {
    "{": " cannot be read: ",
    '{"format": 9}': " is not of format 1. ",
    '{"format": 1, "steps": {"test": 3}}': ": steps.test must be an object. ",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_fails_the_test_and_is_not_written_over(gated: Project, text: str) -> None:
    write(gated, text)
    for options in ((), (UPDATE,)):
        result = gated.pytest(*options)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines([f"*steady: *{FILE}{BROKEN[text]}*Restore it from git, or *"])
    assert (gated.path / FILE).read_text() == text


def test_a_counter_that_must_not_drop_is_one_when_its_baseline_is_written(gated: Project) -> None:
    written = (gated.path / FILE).read_text()
    for counters in ("must_not_drop=['fastpath']", "must_not_drop=['fast_path', 'fastpath']"):
        gated.write(test_costs=TEST.replace('must_not_drop=["fast_path"]', counters))
        for options in ((), (UPDATE,)):
            result = gated.pytest(*options)
            result.assert_outcomes(failed=1)
            result.stdout.fnmatch_lines(
                [
                    "*must_not_drop: not counters of the step: fastpath; counters= returned "
                    "fast_path, rows_uploaded*"
                ]
            )
    assert (gated.path / FILE).read_text() == written


def test_a_step_that_does_nothing_gets_no_baseline(project: Project) -> None:
    test = TEST.replace("engine.step", "lambda: None").replace(
        ", counters=lambda: engine.counts", ""
    )
    test = test.replace('(packages=["my_engine"], must_not_drop=["fast_path"])', "")
    project.write(my_engine=ENGINE, test_costs=test)
    result = project.pytest(UPDATE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*steady: the step did nothing that is counted besides *"])


def test_an_update_leaves_other_versions_tests_and_devices_as_they_are(gated: Project) -> None:
    found, recorded = entry(gated)
    recorded["python 2.7"] = {"python_calls": {"reduce": 1}}
    found["steps"]["test_other.py::test"] = {"steady": {"cuda": {"tokens": 1}}}
    write(gated, found)
    change(gated, "range(4)", "range(2)")
    gated.pytest(UPDATE).assert_outcomes(passed=1)
    recorded[PYTHON]["python_calls"]["my_engine.look_up"] = 2
    assert costs(gated) == found


def said_of_left_behind(result: pytest.RunResult) -> list[str]:
    lines = [line for line in result.outlines if "that nothing checks" in line]
    return [line.partition("that nothing checks: ")[2] for line in lines]


@pytest.mark.parametrize("workers", [(), pytest.param(("-n1",), marks=pytest.mark.takes_long)])
def test_an_update_names_what_was_renamed(gated: Project, workers: tuple[str, ...]) -> None:
    """A test, a file of tests, or a step; what is not in this run is left alone."""
    gated.write(test_gone=TEST, test_costs=TEST + TEST.replace("_decode", "_again"))
    gated.pytest(UPDATE).assert_outcomes(passed=3)
    (gated.path / "test_gone.py").unlink()
    gated.write(test_costs=TEST.replace("_decode", "_decoding"), test_more=TEST)
    old = ("test_costs.py::test_again", "test_costs.py::test_decode")
    gone = "test_gone.py::test_decode"
    some = gated.pytest(UPDATE, *workers, "test_costs.py::test_decoding")
    assert said_of_left_behind(some) == [f"{gone}; delete them there"]
    result = gated.pytest(UPDATE, *workers, "-k", "test_decoding or test_more")
    result.assert_outcomes(passed=2)
    assert said_of_left_behind(result) == [f"{'; '.join([*old, gone])}; delete them there"]
    found = costs(gated)
    for name in (*old, gone):
        del found["steps"][name]
    write(gated, found)
    assert said_of_left_behind(gated.pytest(UPDATE, *workers, "-k", "more")) == []
    gated.write(test_more=TEST.replace("steady", "decode"))
    result = gated.pytest(UPDATE, *workers)
    assert said_of_left_behind(result) == ["test_more.py::test_decode, steady; delete them there"]


def test_what_a_conftest_leaves_out_is_not_renamed(project: Project) -> None:
    project.write(my_engine=ENGINE, test_costs=TEST + TEST.replace("_decode", "_again"))
    project.pytest(UPDATE).assert_outcomes(passed=2)
    project.write(conftest="def pytest_collection_modifyitems(items): del items[-1]")
    result = project.pytest(UPDATE)
    result.assert_outcomes(passed=1)
    assert said_of_left_behind(result) == []


def test_what_only_the_last_failures_leave_out_is_not_renamed(project: Project) -> None:
    project.write(my_engine=ENGINE, test_costs=TEST + TEST.replace("_decode", "_again"))
    project.pytest(UPDATE).assert_outcomes(passed=2)
    failing = TEST.replace("_decode", "_again").replace("tokens=4", "tokens=0")
    project.write(test_costs=TEST + failing)
    project.pytest("-p", "cacheprovider").assert_outcomes(passed=1, failed=1)
    project.write(test_costs=TEST + TEST.replace("_decode", "_again"))
    result = project.pytest(UPDATE, "-p", "cacheprovider", "--lf")
    result.assert_outcomes(passed=1)
    assert said_of_left_behind(result) == []


TWO = """
    import pytest
    from my_engine import Engine

    @pytest.mark.parametrize("name", "abcdef")
    def test_decode(roseinfer_costs, name):
        roseinfer_costs.check(name, Engine().step, tokens=4)
"""


def test_workers_of_xdist_compare_and_lose_no_update(project: Project) -> None:
    project.write(my_engine=ENGINE, test_costs=TWO)
    project.pytest(UPDATE, "-n", "2").assert_outcomes(passed=6)
    assert len(costs(project)["steps"]) == 6
    result = project.pytest("--roseinfer-costs", FILE, "-n", "2")
    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["6 did no more than their baselines"])


def test_a_file_of_another_name_and_place(project: Project) -> None:
    project.ini("roseinfer_costs = kept/by-ini.json")
    project.write(my_engine=ENGINE, test_costs=TEST)
    project.pytest(UPDATE).assert_outcomes(passed=1)
    assert list(costs(project, "kept/by-ini.json")["steps"]) == ["../test_costs.py::test_decode"]
    project.pytest(UPDATE, "--roseinfer-costs", "asked.json").assert_outcomes(passed=1)
    assert list(costs(project, "asked.json")["steps"]) == ["test_costs.py::test_decode"]
    assert not (project.path / FILE).exists()
