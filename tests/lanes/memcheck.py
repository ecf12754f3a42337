"""The compiled kernels under NVIDIA's compute-sanitizer, for what is not so when interpreted.

That is the order and the early start of launches, loops to an end that the device knows, and
tiles of one token. It sees allocations, not views: what lies in another tensor's part of the
same storage is for the lane of interpreted kernels.
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
    """Runs the calls under the tool; returns its exit status and what it printed."""

_FOUND = 86
"""The tool exits with this where it found something; the calls themselves do not."""
_CLEAN = "ERROR SUMMARY: 0 errors"
_PLANTED = ("linear", "0")


def why_impossible() -> str:
    """Say why this machine cannot run the lane; return nothing where it can."""
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not installed: it comes with CUDA's toolkit"
    return "" if torch.cuda.is_available() else "there is no GPU"


def under_the_tool(arguments: Sequence[str]) -> tuple[int, str]:
    """Run the calls with allocations of their exact size, and room between any two."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    done = subprocess.run(
        [
            *("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(_FOUND)),
            *("--padding", "512", sys.executable, "-m", "tests.lanes.compiled_calls", *arguments),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def check(run: Run = under_the_tool) -> list[str]:
    """Return what is wrong: something was found, or what is planted was not."""
    status, output = run(_PLANTED)
    if status != _FOUND:
        return [f"what is planted was not found: {' '.join(_PLANTED)}", *problems(status, output)]
    return problems(*run(()))


def problems(status: int, output: str) -> list[str]:
    """Return what the tool found, or that it did not get so far as to say."""
    if status == _FOUND:
        found = [line.strip("= ") for line in output.splitlines() if line.startswith("=====")]
        return [line for line in found if line.startswith(("Invalid", "Out-of"))] or [output]
    if status == 0 and _CLEAN in output:
        return []
    end = "\n".join(output.splitlines()[-20:])
    return [f"compute-sanitizer did not get to its summary (exit status {status}):\n{end}"]
