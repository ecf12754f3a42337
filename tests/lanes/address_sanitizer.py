"""Kernels in CUDA C++ under AddressSanitizer, emulated on a CPU.

Triton's interpreter does not run them. A module of this folder computes something by one of them in
a process that begins with the sanitizer; with ``reads`` or ``writes``, by one in which an access
out of bounds is planted.
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
"""Stacks are left out: threads are fibers, whose stacks the sanitizer cannot tell."""
_OPTIONS = "detect_leaks=0"
ALL_RIGHT = "all stays within its tensors"


class Changed(NamedTuple):
    find: str
    replace: str


def why_impossible() -> str:
    """Say why this machine cannot run the lane; return nothing where it can."""
    if COMPILER is None:
        return "there is no g++"
    return "" if _runtime().is_absolute() else "g++ came without AddressSanitizer"


def under_the_sanitizer(module: str, *planted: str) -> str:
    """Run a module in another process; return what it and the sanitizer printed."""
    before = {"LD_PRELOAD": str(_runtime()), "ASAN_OPTIONS": _OPTIONS}
    done = subprocess.run(
        [sys.executable, "-m", module, *planted],
        env=os.environ | before,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def with_planted(text: str, planted: Mapping[str, Changed], verbs: Sequence[str]) -> str:
    """Return a kernel's source with what is planted in it, where the sanitizer is at work."""
    os.environ.pop("LD_PRELOAD", None)  # the compiler needs no sanitizer
    for verb in verbs:
        changed = planted[verb]
        assert text.count(changed.find) == 1
        text = text.replace(*changed)
    return text


def _runtime() -> Path:
    """Return where the sanitizer lies, or only its name where there is none."""
    asked = [str(COMPILER), "-print-file-name=libasan.so"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
