"""The lane on a GPU: errors of the tool, and runs without a result."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from tests.interpreted import interpreted
from tests.kernels.calls import CALLS
from tests.lanes import __main__ as command
from tests.lanes import compiled_calls, memcheck

if TYPE_CHECKING:
    from collections.abc import Sequence

ERRORS_FOUND = (
    86,
    "========= COMPUTE-SANITIZER\n"
    "========= Invalid __global__ read of size 4 bytes\n"
    "=========     at _whole_kernel+0x1c0\n"
    "=========     Address 0x7f0000a0 is out of bounds\n"
    "========= ERROR SUMMARY: 24 errors\n",
)
CLEAN = (0, "========= COMPUTE-SANITIZER\ncalled: linear\n========= ERROR SUMMARY: 0 errors\n")
READ = "Invalid __global__ read of size 4 bytes"


def stub_tool(planted: tuple[int, str], own: tuple[int, str]) -> memcheck.Run:
    """Return a replacement of the tool."""

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        return planted if arguments else own

    return run


def test_errors_of_the_tool_are_returned() -> None:
    assert memcheck.check(stub_tool(ERRORS_FOUND, ERRORS_FOUND)) == [READ]


def test_check_passes_if_only_the_planted_access_is_found() -> None:
    assert memcheck.check(stub_tool(ERRORS_FOUND, CLEAN)) == []


@pytest.mark.parametrize("planted", [CLEAN, (1, "no such option"), (0, "")])
def test_tool_that_misses_the_planted_access_fails(
    planted: tuple[int, str],
) -> None:
    first, *_ = memcheck.check(stub_tool(planted, CLEAN))
    assert first == "planted access was not found: linear 0"


@pytest.mark.parametrize("own", [(1, "ImportError"), (0, "called: linear"), (-11, "")])
def test_run_without_a_summary_fails(own: tuple[int, str]) -> None:
    (error,) = memcheck.check(stub_tool(ERRORS_FOUND, own))
    assert error.startswith(f"compute-sanitizer did not get to its summary (exit status {own[0]})")
    assert error.endswith(own[1])


def test_missing_tool_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert command.main(["--gpu"]) == 4
    assert "compute-sanitizer is not installed" in capsys.readouterr().err


def test_missing_gpu_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--gpu"]) == 4
    assert "no GPU is available" in capsys.readouterr().err


@interpreted
def test_each_call_prints_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    compiled_calls.run(["clone", "norm"], "cpu")
    assert capsys.readouterr().out == "called: clone\ncalled: norm\n"


def test_searches_do_not_run_if_planted_accesses_are_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[tuple[str, ...]] = []

    def fails(*arguments: str) -> int:
        runs.append(arguments)
        return 1

    monkeypatch.setattr(command, "_pytest", fails)
    assert command.main(["--seed", "3"]) == 1
    assert runs == [("tests/lanes",)]


def test_options_reach_the_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, ...]] = []

    def passes(*arguments: str) -> int:
        runs.append(arguments)
        return 0

    monkeypatch.setattr(command, "_pytest", passes)
    assert command.main(["--seed", "3", "--profile", "ci"]) == 0
    search = " ".join(runs[-1])
    for words in ("-p tests.lanes.plugin", "profile ci", "seed 3", "--require-every-kernel"):
        assert words in search


def test_calls_cover_every_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls_made: list[list[str]] = []
    monkeypatch.setattr(
        compiled_calls, "run", lambda names, device: calls_made.append([*names, device])
    )
    compiled_calls.main([])
    compiled_calls.main(["linear", "0"])
    assert calls_made == [[*CALLS, "cuda"], ["linear", "cuda"]]
