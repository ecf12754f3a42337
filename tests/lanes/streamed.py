"""Some products that stream: ``python -m tests.lanes.streamed``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.kernels.cuda.streamed import tiles_for
from tests.kernels.cuda.warpgroups.products import SHAPES, Product, emulated
from tests.lanes.address_sanitizer import ALL_RIGHT, FLAGS, Changed, with_planted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kernels.cuda.whole_step.emulated import EmulatedProgram

_PLANTED = {
    "reads": Changed(
        "wide(kept1(p.bias + n))", "wide(kept1(p.bias + n)) + 0.0f * wide(kept1(p.bias + n + 64))"
    ),
    "writes": Changed(" && r < p.num_rows) take", " && r < p.num_rows + 3) take"),
}
_MOST_ROWS = 16


def main(argv: Sequence[str]) -> None:
    programs = {strips: _program(strips, argv) for strips in (1, 2)}
    for shape in SHAPES.values():
        for rows in (1, _MOST_ROWS - 3):
            Product(shape, rows).computed(programs[shape.strips])
    print(ALL_RIGHT)


def _program(strips: int, planted: Sequence[str]) -> EmulatedProgram:
    tiles = tiles_for(_MOST_ROWS, strips)
    text = with_planted(tiles.source(with_machine=False), _PLANTED, planted)
    with tempfile.TemporaryDirectory() as folder:
        return emulated(tiles, Path(folder), text, flags=FLAGS)


if __name__ == "__main__":
    main(sys.argv[1:])
