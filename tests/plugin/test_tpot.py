"""The fixture ``roseinfer_tpot`` as another project meets it, on steps that move a clock."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer.gates.history.kept_runs import read_runs
from tests.plugin.timed_project import FEW_PROCESSES, against, benchmarks, engine, marked, there
from tests.python_process import ROOT

if TYPE_CHECKING:
    from tests.plugin.conftest import Project


@pytest.fixture
def timed(project: Project) -> Project:
    """A project whose step takes 1000 us, and the same in a folder beside it."""
    project.write(engine=engine(1000), test_speed=marked())
    there(project, 1000)
    return project


def git(project: Project, *arguments: str) -> None:
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@nowhere.example")
    subprocess.run(["git", *who, *arguments], cwd=project.path, check=True, capture_output=True)


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


def test_nobody_asked_so_nothing_is_timed(timed: Project) -> None:
    result = timed.pytest("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * nothing to compare with: --roseinfer-against REF, *"])


def test_the_same_step_is_the_same(timed: Project) -> None:
    result = against(timed)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*times of decode steps*", "there: before", "*test_decode* 1.000 *to* 20 * SAME"]
    )


def test_a_slower_step_fails_and_says_by_how_much(timed: Project) -> None:
    there(timed, 950)
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*SLOWER than before: 1.053 times its TPOT (1.05*"])


def test_a_slower_step_can_be_reported_only(timed: Project) -> None:
    there(timed, 950)
    result = against(timed, "--roseinfer-report-slower")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_decode* 1.053 * SLOWER"])


def test_a_faster_step_passes(timed: Project) -> None:
    there(timed, 1100)
    result = against(timed)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_decode* 0.909 * FASTER"])


def test_the_margin_is_that_of_the_marker(timed: Project) -> None:
    there(timed, 950)
    timed.write(test_speed=marked("margin=0.06"))
    against(timed).assert_outcomes(passed=1)


def test_a_step_between_the_verdicts_is_undecided_and_passes(timed: Project) -> None:
    """Every other process finds 4% more, the others nothing: the margin lies in between."""
    count = """
    import itertools

    for number in itertools.count():
        try:
            open(f"{__file__}.{number}", "x").close()
            break
        except FileExistsError:  # another process has that number
            pass
    MICROSECONDS = 1000 + 40 * (number % 2)
    """
    text = dedent(count) + dedent(engine(0)).replace("MICROSECONDS = 0\n", "")
    timed.write(engine=text, test_speed=marked("series_per_process=1"))
    result = against(timed)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*: UNDECIDED after 60 series and * s; its margin is 2.0%"])


def test_a_comparison_says_how_far_it_is_to_a_pipe_too(timed: Project) -> None:
    """Without -s, and while it measures: the line comes before the test's own result."""
    hasty = "from pytest_roseinfer.gates.time import progress\nprogress._FIRST = 0"
    timed.write(conftest=hasty, test_speed=marked("series_per_process=5"))
    there(timed, 500)
    result = against(timed, "-v")
    result.stdout.fnmatch_lines(
        [
            "test_speed.py::test_decode: 5 series, a look after 13: here / there 2.000 *",
            "*test_decode FAILED *",
        ]
    )
    assert result.stdout.str().count("a look after") == 1


def test_time_that_is_up_decides_nothing(timed: Project) -> None:
    """A step twice as slow passes where there was no time to see it, and the run says so."""
    there(timed, 500)
    timed.write(test_speed=marked("series_per_process=3, seconds=1000"))
    result = against(timed, "--roseinfer-tpot-seconds=0.001")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*test_decode* 2.000 *none* 3 * UNDECIDED",
            "*: UNDECIDED after 3 series and * s: that is too short for an interval, which takes "
            "13 series, about * s here",
        ]
    )


def test_another_number_of_tokens_is_another_step(timed: Project) -> None:
    there(timed, 1000, tokens=8)
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a step brings 4 tokens here and 8 there*"])


def test_a_revision_is_built_apart(timed: Project) -> None:
    """What is not committed is measured as it stands here, and does not get there."""
    git(timed, "init", "-q")
    git(timed, "add", "engine.py", "test_speed.py")
    git(timed, "commit", "-qm", "a step")
    timed.write(engine=engine(5000))
    git(timed, "commit", "-qam", "a slow step")
    timed.write(engine=engine(1100))
    result = against(timed, reference="HEAD~1")
    result.stdout.fnmatch_lines(["*SLOWER than HEAD~1: 1.100 times*"])
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
        result.stdout.fnmatch_lines(["*SLOWER than HEAD: 1.100 times*"])


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
    result.stdout.fnmatch_lines(["*SLOWER than engine==1.2: 2.000 times*"])
    result = against(timed, reference="engine==1.3")
    result.stdout.fnmatch_lines(["*--roseinfer-against engine==1.3: *"])


