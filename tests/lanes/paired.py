"""Some products by pairs of programs: ``python -m tests.lanes.paired``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kernels.cuda.warpgroups.pairs import SMALL, Paired, Shape, emulated
from tests.lanes.address_sanitizer import ALL_RIGHT, FLAGS, Changed, with_planted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kernels.cuda.whole_step.emulated import EmulatedProgram

_PLANTED = {
    "reads": Changed("tile_at(stage + OF_ROWS)", "tile_at(s + 1)"),
    "writes": Changed("        show_copy_engine();\n", "        s->out[1][OF_OUT + 1152] = 0;\n"),
}
"""Beyond the shared memory of a program: what lies in global memory is copied by maps alone."""


def main(argv: Sequence[str]) -> None:
    programs = {gates: _program(gates, argv) for gates in SMALL}
    for gates, program in programs.items():
        for rows in (1, 300):
            shape = Shape(rows, 128, 192, parts=1 if gates else 2, gates=gates)
            Paired(shape).computed(program, SMALL[gates], 2)
    print(ALL_RIGHT)


def _program(gates: bool, planted: Sequence[str]) -> EmulatedProgram:
    sizes = SMALL[gates]
    text = with_planted(sizes.source(with_machine=False), _PLANTED, planted)
    with tempfile.TemporaryDirectory() as folder:
        return emulated(sizes, Path(folder), text, flags=FLAGS)


if __name__ == "__main__":
    main(sys.argv[1:])
