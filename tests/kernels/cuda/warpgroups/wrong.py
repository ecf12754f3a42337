"""What an emulated machine says of a kernel with something in its source replaced."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roseinfer.kernels.cuda.streamed import tiles_for
from tests import warm_process
from tests.kernels.cuda.warpgroups import pairs, prompts
from tests.kernels.cuda.warpgroups.products import Product, Shape, emulated
from tests.kernels.cuda.warpgroups.prompts import Attention, Prompts
from tests.kernels.cuda.warpgroups.rows import Rows
from tests.kernels.cuda.whole_step.emulated import EMULATION
from tests.python_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roseinfer.kernels.cuda.decode_attention import RowSizes
    from roseinfer.kernels.cuda.paired import PairedSizes
    from roseinfer.kernels.cuda.prefill_attention import PromptSizes
    from roseinfer.kernels.cuda.streamed import GemmTiles

_SHAPES = (Shape(2688, 104), Shape(5120, 72, parts=2), Shape(1472, 72, strips=2))
"""Of more tiles than have room at a time."""
_PROMPTS = Prompts([(0, 300), (70, 90), (5, 33)], group=3)
_PAIRED = pairs.Shape(300, 256, 320, parts=2, times=0.22)
_ROW_LENGTHS = [600, 300, 5, 70]
_ROW_HEADS: dict[str, Any] = {"group": 3}
_SEEDS = 7
"""Of orders in which threads have turns: some wrongs are seen in half of them."""
_ROWS = 13
_READY = "ready"


def complaint(kernel: str, find: str, replace: str, folder: Path) -> str:
    """Compute something in another process; return what is wrong there, or nothing.

    The machine ends its process when it refuses something, and so may what is written elsewhere.
    """
    arguments = ["-m", "tests.kernels.cuda.warpgroups.wrong", kernel, find, replace, str(folder)]
    done = warm_process.run(arguments, cwd=ROOT, environment=os.environ)
    assert done.stdout.startswith(_READY), done.stderr
    ended = f"ended with {done.returncode}" if done.returncode else ""
    return done.stdout.removeprefix(_READY).strip() or ended


class Replaced:
    """Sources in which something is replaced, each compiled in a folder of its own."""

    def __init__(self, find: str, replace: str, folder: Path) -> None:
        self.find, self.replace, self.folder = find, replace, folder

    def source(self, sizes: GemmTiles | PromptSizes | PairedSizes | RowSizes) -> str:
        text = sizes.source(EMULATION)
        assert not self.find or text.count(self.find) == 1, self.find
        return text.replace(self.find, self.replace) if self.find else text

    def room(self) -> Path:
        room = self.folder / str(len(list(self.folder.iterdir())))
        room.mkdir()
        return room


def _products(replaced: Replaced) -> Iterator[str]:
    tiles = {strips: tiles_for(_ROWS, strips) for strips in (1, 2)}
    programs = {
        strips: emulated(own, replaced.room(), replaced.source(own))
        for strips, own in tiles.items()
    }
    yield _READY
    for shape in _SHAPES:
        product = Product(shape, _ROWS)
        off = (product.computed(programs[shape.strips]).double() - product.expected()).abs().max()
        if product.spoilt():
            yield "numbers are written behind the last row"
        if not float(off) < 0.05:
            yield f"{shape}: off by {off}"


def _prompts(replaced: Replaced) -> Iterator[str]:
    sizes = _PROMPTS.sizes
    program = prompts.emulated(sizes, replaced.room(), replaced.source(sizes))
    yield _READY
    attention = Attention(_PROMPTS, sharp=3.0, rotates=True)
    want = attention.expected()
    for program.seed in range(_SEEDS):
        off = (attention.computed(program, 3).double() - want).abs().max()
        if not float(off) < prompts.TOLERANCE:
            yield f"off by {off}"


def _pairs(replaced: Replaced) -> Iterator[str]:
    sizes = pairs.SMALL[_PAIRED.gates]
    program = pairs.emulated(sizes, replaced.room(), replaced.source(sizes))
    yield _READY
    for program.seed in range(_SEEDS):
        paired = pairs.Paired(_PAIRED)
        off = pairs.off(paired.computed(program, sizes, 2), paired.expected())
        if paired.spoilt():
            yield "numbers are written beside what is added to"
        if not off < pairs.TOLERANCE:
            yield f"off by {off}"


def _rows(replaced: Replaced) -> Iterator[str]:
    sizes = Rows([0], **_ROW_HEADS).sizes(2, 2)
    program = prompts.emulated(sizes, replaced.room(), replaced.source(sizes))
    yield _READY
    for program.seed in range(_SEEDS):
        off = Rows(_ROW_LENGTHS, **_ROW_HEADS).off(sizes, program)
        if not off < prompts.TOLERANCE:
            yield f"off by {off}"


_KERNELS: dict[str, Callable[[Replaced], Iterator[str]]] = {
    "products": _products,
    "prompts": _prompts,
    "pairs": _pairs,
    "rows": _rows,
}


def main(kernel: str, find: str, replace: str, folder: str) -> None:
    for line in _KERNELS[kernel](Replaced(find, replace, Path(folder))):
        print(line, flush=True)
        if line != _READY:
            break


if __name__ == "__main__":
    main(*sys.argv[1:])
