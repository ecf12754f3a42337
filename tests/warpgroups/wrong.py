"""What an emulated machine says of the kernel with something in its source replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.kernels.warpgroups.tiles import tiles_for
from tests.warpgroups.products import Product, Shape, emulated

if TYPE_CHECKING:
    from tests.persistent.emulated import EmulatedProgram

_SHAPES = (Shape(2688, 104), Shape(5120, 72, parts=2), Shape(1472, 72, strips=2))
"""Of more tiles than have room at a time."""
_ROWS = 13
_READY = "ready"


def complaint(find: str, replace: str, folder: Path) -> str:
    """Compute some products in another process; return what is wrong there, or nothing.

    The machine ends its process when it refuses something, and so may what is written elsewhere.
    """
    command = [sys.executable, "-m", "tests.warpgroups.wrong", find, replace, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(_READY), done.stderr
    ended = f"ended with {done.returncode}" if done.returncode else ""
    return done.stdout.removeprefix(_READY).strip() or ended


def main(find: str, replace: str, folder: str) -> None:
    programs = {strips: _program(find, replace, Path(folder), strips) for strips in (1, 2)}
    print(_READY, flush=True)
    for shape in _SHAPES:
        product = Product(shape, _ROWS)
        off = (product.computed(programs[shape.strips]).double() - product.expected()).abs().max()
        if product.spoilt():
            print("numbers are written behind the last row")
        if not float(off) < 0.05:
            print(f"{shape}: off by {off}")


def _program(find: str, replace: str, folder: Path, strips: int) -> EmulatedProgram:
    tiles = tiles_for(_ROWS, strips)
    text = tiles.source(machine=False)
    assert not find or text.count(find) == 1, find
    room = folder / str(strips)
    room.mkdir()
    return emulated(tiles, room, text.replace(find, replace) if find else text)


if __name__ == "__main__":
    main(*sys.argv[1:])
