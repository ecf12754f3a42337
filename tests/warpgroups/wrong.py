"""What an emulated machine says of the kernel with something in its source replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from roseinfer.kernels.warpgroups.tiles import tiles_for
from tests.warpgroups.products import Product, Shape, emulated

_SHAPES = (Shape(2688, 104), Shape(5120, 72, parts=2), Shape(1472, 72, strips=2))
"""Of more tiles than have room at a time."""
_ROWS = 13


def complaint(find: str, replace: str, folder: Path) -> str:
    """Compute some products in another process; return what is wrong there, or nothing.

    The machine ends its process when it refuses something.
    """
    command = [sys.executable, "-m", "tests.warpgroups.wrong", find, replace, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.strip()


def main(find: str, replace: str, folder: str) -> None:
    for number, shape in enumerate(_SHAPES):
        product = Product(shape, _ROWS)
        tiles = tiles_for(_ROWS, shape.strips)
        text = tiles.source(machine=False)
        assert not find or text.count(find) == 1, find
        room = Path(folder) / str(number)
        room.mkdir()
        program = emulated(tiles, room, text.replace(find, replace) if find else text)
        off = (product.computed(program).double() - product.expected()).abs().max()
        if product.spoilt():
            print("numbers are written behind the last row")
        if not float(off) < 0.05:
            print(f"{shape}: off by {off}")


if __name__ == "__main__":
    main(*sys.argv[1:])
