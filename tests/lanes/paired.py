"""Paired GEMMs under AddressSanitizer: ``python -m tests.lanes.paired``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kernels.cuda.warpgroups.pairs import SMALL, Paired, Shape, emulated
from tests.kernels.cuda.whole_step.emulated import EMULATION
from tests.lanes.address_sanitizer import ALL_IN_BOUNDS, FLAGS, Replacement, with_planted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kernels.cuda.whole_step.emulated import EmulatedProgram

_PLANTED = {
    "reads": Replacement("describe_rows(tiles + ROWS_BYTES)", "describe_rows(s + 1)"),
    "writes": Replacement(
        "        fence_async_proxy();\n", "        s->out[1][OUT_BYTES + 1152] = 0;\n"
    ),
}
"""Accesses beyond a program's shared memory; global memory is only accessed by tensor maps."""


def main(argv: Sequence[str]) -> None:
    programs = {gates: _program(gates, argv) for gates in SMALL}
    for gates, program in programs.items():
        for rows in (1, 300):
            shape = Shape(rows, 128, 192, parts=1 if gates else 2, gates=gates)
            Paired(shape).computed(program, SMALL[gates], 2)
    print(ALL_IN_BOUNDS)


def _program(gates: bool, planted: Sequence[str]) -> EmulatedProgram:
    sizes = SMALL[gates]
    text = with_planted(sizes.source(EMULATION), _PLANTED, planted)
    with tempfile.TemporaryDirectory() as folder:
        return emulated(sizes, Path(folder), text, flags=FLAGS)


if __name__ == "__main__":
    main(sys.argv[1:])
