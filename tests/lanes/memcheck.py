"""Compiled kernels under NVIDIA's compute-sanitizer, for what the interpreter does not show.

Such are the order and the early start of launches, loops whose end the device reads, and tiles of
one token. The tool checks allocations, not views: accesses to another tensor in the same storage
are found by the lane of interpreted kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Run = Callable[[Sequence[str]], tuple[int, str]]
    """Function that runs the calls with the tool; returns its exit status and its output."""

_ERRORS_FOUND = 86
"""Exit status of the tool when it found errors; the calls never exit with it."""
_CLEAN = "ERROR SUMMARY: 0 errors"
_PLANTED = ("linear", "0")


def unavailable_reason() -> str:
    """Return why this machine cannot run the lane; empty if it can."""
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not installed: it comes with CUDA's toolkit"
    return "" if torch.cuda.is_available() else "no GPU is available"


def run_with_tool(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the calls with allocations of exact sizes, and padding between them."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    done = subprocess.run(
        [
            *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(_ERRORS_FOUND)),
            *("--padding", "512", sys.executable, "-m", "tests.lanes.compiled_calls", *arguments),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def check(run: Run = run_with_tool) -> list[str]:
    """Return the errors found in calls, or an error if the planted access was not found."""
    status, output = run(_PLANTED)
    if status != _ERRORS_FOUND:
        return [f"planted access was not found: {' '.join(_PLANTED)}", *errors_of(status, output)]
    return errors_of(*run(()))


def errors_of(status: int, output: str) -> list[str]:
    """Return the errors that the tool found, or an error if it printed no summary."""
    if status == _ERRORS_FOUND:
        lines = [line.strip("= ") for line in output.splitlines() if line.startswith("=====")]
        return [line for line in lines if line.startswith(("Invalid", "Out-of"))] or [output]
    if status == 0 and _CLEAN in output:
        return []
    end = "\n".join(output.splitlines()[-20:])
    return [f"compute-sanitizer did not get to its summary (exit status {status}):\n{end}"]