def test_the_ten_lines_of_the_how_to(timed: Project) -> None:
    page = (ROOT / "docs" / "how-to.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# my_engine/speed.py.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line and line[0] != "#"]) <= 10
    speed, test = code.split("# test_speed.py\n")
    for folder in ("my_engine", "before/my_engine"):
        (timed.path / folder).mkdir()
        package = f"{folder}/__init__"
        timed.write(
            **{
                f"{folder}/speed": speed,
                package: """
            class Engine:
                def __init__(self, batch_size):
                    self.batch_size = batch_size

                def step(self):
                    return sum(range(100 * self.batch_size))
        """,
            }
        )
    timed.write(
        test_speed="import pytest\npytestmark = pytest.mark.roseinfer_tpot(margin=0.9, "
        f"{FEW_PROCESSES})\n" + test
    )
    result = against(timed)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_speed.py::test_decode * SAME"])


def test_a_side_of_which_nothing_is_imported_is_no_side(timed: Project) -> None:
    (timed.path / "empty").mkdir()
    result = against(timed, reference="empty")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*empty: nothing was imported from */empty, so this *"])


def test_a_reference_that_is_nothing(timed: Project) -> None:
    error = "ERROR: --roseinfer-against v99: no path, no NAME==VERSION, and no revision of git"
    result = against(timed, reference="v99")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [error]
    git(timed, "init", "-q")
    git(timed, "commit", "-q", "--allow-empty", "-m", "a release")
    git(timed, "tag", "v9.9")
    result = against(timed, reference="v99")
    assert [line for line in result.errlines if line] == [f"{error}; did you mean v9.9?"]


def test_what_a_factory_raises_is_shown(timed: Project) -> None:
    timed.write(**{"before/engine": "def decode():\n    raise OSError('no weights')"})
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*before: Traceback*", "*OSError: no weights"])


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        ("(print, 4)", "*expected 'step' and 'tokens'*"),
        ("{'step': print, 'tokens': 0}", "*brings 0 tokens*"),
        ("{'step': print, 'tokens': 1, 'colour': 2}", "*'colour'*mean nothing*"),
    ],
)
def test_what_a_factory_must_return(timed: Project, offered: str, said: str) -> None:
    timed.write(engine=f"def decode(): return {offered}")
    result = against(timed)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([said])


def test_what_a_step_prints_is_no_answer(timed: Project) -> None:
    noisy = engine(1000).replace("taken.append", "print('{}'); taken.append")
    timed.write(engine=noisy)
    against(timed).assert_outcomes(passed=1)


def test_a_run_that_compared_nothing_fails(timed: Project) -> None:
    timed.write(test_speed="def test_other(): pass")
    for option in ("--roseinfer-against=before", "--roseinfer-noise-floor"):
        result = timed.pytest(option)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(
            [f"FAILED: {option.partition('=')[0]}: no test of this run compared a step"]
        )


def test_a_test_that_takes_the_fixture_and_times_nothing_fails(timed: Project) -> None:
    timed.write(test_speed="def test_decode(roseinfer_tpot): pass")
    result = timed.pytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*took roseinfer_tpot and timed no step with it*"])


def test_workers_of_xdist_do_not_time_and_say_why(timed: Project) -> None:
    result = against(timed, "-n2", "-rs")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["FAILED: --roseinfer-against: no test *; decode steps are not timed by workers of *"]
    )


def test_the_noise_floor_is_said_in_percent(timed: Project) -> None:
    result = timed.pytest("--roseinfer-noise-floor")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*against itself +0.00%, give or take 0.00% after 60 series*a slowdown of 2.0% is found*"]
    )


