"""The lane on a GPU says what the tool said, and is never content with nothing."""

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

FOUND = (
    86,
    "========= COMPUTE-SANITIZER\n"
    "========= Invalid __global__ read of size 4 bytes\n"
    "=========     at _whole_kernel+0x1c0\n"
    "=========     Address 0x7f0000a0 is out of bounds\n"
    "========= ERROR SUMMARY: 24 errors\n",
)
CLEAN = (0, "========= COMPUTE-SANITIZER\ncalled: linear\n========= ERROR SUMMARY: 0 errors\n")
READ = "Invalid __global__ read of size 4 bytes"


def answering(planted: tuple[int, str], own: tuple[int, str]) -> memcheck.Run:
    """Stand for the tool."""

    def run(arguments: Sequence[str]) -> tuple[int, str]:
        return planted if arguments else own

    return run


def test_what_the_tool_finds_is_wrong() -> None:
    assert memcheck.check(answering(FOUND, FOUND)) == [READ]


def test_nothing_is_wrong_where_only_what_is_planted_is_found() -> None:
    assert memcheck.check(answering(FOUND, CLEAN)) == []


@pytest.mark.parametrize("planted", [CLEAN, (1, "no such option"), (0, "")])
def test_a_tool_that_does_not_find_what_is_planted_has_checked_nothing(
    planted: tuple[int, str],
) -> None:
    first, *_ = memcheck.check(answering(planted, CLEAN))
    assert first == "what is planted was not found: linear 0"


@pytest.mark.parametrize("own", [(1, "ImportError"), (0, "called: linear"), (-11, "")])
def test_a_run_without_a_summary_is_wrong(own: tuple[int, str]) -> None:
    (wrong,) = memcheck.check(answering(FOUND, own))
    assert wrong.startswith(f"compute-sanitizer did not get to its summary (exit status {own[0]})")
    assert wrong.endswith(own[1])


def test_a_machine_without_the_tool_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert command.main(["--gpu"]) == 4
    assert "compute-sanitizer is not installed" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--gpu"]) == 4
    assert "there is no GPU" in capsys.readouterr().err


@interpreted
def test_a_call_is_named_when_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    compiled_calls.run(["clone", "norm"], "cpu")
    assert capsys.readouterr().out == "called: clone\ncalled: norm\n"


def test_nothing_is_judged_by_a_sanitizer_that_misses_what_is_planted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []

    def fails(*arguments: str) -> int:
        asked.append(arguments)
        return 1

    monkeypatch.setattr(command, "_pytest", fails)
    assert command.main(["--seed", "3"]) == 1
    assert asked == [("tests/lanes",)]


def test_what_is_asked_for_reaches_the_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def passes(*arguments: str) -> int:
        asked.append(arguments)
        return 0

    monkeypatch.setattr(command, "_pytest", passes)
    assert command.main(["--seed", "3", "--profile", "ci"]) == 0
    searched = " ".join(asked[-1])
    for words in ("-p tests.lanes.plugin", "profile ci", "seed 3", "--require-every-kernel"):
        assert words in searched


def test_the_calls_are_those_of_every_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(compiled_calls, "run", lambda names, device: made.append([*names, device]))
    compiled_calls.main([])
    compiled_calls.main(["linear", "0"])
    assert made == [[*CALLS, "cuda"], ["linear", "cuda"]]
