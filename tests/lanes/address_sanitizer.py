"""Kernels in CUDA C++ under AddressSanitizer, emulated on a CPU.

Triton's interpreter does not run them. A module of this folder runs one of them in a process that
is started with the sanitizer; with ``reads`` or ``writes`` as argument, one with a planted access
out of bounds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.kernels.cuda.whole_step.emulated import COMPILER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FLAGS = ("-fsanitize=address", "--param", "asan-stack=0", "-g1")
"""Stacks are not checked: threads are fibers, and the sanitizer does not know their stacks."""
_OPTIONS = "detect_leaks=0"
ALL_IN_BOUNDS = "all accesses are in bounds"


class Replacement(NamedTuple):
    find: str
    replace: str


def unavailable_reason() -> str:
    """Return why this machine cannot run the lane; empty if it can."""
    if COMPILER is None:
        return "g++ is not installed"
    return "" if _runtime().is_absolute() else "g++ has no AddressSanitizer"


def run_with_sanitizer(module: str, *planted: str) -> str:
    """Run a module in another process; return what it and the sanitizer printed."""
    sanitizer = {"LD_PRELOAD": str(_runtime()), "ASAN_OPTIONS": _OPTIONS}
    done = subprocess.run(
        [sys.executable, "-m", module, *planted],
        env=os.environ | sanitizer,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def with_planted(text: str, planted: Mapping[str, Replacement], verbs: Sequence[str]) -> str:
    """Return a kernel's source with the planted accesses, in a process with the sanitizer."""
    os.environ.pop("LD_PRELOAD", None)  # the compiler needs no sanitizer
    for verb in verbs:
        replacement = planted[verb]
        assert text.count(replacement.find) == 1
        text = text.replace(*replacement)
    return text


def _runtime() -> Path:
    """Return the path of the sanitizer's library, or its bare name if the compiler has none."""
    command = [str(COMPILER), "-print-file-name=libasan.so"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