def test_results_are_kept_with_a_plot_and_a_summary(
    timed: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(timed.path / "summary.md"))
    for microseconds in (1000, 1100):
        there(timed, microseconds)
        against(timed, "--roseinfer-timings=kept").assert_outcomes(passed=1)
    runs = read_runs(timed.path / "kept")
    assert [run.times[0]["verdict"] for run in runs] == ["SAME", "FASTER"]
    assert [run.work for run in runs] == [[], []]
    assert {"python", "numpy", "cpu"} <= runs[0].environment.keys()
    side = runs[0].times[0]["here"]
    assert side["tokens_per_second"] == pytest.approx(4 / 1001e-6)
    assert side["share_of_memory_floor"] == pytest.approx(250 / 1001)
    assert side["path_counts"]["fast"] > 0
    assert (timed.path / "kept" / "timings.png").read_bytes().startswith(b"\x89PNG")
    summary = (timed.path / "summary.md").read_text()
    assert summary.count("### roseinfer: decode steps against before") == 2
    assert "FASTER" in summary


def test_the_work_of_steps_is_kept_too(timed: Project) -> None:
    """By workers as well, whose runs are one run."""
    timed.write(
        test_speed="""
            import pytest

            @pytest.mark.parametrize("size", [1, 2])
            def test_work(roseinfer_costs, size):
                roseinfer_costs.check("steady", lambda: sum(range(size)), tokens=size)
        """
    )
    timed.pytest("--roseinfer-timings=kept", "--roseinfer-update-costs", "-n2")
    timed.pytest("--roseinfer-timings=kept").assert_outcomes(passed=2)
    runs = read_runs(timed.path / "kept")
    for run in runs:
        assert sorted(work["tokens"] for work in run.work) == [1, 2]
        assert all(work["counts"]["python_calls"] == 2 for work in run.work)
        assert all(work["more"] == work["less"] == [] for work in run.work)
    assert len(runs) == 2


def test_a_run_that_keeps_nothing_fails(timed: Project) -> None:
    result = timed.pytest("--roseinfer-timings=kept")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["FAILED: --roseinfer-timings: no test of this run timed or counted a step"]
    )


def test_both_sides_are_benchmarks(timed: Project) -> None:
    there(timed, 1100)
    before, here = benchmarks(timed)
    assert [before["name"], here["name"]] == ["test_decode (there)", "test_decode"]
    assert before["group"] == here["group"]
    assert before["stats"]["median"] == pytest.approx(1101e-6, rel=1e-3)
    assert here["stats"]["median"] == pytest.approx(1001e-6, rel=1e-3)
    assert here["stats"]["rounds"] == len(here["stats"]["data"]) == 20
    info = here["extra_info"]
    assert info["verdict"] == "FASTER"
    assert info["against"] == "before"
    assert info["tpot_p50_us"] == pytest.approx(1001)
    assert info["tpot_p99_us"] == pytest.approx(1002)
    assert info["device"] == "cpu"
    assert info["versions"]["python"] == sys.version.split()[0]


def test_saved_benchmarks_can_be_compared(timed: Project) -> None:
    storage = f"--benchmark-storage={timed.path / 'saved'}"
    against(timed, storage, "--benchmark-save=one").assert_outcomes(passed=1)
    timed.write(engine=engine(1005))
    result = against(timed, storage, "--benchmark-compare")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_decode (0001_one)*"])


def test_benchmarks_that_are_off_are_timed_all_the_same(timed: Project) -> None:
    there(timed, 950)
    against(timed, "--benchmark-disable").assert_outcomes(failed=1)


MISTAKES = {
    "margin=2": "expected a number above 0 and below 1",
    "margin='2%'": "expected a number above 0 and below 1",
    "cpus=0.5": "expected a whole number from 1",
    "seconds=0": "expected a number above 0",
    "rounds=3": "does not take rounds, only margin, *",
    "0.02": "does not take 0.02, only margin, *",
}


@pytest.mark.parametrize("mark", MISTAKES)
def test_an_argument_the_marker_does_not_have_is_a_usage_error(timed: Project, mark: str) -> None:
    timed.write(test_speed=marked(mark))
    result = timed.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_speed.py::test_decode: *{MISTAKES[mark]}"])


def test_a_marker_without_its_fixture_is_a_usage_error(timed: Project) -> None:
    timed.write(
        test_speed="""
            import pytest

            @pytest.mark.roseinfer_tpot(margin=0.1)
            def test_decode(): pass
        """
    )
    result = timed.pytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*does not take the fixture of this name*"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("--roseinfer-against=before", "--roseinfer-noise-floor"),
        ("--roseinfer-update-tpot",),
        ("--roseinfer-report-slower",),
        ("--roseinfer-tpot-seconds=5",),
        ("--roseinfer-tpot-seconds=0", "--roseinfer-against=before"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(
    timed: Project, arguments: tuple[str, ...]
) -> None:
    result = timed.pytest(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --roseinfer-*"])
