"""Options on the command line and in the ini file, and their errors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.project import Project

SHOW = """
    from pytest_roseinfer import settings

    def test_show():
        current = settings.current()
        print("\\nSEEN", current.profile, current.examples, current.steps, current.step_seconds,
              current.search_seconds, current.seed, current.require_paths, current.targets,
              current.reports)
"""
SUITE = ("--pyargs", "pytest_roseinfer.suite")


def settings_in_project(project: Project, *arguments: str) -> str:
    """Return the settings in a test of the project."""
    project.write(test_show=SHOW)
    result = project.pytest("-s", *arguments)
    result.assert_outcomes(passed=1)
    (line,) = [line for line in result.outlines if line.startswith("SEEN ")]
    return line.removeprefix("SEEN ")


def test_every_option_has_an_effect(project: Project) -> None:
    arguments = ["--roseinfer-profile=ci", "--roseinfer-examples=7", "--roseinfer-steps=3"]
    arguments += ["--roseinfer-seed=5", "--roseinfer-required-paths=off"]
    arguments += ["--roseinfer-step-seconds=0.5", "--roseinfer-search-seconds=9"]
    arguments += ["--roseinfer-report=a.json", "--roseinfer-report=b.html"]
    assert settings_in_project(project, *arguments).startswith("ci 7 3 0.5 9.0 5 False ")
    assert {file.name for file in project.path.iterdir()} >= {"a.json", "b.html"}


def test_ini_options_have_the_same_effect(project: Project) -> None:
    project.ini(
        "roseinfer_profile = nightly",
        "roseinfer_examples = 8",
        "roseinfer_steps = 4",
        "roseinfer_step_seconds = 0",
        "roseinfer_search_seconds = 4.5",
        "roseinfer_seed = 6",
        "roseinfer_required_paths = false",
        "roseinfer_targets =",
        "    one:Cache",
        "    two:Cache",
        "roseinfer_report = c.json",
    )
    assert (
        settings_in_project(project)
        == "nightly 8 4 0.0 4.5 6 False ('one:Cache', 'two:Cache') ('c.json',)"
    )
    options = [
        "--roseinfer-step-seconds=2",
        "--roseinfer-search-seconds=3",
        "--roseinfer-profile=dev",
        "--roseinfer-examples=9",
        "--roseinfer-steps=5",
    ]
    options += ["--roseinfer-seed=7", "--roseinfer-required-paths=on", "--roseinfer-report=d.json"]
    assert settings_in_project(project, *options).startswith("dev 9 5 2.0 3.0 7 True ")


def test_profile_sets_examples_steps_and_seconds(project: Project) -> None:
    assert settings_in_project(project, "--roseinfer-profile=ci").startswith("ci 500 20 60.0 0.0 ")


def test_seed_of_hypothesis_is_the_default_seed(project: Project) -> None:
    assert " 12 " in settings_in_project(project, "--hypothesis-seed=12")
    assert " 13 " in settings_in_project(project, "--hypothesis-seed=12", "--roseinfer-seed=13")


MISTAKES = {
    "--roseinfer-examples=0": "--roseinfer-examples 0: must be at least 1",
    "--roseinfer-step-seconds=-1": "roseinfer step-seconds = -1: must be 0 or more",
    "--roseinfer-search-seconds=-1": "roseinfer search-seconds = -1: must be 0 or more",
    "--roseinfer-seed=-1": "--roseinfer-seed -1: must be at least 0",
    "--roseinfer-profile=nigthly": "--roseinfer-profile nigthly: choose one of dev, ci, nightly; "
    "did you mean nightly?",
    "--roseinfer-report=out.txt": "--roseinfer-report out.txt: the name must end in .json or .html",
    "--roseinfer-target=nowhere": "'nowhere' is not a target: expected package.module:Class",
    "--roseinfer-target=no.where:Cache": "no.where:Cache: there is no module no.where",
    "--roseinfer-target=broken:Cache": "broken:Cache: ZeroDivisionError: division by zero",
    "--roseinfer-target=brokem:Cache": "there is no module brokem; did you mean broken?",
    "--roseinfer-target=pytest_roseinfer.targets.roseinfer_kw:Cache": "there is no module "
    "pytest_roseinfer.targets.roseinfer_kw; did you mean pytest_roseinfer.targets.roseinfer_kv?",
    "--roseinfer-target=mine:MyCash": "mine:MyCash: mine has no MyCash; did you mean MyCache?",
    "--roseinfer-target=empty:Cache": "empty:Cache: empty has no Cache",
    "--roseinfer-target=json:JSONDecoder": "JSONDecoder is not a subclass of KVCacheAdapter",
    "--roseinfer-costs=old.json": "old.json is not of format 1",
    "--roseinfer-costs=cut.json": "cut.json cannot be read: Expecting value: line 2 column 11",
    "--roseinfer-costs=odd.json": "odd.json: steps.test_a.decode.cpu.tokens must be a number",
    "--roseinfer-tpot=flat.json": "flat.json: steps.test_a must be an object",
    "--roseinfer-tpot=empty.py": "empty.py cannot be read: Expecting value: line 1 column 1",
    "--roseinfer-replay=gone.json": "--roseinfer-replay gone.json: No such file or directory",
    "--roseinfer-replay=empty.py": "--roseinfer-replay empty.py is not a trace",
}


@pytest.mark.sampled_cases
@pytest.mark.parametrize("argument", MISTAKES)
def test_invalid_option_is_a_usage_error_in_one_line(project: Project, argument: str) -> None:
    mine = "from pytest_roseinfer import KVCacheAdapter\nclass MyCache(KVCacheAdapter): pass"
    project.write(broken="1 / 0\nclass Cache: pass", empty="", mine=mine)
    steps = {"old": '{"format": 0}', "cut": '{"format": 1,\n "steps": '}
    steps["odd"] = '{"format": 1, "steps": {"test_a": {"decode": {"cpu": {"tokens": "three"}}}}}'
    steps["flat"] = '{"format": 1, "steps": {"test_a": 3}}'
    for name, text in steps.items():
        (project.path / f"{name}.json").write_text(text)
    result = project.pytest(argument)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.errlines if line]
    assert len(errors) == 1, errors
    assert errors[0].startswith("ERROR: ")
    assert MISTAKES[argument] in errors[0]


INI_MISTAKES = {
    "roseinfer_profile = fast": "roseinfer_profile = fast: choose one of dev, ci, nightly",
    "roseinfer_profile = night": "roseinfer_profile = night: choose one of dev, ci, nightly; "
    "did you mean nightly[?]",
    "roseinfer_report = a.txt": "roseinfer_report = a.txt: the name must end in .json or .html",
    "roseinfer_steps = few": "roseinfer_steps = few: not a whole number",
    "roseinfer_step_seconds = few": "roseinfer_step_seconds = few: not a number",
    "roseinfer_required_paths = perhaps": "roseinfer_required_paths: invalid truth value",
}


@pytest.mark.parametrize("line", INI_MISTAKES)
def test_invalid_ini_option_is_a_usage_error(project: Project, line: str) -> None:
    project.ini(line)
    result = project.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {INI_MISTAKES[line]}*"])


def test_missing_target_of_the_ini_file_is_a_usage_error(project: Project) -> None:
    project.ini("roseinfer_targets = no.where:Cache")
    result = project.pytest(*SUITE)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: roseinfer_targets: no.where:Cache: there is no module no.where"]
    )
    # Other tests of the project do not need the target.
    project.write(test_plain="def test_plain(): pass")
    project.pytest().assert_outcomes(passed=1)


def test_unknown_ini_option_is_warned_about(project: Project) -> None:
    project.ini("roseinfer_target = one:Cache")
    result = project.pytest()
    result.stdout.fnmatch_lines(["*PytestConfigWarning: Unknown config option: roseinfer_target*"])
    assert project.pytest("--strict-config").ret == pytest.ExitCode.USAGE_ERROR


def test_missing_gpu_is_a_usage_error(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test is not skipped, as the option asks for a test on a GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for workers in ([], ["-n", "2"]):
        result = project.pytest("--roseinfer-gpu", *workers)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert [line for line in result.errlines if line] == [
            "ERROR: --roseinfer-gpu: torch finds no CUDA device on this machine"
        ]


def test_interpreter_with_a_gpu_is_a_usage_error(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = project.pretend_gpus(count=1)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = project.pytest(*gpus)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --roseinfer-gpu: TRITON_INTERPRET is set*unset it"])
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert project.pytest(*gpus).ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_header_lists_targets_and_settings(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.copy_caches()
    monkeypatch.setenv("ROSELLM_TRITON_KV_APPEND", "off")
    monkeypatch.setenv("HYPOTHESIS_EXPERIMENTAL_OBSERVABILITY", "")
    result = project.pytest(
        "--collect-only",
        *SUITE,
        "--roseinfer-target=caches.list_cache:ListCache",
        "--roseinfer-target=pytest_roseinfer.targets.roseinfer_kv:PerLayerManager",
        "--roseinfer-seed=3",
    )
    result.stdout.fnmatch_lines(
        [
            "roseinfer: target caches.list_cache:ListCache",
            "roseinfer: target pytest_roseinfer.*:PerLayerManager (roseinfer *)",
            "roseinfer: device cpu (Triton interpreted), profile dev (100 examples of up to 12 "
            "steps), seed 3, required paths on",
            "roseinfer: environment *HYPOTHESIS_EXPERIMENTAL_OBSERVABILITY= "
            "ROSELLM_TRITON_KV_APPEND=off*",
        ]
    )
    assert len([line for line in result.outlines if line.startswith("roseinfer: ")]) == 4


def test_runs_without_the_suite_have_no_header(project: Project) -> None:
    project.write(test_plain="def test_plain(): pass")
    assert "roseinfer: " not in project.pytest().stdout.str()


def test_drawn_seed_is_shown_and_equal_in_every_worker(project: Project) -> None:
    project.write(
        test_seed="""
            import pathlib, pytest
            from pytest_roseinfer import settings

            @pytest.mark.parametrize("at", range(4))
            def test_seed(at):
                pathlib.Path(f"seed {settings.current().seed}").touch()
        """
    )
    for workers in ([], ["-n", "2"]):
        result = project.pytest("--roseinfer-profile=ci", *workers)
        (seed_shown,) = re.findall(r"seed (\d+), required", result.stdout.str())
        (file,) = project.path.glob("seed *")
        assert file.name == f"seed {seed_shown}"
        file.unlink()
