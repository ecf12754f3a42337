"""A failure is shown so that a person can see it, and saved so that it can be run again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_roseinfer import CacheSpec, History, KVCacheAdapter
from pytest_roseinfer.capabilities.writes import Append

if TYPE_CHECKING:
    from tests.project import Project

SEARCH = ("--roseinfer-examples=40", "--roseinfer-seed=1")
TESTED = """
    from caches.broken_caches import {name}
    from pytest_roseinfer import conformance

    TestIt = conformance({name})
"""


def fail(project: Project, name: str, *arguments: str) -> pytest.RunResult:
    project.copy_caches()
    project.write(test_it=TESTED.format(name=name))
    result = project.pytest("test_it.py", *SEARCH, *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    return result


def test_a_difference_is_said_in_words_and_drawn(project: Project) -> None:
    reports = ("--roseinfer-report=kv.json", "--roseinfer-report=kv.html")
    result = fail(project, "SwapsRows", "-k", "histories", *reports)
    lines = result.outlines
    start = next(at for at, line in enumerate(lines) if "TestIt.test_histories ___" in line)
    shown = [line.strip() for line in lines[start + 1 :] if line]
    assert shown[0] == (
        "peek: sequence 0, layer 0, K: position 0, head 0 (1 of 1 wrong): expected sequence 0, "
        "token 0, found sequence 1, token 0; the right one lies in "
        "block 1, position 0"
    )
    assert shown[1] == "after step 1 of"
    assert shown[2].startswith("a cache with num_layers=1, num_heads=1, head_dim=1, block_size=")
    assert shown[3] == "1. append one token to sequences 0, 1"
    assert shown[4] == ("> < marks the error in layer 0, head 0, K")
    assert shown[6:8] == ["sequence 0: [>0.0<]", "sequence 1: [1.0]"]
    assert shown[9:11] == ["sequence 0: >0x1<", "sequence 1: 1x1"]
    named = "--roseinfer-target caches.broken_caches:SwapsRows"
    again = f"replay with: pytest --roseinfer-replay {project.shown('.json')} {named}"
    assert again in shown
    assert f"drawn: {project.shown('.svg')}" in shown
    # The short summary has the first line of it.
    assert any(
        line.startswith("FAILED test_it.py::TestIt::test_histories - peek:") for line in shown
    )
    # And of the harness, neither its frames nor the history as Hypothesis prints it.
    for noise in ("search.py", "Hypothesis", "Failing test case", "History(", "Traceback"):
        assert noise not in "".join(shown)
    # The reports have it too.
    (found,) = json.loads((project.path / "kv.json").read_text())["findings"]
    assert found["tests"] == ["test_it.py::TestIt::test_histories"]
    assert found["what"] == shown[0]
    assert [project.path / found["trace"], project.path / found["script"]] == [
        project.saved(".json"),
        project.saved(".py"),
    ]
    assert [frame["words"] for frame in found["frames"][1:]] == [shown[3][len("1. ") :]]
    page = (project.path / "kv.html").read_text()
    assert found["expected"] in page
    assert f'download="{project.saved(".svg").name}"' in page


def test_what_another_test_met_before_is_not_shown_twice(project: Project) -> None:
    said = fail(project, "SwapsRows").stdout.str()
    assert said.count("after step 1 of") == 1
    first = "Details: see test_it.py::TestIt::test_histories, which failed in the same way."
    assert said.count(first) == said.count("replay with:") - 1 > 0
    again = project.pytest("test_it.py", *SEARCH, "-k", "permuting")
    assert again.stdout.str().count("after step 1 of") == 1


def test_what_is_replayed_is_as_large_as_what_is_said(project: Project) -> None:
    """What is compared runs on a cache with room for all copies, whatever was drawn."""
    result = fail(project, "SwapsRows", "-k", "split")
    spec = json.loads(project.saved(".json").read_text())["example"]["spec"]
    result.stdout.fnmatch_lines([f"a cache with *, num_blocks={spec['num_blocks']}, *"])


def test_an_error_in_the_cache_is_shown_where_it_was_raised(project: Project) -> None:
    result = fail(project, "LosesTheBlock", "-k", "histories")
    result.stdout.fnmatch_lines(
        [
            "the step raised KeyError: *",
            "*1. append one token to sequence* 0*",
            "*2. free sequence 0",
            "*raised by what was tested*",
            "*broken_caches.py*in free*",
            "*block = self.tables.pop(seq + 1)*",
        ]
    )
    assert "machine.py" not in result.stdout.str()


def test_an_error_the_harness_does_not_expect_comes_with_its_history_too(project: Project) -> None:
    result = fail(project, "HasNoBooks", "-k", "histories")
    result.stdout.fnmatch_lines(
        [
            "*def ledger(self, layer: int) -> Ledger:*",
            "E * RuntimeError: books are gone",
            "E * on a cache with num_layers=1, *",
            "E *1. append one token to sequence* 0*",
            "E * replay with: pytest --roseinfer-replay *",
        ]
    )
    for noise in ("History(", "conformance.py", "machine.py", "search.py"):
        assert noise not in result.stdout.str()
    assert "RuntimeError: books are gone" in project.run_script().stderr


def test_the_frames_of_the_harness_are_shown_where_that_is_asked_for(project: Project) -> None:
    result = fail(project, "HasNoBooks", "-k", "histories", "--full-trace")
    result.stdout.fnmatch_lines(["*machine.py:*", "*broken_caches.py:*"])


def test_an_error_of_the_harness_itself_is_shown_as_it_is(project: Project) -> None:
    project.copy_caches()
    project.write(
        test_it=TESTED.format(name="SwapsRows")
        + """
    from pytest_roseinfer.run.machine import HistoryRunner

    def break_down(self):
        raise RuntimeError("a bug of ours")

    HistoryRunner.steps = break_down
