"""Steps of the megakernel under AddressSanitizer: ``python -m tests.lanes.whole_step``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.cuda.whole_step import Megakernel, source
from tests.kernels.cuda.whole_step.emulated import EMULATION, EmulatedProgram
from tests.kernels.cuda.whole_step.small_models import small_rig, small_sizes
from tests.lanes.address_sanitizer import ALL_IN_BOUNDS, FLAGS, Replacement, with_planted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roseinfer.kernels.cuda.whole_step import StepSizes

_LENGTHS = (0, 65, 300)
_PLANTED = {
    "reads": Replacement("n < WIDTH ? load_constant(from + n) : 0;", "load_constant(from + n);"),
    "writes": Replacement("if (r + 1 < count) logits[r + 1]", "logits[r + 1]"),
}
"""Planted accesses; the value read is multiplied by zero, so the results do not change."""


def main(argv: Sequence[str]) -> None:
    text = with_planted(source(EMULATION), _PLANTED, argv)
    _make_steps(text, small_sizes(16), biased=False)
    _make_steps(text, small_sizes(48, rotary_dim=16, normed=True), biased=True)
    print(ALL_IN_BOUNDS)


def _make_steps(text: str, sizes: StepSizes, *, biased: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = EmulatedProgram(sizes, Path(folder), text=text, flags=FLAGS)
    for length in _LENGTHS:
        rig = small_rig(sizes, length, biased=biased)
        step = Megakernel(sizes, rig.weights, rig.caches, length + 1, program)
        step.logits(torch.tensor([7]), torch.tensor([length]), rig.table())


if __name__ == "__main__":
    main(sys.argv[1:])
