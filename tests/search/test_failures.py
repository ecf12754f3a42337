"""Failures: how they are displayed, saved and replayed."""

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
TEST_OF_A_CACHE = """
    from caches.broken_caches import {name}
    from pytest_roseinfer import conformance

    TestIt = conformance({name})
"""


def fail(project: Project, name: str, *arguments: str) -> pytest.RunResult:
    project.copy_caches()
    project.write(test_it=TEST_OF_A_CACHE.format(name=name))
    result = project.pytest("test_it.py", *SEARCH, *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    return result


def test_failure_is_described_and_drawn(project: Project) -> None:
    reports = ("--roseinfer-report=kv.json", "--roseinfer-report=kv.html")
    result = fail(project, "SwapsRows", "-k", "histories", *reports)
    lines = result.outlines
    start = next(at for at, line in enumerate(lines) if "TestIt.test_histories ___" in line)
    lines_shown = [line.strip() for line in lines[start + 1 :] if line]
    assert lines_shown[0] == (
        "peek: sequence 0, layer 0, K: position 0, head 0 (1 of 1 wrong): expected sequence 0, "
        "token 0, found sequence 1, token 0; the right one lies in "
        "block 1, position 0"
    )
    assert lines_shown[1] == "after step 1 of"
    assert lines_shown[2].startswith(
        "a cache with num_layers=1, num_heads=1, head_dim=1, block_size="
    )
    assert lines_shown[3] == "1. append one token to sequences 0, 1"
    assert lines_shown[4] == ("> < marks the error in layer 0, head 0, K")
    assert lines_shown[6:8] == ["sequence 0: [>0.0<]", "sequence 1: [1.0]"]
    assert lines_shown[9:11] == ["sequence 0: >0x1<", "sequence 1: 1x1"]
    target_option = "--roseinfer-target caches.broken_caches:SwapsRows"
    replay_line = (
        f"replay with: pytest --roseinfer-replay {project.failure_name('.json')} {target_option}"
    )
    assert replay_line in lines_shown
    assert f"drawn: {project.failure_name('.svg')}" in lines_shown
    # The short summary has its first line.
    assert any(
        line.startswith("FAILED test_it.py::TestIt::test_histories - peek:") for line in lines_shown
    )
    # Neither frames of the harness nor Hypothesis's own report of the history are shown.
    for noise in ("search.py", "Hypothesis", "Failing test case", "History(", "Traceback"):
        assert noise not in "".join(lines_shown)
    # The reports have it too.
    (finding,) = json.loads((project.path / "kv.json").read_text())["findings"]
    assert finding["tests"] == ["test_it.py::TestIt::test_histories"]
    assert finding["summary"] == lines_shown[0]
    assert [project.path / finding["trace"], project.path / finding["script"]] == [
        project.failure_file(".json"),
        project.failure_file(".py"),
    ]
    assert [frame["description"] for frame in finding["frames"][1:]] == [
        lines_shown[3][len("1. ") :]
    ]
    page = (project.path / "kv.html").read_text()
    assert finding["expected"] in page
    assert f'download="{project.failure_file(".svg").name}"' in page


@pytest.mark.slow
def test_equal_failures_of_two_tests_are_shown_once(project: Project) -> None:
    output = fail(project, "SwapsRows").stdout.str()
    assert output.count("after step 1 of") == 1
    reference_line = (
        "Details: see test_it.py::TestIt::test_histories, which failed in the same way."
    )
    assert output.count(reference_line) == output.count("replay with:") - 1 > 0
    second_result = project.pytest("test_it.py", *SEARCH, "-k", "permuting")
    assert second_result.stdout.str().count("after step 1 of") == 1


def test_replayed_cache_has_the_size_of_the_message(project: Project) -> None:
    """The compared histories run on a cache with room for all copies, whatever was drawn."""
    result = fail(project, "SwapsRows", "-k", "split")
    spec = json.loads(project.failure_file(".json").read_text())["example"]["spec"]
    result.stdout.fnmatch_lines([f"a cache with *, num_blocks={spec['num_blocks']}, *"])


def test_error_of_the_cache_is_shown_with_its_origin(project: Project) -> None:
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


@pytest.mark.slow
def test_unexpected_error_is_shown_with_its_history(project: Project) -> None:
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


def test_frames_of_the_harness_are_shown_with_full_trace(project: Project) -> None:
    result = fail(project, "HasNoBooks", "-k", "histories", "--full-trace")
    result.stdout.fnmatch_lines(["*machine.py:*", "*broken_caches.py:*"])


def test_error_of_the_harness_is_shown_unchanged(project: Project) -> None:
    project.copy_caches()
    project.write(
        test_it=TEST_OF_A_CACHE.format(name="SwapsRows")
        + """
    from pytest_roseinfer.run.machine import HistoryRunner

    def break_down(self):
        raise RuntimeError("a bug of the harness")

    HistoryRunner.steps = break_down
"""
    )
    result = project.pytest("test_it.py", *SEARCH, "-k", "histories")
    result.stdout.fnmatch_lines(["*conformance.py:*", "E * RuntimeError: a bug of the harness"])


def test_flaky_cache_is_reported_as_flaky(project: Project) -> None:
    result = fail(project, "WorksTheSecondTime", "-k", "histories")
    result.stdout.fnmatch_lines(
        [
            "peek: sequence *",
            "The same example passed when it was tried again: *",
            "replay with: pytest --roseinfer-replay *",
        ]
    )


@pytest.mark.slow
def test_saved_failure_is_replayed_until_fixed(project: Project) -> None:
    """The adapter is in the test file itself, as in the tutorial."""
    folder = fail_in_test_file(project, "checks", "prepend")
    process = project.run_script()
    assert process.returncode == 1
    assert "Divergence: peek: sequence 0, layer 0, K: position " in process.stderr
    assert "it was recorded with" not in replay(project, pytest.ExitCode.TESTS_FAILED)

    fixed = (folder / "test_it.py").read_text()
    fixed = fixed.replace("[blocks[-1], *blocks[1:-1], blocks[0]]", "blocks")
    (folder / "test_it.py").write_text(fixed)
    process = project.run_script()
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == "it passed: nothing differed\n"
    assert "it was recorded with: peek: sequence 0, " in replay(project, pytest.ExitCode.OK)


@pytest.mark.slow
def test_saved_failure_is_replayed_from_a_folder_named_like_a_package(project: Project) -> None:
    """With importlib, a test file may be in a folder named like an installed package."""
    fail_in_test_file(project, "email", "importlib")
    process = project.run_script()
    assert process.returncode == 1
    assert "Divergence: peek: sequence 0, layer 0, K: position " in process.stderr


@pytest.mark.slow
def test_saved_failure_is_replayed_in_another_checkout(project: Project, tmp_path: Path) -> None:
    fail_in_test_file(project, "checks", "prepend")
    trace, script = project.failure_file(".json"), project.failure_file(".py")
    assert str(project.path) not in trace.read_text() + script.read_text()
    checkout = tmp_path / "another"
    shutil.copytree(project.path, checkout)
    shutil.rmtree(project.path / "checks")
    process = project.run_script(checkout / ".roseinfer" / script.name)
    assert "Divergence: peek: sequence 0, layer 0, K: position " in process.stderr


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


def replay(project: Project, status: int) -> str:
    """Replay the saved failure, which exits with ``status``; return the output."""
    file = project.failure_file(".json")
    adapter = json.loads(file.read_text())["adapter"]
    result = project.pytest("--roseinfer-replay", str(file), "--roseinfer-target", adapter)
    assert ". append one token to sequences 0, 1" in result.stdout.str()
    assert result.ret == status
    assert ("FAILED: peek: sequence 0" in result.stdout.str()) == bool(status)
    return result.stdout.str()


@pytest.mark.slow
def test_failure_of_compared_runs_is_replayed_as_a_comparison(project: Project) -> None:
    """Neither of the two histories fails by itself."""
    result = fail(project, "FillsFromTheEnd", "-k", "histories or every_option")
    result.assert_outcomes(failed=1, passed=1, deselected=3)
    message = "the whole cache differs from the run without options {'from_the_end': True}"
    result.stdout.fnmatch_lines([f"*{message}*"])
    assert message in project.run_script().stderr


def test_old_trace_is_replayed(project: Project) -> None:
    """The trace was saved when all operations were in one file, and has every one of that time."""
    file = Path(__file__).parent / "traces" / "every_operation.json"
    steps = json.loads(file.read_text())["example"]["operations"]
    newer = {"Cancel", "LookUp", "Read", "RunQueued", "BeginWith", "Truncate", "TruncateMany"}
    newer |= {"Preempt", "Resume", "SwapOut", "FinishSwapOut", "SwapIn", "FinishSwapIn", "Reset"}
    newer |= {"LoadPrefix", "EndLoad", "EndTransfer", "RestartTiers"}
    newer |= {"AppendTrees", "AcceptPaths", "FreeWithDrafts", "PreemptWithDrafts", "Reorder"}
    newer |= {"KeepSession", "ResumeSession", "ReleaseSession"}
    newer |= {"MakeRemote", "RemotePrefill", "BeginReceive", "EndReceiveTransfer"}
    newer |= {"FinishReceive", "CancelReceive", "AbortRemote"}
    operations = [
        kind for capability in KVCacheAdapter.capabilities for kind in capability.operations
    ]
    assert {step["do"] for step in steps} == {kind.__name__ for kind in operations} - newer
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


def test_trace_of_a_missing_gpu_is_a_usage_error(project: Project) -> None:
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


def test_failure_of_a_local_class_is_reported_without_a_replay(project: Project) -> None:
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