"""
    )
    result = project.pytest("test_it.py", *SEARCH, "-k", "histories")
    result.stdout.fnmatch_lines(["*conformance.py:*", "E * RuntimeError: a bug of ours"])


def test_a_cache_that_fails_once_is_reported_as_such(project: Project) -> None:
    result = fail(project, "WorksTheSecondTime", "-k", "histories")
    result.stdout.fnmatch_lines(
        [
            "peek: sequence *",
            "The same example passed when it was tried again: *",
            "replay with: pytest --roseinfer-replay *",
        ]
    )


def test_a_saved_failure_runs_again_until_it_is_mended(project: Project) -> None:
    """The adapter stands in the test file itself, as it does in the tutorial."""
    folder = fail_in_test_file(project, "checks", "prepend")
    broken = project.run_script()
    assert broken.returncode == 1
    assert "Divergence: peek: sequence 0, layer 0, K: position " in broken.stderr
    assert "it was recorded with" not in replay(project, pytest.ExitCode.TESTS_FAILED)

    mended = (folder / "test_it.py").read_text()
    mended = mended.replace("[blocks[-1], *blocks[1:-1], blocks[0]]", "blocks")
    (folder / "test_it.py").write_text(mended)
    done = project.run_script()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "it passed: nothing differed\n"
    assert "it was recorded with: peek: sequence 0, " in replay(project, pytest.ExitCode.OK)


def test_a_saved_failure_runs_again_whatever_its_folder_is_called(project: Project) -> None:
    """With importlib, a test file may be in a folder named like a package that is installed."""
    fail_in_test_file(project, "email", "importlib")
    broken = project.run_script()
    assert broken.returncode == 1
    assert "Divergence: peek: sequence 0, layer 0, K: position " in broken.stderr


def test_what_is_saved_means_the_same_in_another_checkout(project: Project, tmp_path: Path) -> None:
    fail_in_test_file(project, "checks", "prepend")
    trace, script = project.saved(".json"), project.saved(".py")
    assert str(project.path) not in trace.read_text() + script.read_text()
    checkout = tmp_path / "another"
    shutil.copytree(project.path, checkout)
    shutil.rmtree(project.path / "checks")
    broken = project.run_script(checkout / ".roseinfer" / script.name)
    assert "Divergence: peek: sequence 0, layer 0, K: position " in broken.stderr


def fail_in_test_file(project: Project, name: str, mode: str) -> Path:
    project.copy_caches()
    folder = project.path / name
    folder.mkdir()
    adapters = (project.path / "caches/broken_caches.py").read_text()
    (folder / "test_it.py").write_text(
        adapters.replace("from .paged", "from caches.paged")
        + "\n\nfrom pytest_roseinfer import conformance\n\nTestIt = conformance(SwapsRows)\n"
    )
    project.ini("pythonpath = .", f"addopts = --import-mode={mode}")
    result = project.pytest(*SEARCH, "-k", "histories")
    result.assert_outcomes(failed=1, deselected=4)
    return folder


def replay(project: Project, ends: int) -> str:
    """Replay what was saved, which ends so; return what is shown."""
    file = project.saved(".json")
    adapter = json.loads(file.read_text())["adapter"]
    result = project.pytest("--roseinfer-replay", str(file), "--roseinfer-target", adapter)
    assert ". append one token to sequences 0, 1" in result.stdout.str()
    assert result.ret == ends
    assert ("FAILED: peek: sequence 0" in result.stdout.str()) == bool(ends)
    return result.stdout.str()


def test_a_failure_of_two_runs_compared_is_replayed_as_such(project: Project) -> None:
    """Alone, neither of the two histories fails."""
    result = fail(project, "FillsFromTheEnd", "-k", "histories or every_option")
    result.assert_outcomes(failed=1, passed=1, deselected=3)
    message = "the whole cache differs from the run without options {'from_the_end': True}"
    result.stdout.fnmatch_lines([f"*{message}*"])
    assert message in project.run_script().stderr


def test_a_trace_of_before_still_runs(project: Project) -> None:
    """It was saved when all operations stood in one file, and has each that there was."""
    file = Path(__file__).parent / "traces" / "every_operation.json"
    steps = json.loads(file.read_text())["example"]["operations"]
    later = {"LookUp", "Read", "RunQueued", "BeginWith", "Truncate", "TruncateMany"}
    later |= {"Preempt", "Resume", "SwapOut", "FinishSwapOut", "SwapIn", "FinishSwapIn"}
    every = [kind for own in KVCacheAdapter.capabilities for kind in own.operations]
    assert {step["do"] for step in steps} == {kind.__name__ for kind in every} - later
    result = project.pytest("--roseinfer-replay", str(file))
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "*1. prefill sequence 0 with 3 tokens (inputs fused)",
            "*3. append one token to rows padding, 1, 0",
            "*10. write the 7 tokens of sequence 0 again as 3",
            "it passed: nothing differed",
        ]
    )


def test_a_trace_of_a_gpu_that_is_not_here(project: Project) -> None:
    history = History(CacheSpec(device="cuda:99"), (Append((0,)),))
    trace = {
        "adapter": "no.matter:Cache",
        "file": "",
        "folders": [],
        "environment": {},
        "check": "run_history",
        "example": history.to_json(),
    }
    (project.path / "elsewhere.json").write_text(json.dumps(trace))
    result = project.pytest("--roseinfer-replay=elsewhere.json", "--roseinfer-replay-trust")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ['ERROR: --roseinfer-replay elsewhere.json was recorded on "cuda:99"*']
    )


def test_a_cache_that_cannot_be_imported_again_is_still_reported(project: Project) -> None:
    project.copy_caches()
    project.write(
        test_it="""
            from caches.broken_caches import SwapsRows
            from pytest_roseinfer import conformance

            def local():
                class Local(SwapsRows):
                    pass
                return Local

            TestIt = conformance(local())
        """
    )
    result = project.pytest(*SEARCH, "-k", "histories")
    result.stdout.fnmatch_lines(
        [
            "peek: sequence 0, layer 0, K: *",
            "no replay was saved: test_it:local.<locals>.Local is defined in a function *",
        ]
    )
