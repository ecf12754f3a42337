"""The kernel of a whole step under AddressSanitizer, emulated on a CPU.

It is CUDA C++, which Triton's interpreter does not run. ``python -m tests.lanes.whole_step`` makes
some of its steps in a process that begins with the sanitizer; with ``reads`` or ``writes``, of a
kernel in which an access out of bounds is planted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from roseinfer.kernels.persistent.sizes import source
from roseinfer.kernels.persistent.whole_step import WholeStep
from tests.persistent.emulated import COMPILER, EmulatedProgram
from tests.persistent.rigs import small_rig, small_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.kernels.persistent.sizes import StepSizes

_LENGTHS = (0, 65, 300)
_FLAGS = ("-fsanitize=address", "--param", "asan-stack=0", "-g1")
"""Stacks are left out: threads are fibers, whose stacks the sanitizer cannot tell."""
_OPTIONS = "detect_leaks=0"
ALL_RIGHT = "every step stays within its tensors"


class Changed(NamedTuple):
    find: str
    replace: str


PLANTED = {
    "reads": Changed("some ? kept1(from + n) : 0;", "kept1(from + n);"),
    "writes": Changed("if (r + 1 < count) logits[r + 1]", "logits[r + 1]"),
}
"""What is read is multiplied by zero, so that the answer is the same."""


def why_impossible() -> str:
    """Say why this machine cannot run the lane; return nothing where it can."""
    if COMPILER is None:
        return "there is no g++"
    return "" if _runtime().is_absolute() else "g++ came without AddressSanitizer"


def under_the_sanitizer(*planted: str) -> str:
    """Make the steps in another process; return what it and the sanitizer printed."""
    before = {"LD_PRELOAD": str(_runtime()), "ASAN_OPTIONS": _OPTIONS}
    done = subprocess.run(
        [sys.executable, "-m", "tests.lanes.whole_step", *planted],
        env=os.environ | before,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def _runtime() -> Path:
    """Return where the sanitizer lies, or only its name where there is none."""
    asked = [str(COMPILER), "-print-file-name=libasan.so"]
    return Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())


def main(argv: Sequence[str]) -> None:
    text = source(machine=False)
    for verb in argv:
        changed = PLANTED[verb]
        assert text.count(changed.find) == 1
        text = text.replace(*changed)
    del os.environ["LD_PRELOAD"]  # the compiler needs no sanitizer
    _make_steps(text, small_sizes(16), biased=False)
    _make_steps(text, small_sizes(48, turn=16, normed=True), biased=True)
    print(ALL_RIGHT)


def _make_steps(text: str, sizes: StepSizes, *, biased: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = EmulatedProgram(sizes, Path(folder), text=text, flags=_FLAGS)
    for length in _LENGTHS:
        rig = small_rig(sizes, length, biased=biased)
        step = WholeStep(sizes, rig.weights, rig.caches, length + 1, program)
        step.logits(torch.tensor([7]), torch.tensor([length]), rig.table())


if __name__ == "__main__":
    main(sys.argv[1:])
