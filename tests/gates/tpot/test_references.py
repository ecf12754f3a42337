"""References of a comparison: folders, revisions and versions."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import zipfile
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import engine, run_against, speed_test

if TYPE_CHECKING:
    from tests.project import Project


@pytest.mark.slow
def test_reference_may_be_a_sibling_folder(project: Project) -> None:
    """The option's value is a path, so pytest's root without an ini file contains both folders."""
    for name, microseconds in (("mine", 1000), ("other", 800)):
        (project.path / name).mkdir()
        project.write(
            **{f"{name}/engine": engine(microseconds), f"{name}/test_speed": speed_test()}
        )
    arguments = ["-p", "no:cacheprovider", "--roseinfer-against", "../other"]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "test_speed.py"],
        cwd=project.path / "mine",
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == pytest.ExitCode.TESTS_FAILED, process.stdout + process.stderr
    assert re.search(r"test_decode .* 1\.250 .* SLOWER", process.stdout), process.stdout


def git(project: Project, *arguments: str) -> None:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@nowhere.example")
    subprocess.run(
        ["git", *identity, *arguments], cwd=project.path, check=True, capture_output=True
    )


def test_revision_is_built_in_a_worktree_of_its_own(timed_project: Project) -> None:
    """Uncommitted changes are timed here, and are not part of the revision."""
    git(timed_project, "init", "-q")
    git(timed_project, "add", "engine.py", "test_speed.py")
    git(timed_project, "commit", "-qm", "a step")
    timed_project.write(engine=engine(5000))
    git(timed_project, "commit", "-qam", "a slow step")
    timed_project.write(engine=engine(1100))
    result = run_against(timed_project, reference="HEAD~1")
    result.stdout.fnmatch_lines(["*SLOWER than HEAD~1: a step takes 1.100 times*"])
    worktrees = subprocess.run(
        ["git", "worktree", "list"],
        cwd=timed_project.path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(worktrees.stdout.splitlines()) == 1


def test_revision_older_than_the_benchmark_is_timed(timed_project: Project) -> None:
    """The file that makes the step comes from here, and its imports from the revision."""
    (timed_project.path / "tools").mkdir()
    timed_project.write(engine="MICROSECONDS = 500", **{"tools/__init__": ""})
    git(timed_project, "init", "-q")
    git(timed_project, "add", "engine.py", "tools")
    git(timed_project, "commit", "-qm", "an engine")
    speed = engine(0).replace("MICROSECONDS = 0", "from engine import MICROSECONDS")
    timed_project.write(engine="MICROSECONDS = 550")
    for module in ("speed", "tools/speed"):  # the second is in a package that the revision has
        name = module.replace("/", ".")
        timed_project.write(
            **{module: speed, "test_speed": speed_test().replace("engine:", f"{name}:")}
        )
        result = run_against(timed_project, reference="HEAD")
        result.stdout.fnmatch_lines(["*SLOWER than HEAD: a step takes 1.100 times*"])


def test_step_missing_from_the_reference_is_new(
    timed_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference has the module, so the file from here would hide other changes in it."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(timed_project.path / "summary.md"))
    timed_project.write(engine=engine(1000).replace("decode", "zero"))
    timed_project.write(test_speed=speed_test().replace(":decode", ":zero"))
    result = run_against(timed_project, "--roseinfer-timings=kept")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
    message = (
        "test_speed.py::test_decode: new, nothing to compare with: before: engine has no "
        "function 'zero'"
    )
    result.stdout.fnmatch_lines([message])
    summary = (timed_project.path / "summary.md").read_text()
    assert summary == f"### roseinfer: decode steps against before\n\n- {message}\n"


def test_module_with_imports_missing_from_the_reference_is_new(timed_project: Project) -> None:
    for folder in ("tools", "before/tools"):
        (timed_project.path / folder).mkdir()
        timed_project.write(**{f"{folder}/__init__": ""})
    speed = "import engine, tools.fast\ndecode = engine.decode"
    timed_project.write(**{"tools/speed": speed, "tools/fast": ""})
    timed_project.write(test_speed=speed_test().replace("engine:", "tools.speed:"))
    result = run_against(timed_project)
    result.assert_outcomes(passed=1)
    message = "tools.speed of this project needs something that is missing there: No module *"
    result.stdout.fnmatch_lines(
        [f"*::test_decode: new, nothing to compare with: before: {message}"]
    )
    timed_project.write(**{"tools/fast": "import nowhere"})
    result = run_against(timed_project)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["here: Traceback*", "ModuleNotFoundError: *'nowhere'"])


def test_step_missing_on_both_sides_fails(timed_project: Project) -> None:
    timed_project.write(test_speed=speed_test().replace(":decode", ":decodes"))
    for option in ("--roseinfer-against=before", "--roseinfer-noise-floor"):
        result = timed_project.pytest(option)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*here: engine has no function 'decodes'"])


@pytest.mark.slow
def test_version_is_installed_in_a_folder_of_its_own(
    timed_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(timed_project.path / "engine-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("engine.py", dedent(engine(500)))
        metadata = "engine-1.2.dist-info"
        wheel.writestr(
            f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: engine\nVersion: 1.2\n"
        )
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{metadata}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(timed_project.path))
    result = run_against(timed_project, reference="engine==1.2")
    result.stdout.fnmatch_lines(["*SLOWER than engine==1.2: a step takes 2.000 times*"])
    result = run_against(timed_project, reference="engine==1.3")
    result.stdout.fnmatch_lines(["*--roseinfer-against engine==1.3: *"])


def test_reference_without_imported_code_fails(timed_project: Project) -> None:
    (timed_project.path / "empty").mkdir()
    result = run_against(timed_project, reference="empty")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*empty: nothing was imported from */empty, so its code would not be measured*"]
    )


def test_unknown_reference_is_a_usage_error(timed_project: Project) -> None:
    error = "ERROR: --roseinfer-against v99: neither a path nor NAME==VERSION nor a git revision"
    result = run_against(timed_project, reference="v99")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [error]
    git(timed_project, "init", "-q")
    git(timed_project, "commit", "-q", "--allow-empty", "-m", "a release")
    git(timed_project, "tag", "v9.9")
    result = run_against(timed_project, reference="v99")
    assert [line for line in result.errlines if line] == [f"{error}; did you mean v9.9?"]


def test_shallow_clone_names_the_command_to_fetch_a_revision(timed_project: Project) -> None:
    git(timed_project, "init", "-q", "-b", "main", "all")
    timed_project.write(**{"all/engine": engine(800)})
    git(timed_project, "-C", "all", "add", "engine.py")
    git(timed_project, "-C", "all", "commit", "-qm", "a step")
    git(timed_project, "-C", "all", "commit", "-q", "--allow-empty", "-m", "another commit")
    git(timed_project, "-C", "all", "branch", "change")
    git(timed_project, "init", "-q")
    git(timed_project, "remote", "add", "origin", f"file://{timed_project.path / 'all'}")
    git(timed_project, "fetch", "-q", "--depth=1", "origin", "change")
    result = run_against(timed_project, reference="origin/main")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (error,) = filter(None, result.errlines)
    message, _, command = error.partition("fetch-depth: 0, or run git ")
    assert "nor a git revision" in message
    git(timed_project, *shlex.split(command))
    result = run_against(timed_project, reference="origin/main")
    result.stdout.fnmatch_lines(["*SLOWER than origin/main: a step takes 1.250 times*"])
    assert "shallow" not in run_against(timed_project, reference="origin/man").stderr.str()
