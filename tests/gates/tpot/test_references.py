"""A step is compared with a folder, a revision or a version, and with nothing else."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import zipfile
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from tests.gates.tpot.timed_project import against, engine, marked

if TYPE_CHECKING:
    from tests.project import Project


def test_a_folder_beside_the_one_pytest_is_started_in(project: Project) -> None:
    """The option's value looks like a path, so without an ini file pytest's root holds both."""
    for name, microseconds in (("mine", 1000), ("other", 800)):
        (project.path / name).mkdir()
        project.write(**{f"{name}/engine": engine(microseconds), f"{name}/test_speed": marked()})
    arguments = ["-p", "no:cacheprovider", "--roseinfer-against", "../other"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "test_speed.py"],
        cwd=project.path / "mine",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(r"test_decode .* 1\.250 .* SLOWER", done.stdout), done.stdout


def git(project: Project, *arguments: str) -> None:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@nowhere.example")
    subprocess.run(["git", *who, *arguments], cwd=project.path, check=True, capture_output=True)


def test_a_revision_is_built_apart(timed: Project) -> None:
    """What is not committed is measured as it stands here, and does not get there."""
    git(timed, "init", "-q")
    git(timed, "add", "engine.py", "test_speed.py")
    git(timed, "commit", "-qm", "a step")
    timed.write(engine=engine(5000))
    git(timed, "commit", "-qam", "a slow step")
    timed.write(engine=engine(1100))
    result = against(timed, reference="HEAD~1")
    result.stdout.fnmatch_lines(["*SLOWER than HEAD~1: a step takes 1.100 times*"])
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=timed.path, capture_output=True, text=True, check=True
    )
    assert len(listed.stdout.splitlines()) == 1


def test_a_revision_older_than_the_benchmark_is_timed_with_it(timed: Project) -> None:
    """The file that makes the step comes from here, what it imports from there."""
    (timed.path / "tools").mkdir()
    timed.write(engine="MICROSECONDS = 500", **{"tools/__init__": ""})
    git(timed, "init", "-q")
    git(timed, "add", "engine.py", "tools")
    git(timed, "commit", "-qm", "an engine")
    speed = engine(0).replace("MICROSECONDS = 0", "from engine import MICROSECONDS")
    timed.write(engine="MICROSECONDS = 550")
    for module in ("speed", "tools/speed"):  # the second in a package that is older than it
        name = module.replace("/", ".")
        timed.write(**{module: speed, "test_speed": marked().replace("engine:", f"{name}:")})
        result = against(timed, reference="HEAD")
        result.stdout.fnmatch_lines(["*SLOWER than HEAD: a step takes 1.100 times*"])


def test_a_step_that_the_other_side_does_not_have_is_new(
    timed: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module is there, so the file from here would hide what else has changed in it."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(timed.path / "summary.md"))
    timed.write(engine=engine(1000).replace("decode", "zero"))
    timed.write(test_speed=marked().replace(":decode", ":zero"))
    result = against(timed, "--roseinfer-timings=kept")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
    said = (
        "test_speed.py::test_decode: new, nothing to compare with: before: engine has no "
        "function 'zero'"
    )
    result.stdout.fnmatch_lines([said])
    summary = (timed.path / "summary.md").read_text()
    assert summary == f"### roseinfer: decode steps against before\n\n- {said}\n"


def test_a_module_that_needs_what_the_other_side_does_not_have_is_new(timed: Project) -> None:
    for folder in ("tools", "before/tools"):
        (timed.path / folder).mkdir()
        timed.write(**{f"{folder}/__init__": ""})
    speed = "import engine, tools.fast\ndecode = engine.decode"
    timed.write(**{"tools/speed": speed, "tools/fast": ""})
    timed.write(test_speed=marked().replace("engine:", "tools.speed:"))
    result = against(timed)
    result.assert_outcomes(passed=1)
    said = "tools.speed of this project needs something that is missing there: No module *"
    result.stdout.fnmatch_lines([f"*::test_decode: new, nothing to compare with: before: {said}"])
    timed.write(**{"tools/fast": "import nowhere"})
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["here: Traceback*", "ModuleNotFoundError: *'nowhere'"])


def test_a_step_that_neither_side_has_is_misspelt(timed: Project) -> None:
    timed.write(test_speed=marked().replace(":decode", ":decodes"))
    for option in ("--roseinfer-against=before", "--roseinfer-noise-floor"):
        result = timed.pytest(option)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["*here: engine has no function 'decodes'"])


def test_a_version_is_installed_apart(timed: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(timed.path / "engine-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("engine.py", dedent(engine(500)))
        about = "engine-1.2.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: engine\nVersion: 1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(timed.path))
    result = against(timed, reference="engine==1.2")
    result.stdout.fnmatch_lines(["*SLOWER than engine==1.2: a step takes 2.000 times*"])
    result = against(timed, reference="engine==1.3")
    result.stdout.fnmatch_lines(["*--roseinfer-against engine==1.3: *"])


def test_a_side_of_which_nothing_is_imported_is_no_side(timed: Project) -> None:
    (timed.path / "empty").mkdir()
    result = against(timed, reference="empty")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*empty: nothing was imported from */empty, so its code would not be measured*"]
    )


def test_a_reference_that_is_nothing(timed: Project) -> None:
    error = "ERROR: --roseinfer-against v99: neither a path nor NAME==VERSION nor a git revision"
    result = against(timed, reference="v99")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [error]
    git(timed, "init", "-q")
    git(timed, "commit", "-q", "--allow-empty", "-m", "a release")
    git(timed, "tag", "v9.9")
    result = against(timed, reference="v99")
    assert [line for line in result.errlines if line] == [f"{error}; did you mean v9.9?"]


def test_a_shallow_clone_is_told_how_to_get_the_other_revision(timed: Project) -> None:
    git(timed, "init", "-q", "-b", "main", "all")
    timed.write(**{"all/engine": engine(800)})
    git(timed, "-C", "all", "add", "engine.py")
    git(timed, "-C", "all", "commit", "-qm", "a step")
    git(timed, "-C", "all", "commit", "-q", "--allow-empty", "-m", "another commit")
    git(timed, "-C", "all", "branch", "change")
    git(timed, "init", "-q")
    git(timed, "remote", "add", "origin", f"file://{timed.path / 'all'}")
    git(timed, "fetch", "-q", "--depth=1", "origin", "change")
    result = against(timed, reference="origin/main")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (error,) = filter(None, result.errlines)
    said, _, command = error.partition("fetch-depth: 0, or run git ")
    assert "nor a git revision" in said
    git(timed, *shlex.split(command))
    result = against(timed, reference="origin/main")
    result.stdout.fnmatch_lines(["*SLOWER than origin/main: a step takes 1.250 times*"])
    assert "shallow" not in against(timed, reference="origin/man").stderr.str()
