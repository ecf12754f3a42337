"""Streaming GEMMs under AddressSanitizer: ``python -m tests.lanes.streamed``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda.streamed import tiles_for
from tests.kernels.cuda.warpgroups.products import SHAPES, Product, emulated
from tests.kernels.cuda.whole_step.emulated import EMULATION
from tests.lanes.address_sanitizer import ALL_IN_BOUNDS, FLAGS, Replacement, with_planted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kernels.cuda.whole_step.emulated import EmulatedProgram

_PLANTED = {
    "reads": Replacement(
        "bf16_to_float(load_constant(p.bias + n))",
        "bf16_to_float(load_constant(p.bias + n))"
        " + 0.0f * bf16_to_float(load_constant(p.bias + n + 64))",
    ),
    "writes": Replacement(" && r < p.num_rows) store", " && r < p.num_rows + 3) store"),
}
_MAX_ROWS = 16


def main(argv: Sequence[str]) -> None:
    programs = {strips: _program(strips, argv) for strips in (1, 2)}
    for shape in SHAPES.values():
        for rows in (1, _MAX_ROWS - 3):
            Product(shape, rows).computed(programs[shape.strips])
    print(ALL_IN_BOUNDS)


def _program(strips: int, planted: Sequence[str]) -> EmulatedProgram:
    tiles = tiles_for(_MAX_ROWS, strips)
    text = with_planted(tiles.source(EMULATION), _PLANTED, planted)
    with tempfile.TemporaryDirectory() as folder:
        return emulated(tiles, Path(folder), text, flags=FLAGS)


if __name__ == "__main__":
    main(sys.argv[1:])
