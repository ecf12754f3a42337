"""Products of a few rows, and what they should be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from roseinfer.kernels.cuda.streamed import KERNEL, GemmTiles, stream_gemm, tiles_for
from tests.kernels.cuda.whole_step.emulated import EMULATION, EmulatedProgram

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    inputs: int
    outputs: int
    parts: int = 1
    strips: int = 1
    biased: bool = False


SHAPES = {
    "many tiles": Shape(2688, 128),
    "few outputs": Shape(256, 72, biased=True),
    "parts": Shape(1024, 192, parts=4),
    "gates": Shape(1408, 136, strips=2),
}


class Product:
    """Rows, weights, and the place of the product, which begins full of NaN."""

    def __init__(self, shape: Shape, rows: int, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(rows)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=draw).bfloat16().to(device)

        self.shape = shape
        self.weight = numbers(shape.outputs * shape.strips, shape.inputs) * shape.inputs**-0.5
        self.bias = numbers(shape.outputs) if shape.biased else None
        # Rows lie further apart than they are long, and others lie behind them.
        self.x = numbers(rows + 3, shape.inputs + 64)[:rows, : shape.inputs]
        dtype = torch.float32 if shape.parts > 1 else torch.bfloat16
        room = torch.full((shape.parts, rows + 2, shape.outputs), float("nan"))
        self.room = room.to(device=device, dtype=dtype)

    def computed(self, program: EmulatedProgram | None = None) -> Tensor:
        """Have the kernel compute it."""
        out = self.room[:, : len(self.x)]
        stream_gemm(self.x, self.weight, self.bias, out, self.shape.strips, program)
        return out

    def spoilt(self) -> bool:
        """Tell if anything has been written behind the rows."""
        return not bool(self.room[:, len(self.x) :].isnan().all())

    def expected(self) -> Tensor:
        """Compute it in float64, and round where the model's own modules do."""
        shape = self.shape
        cut = -1, shape.parts, shape.inputs // shape.parts
        x = self.x.double().reshape(cut).transpose(0, 1)
        made: Tensor = x @ self.weight.double().reshape(cut).permute(1, 2, 0)
        if self.bias is not None:
            made += self.bias
        if shape.strips == 2:
            gates, ups = made.bfloat16().chunk(2, 2)
            made = torch.nn.functional.silu(gates.float()).bfloat16() * ups
        return made.to(self.room.dtype)


def emulated(
    tiles: GemmTiles, folder: Path, text: str | None = None, **more: object
) -> EmulatedProgram:
    """Return the kernel for an emulated machine; ``text`` is what runs in place of its source."""
    text = text or tiles.source(EMULATION)
    return EmulatedProgram(tiles, folder, kernel=KERNEL, text=text, **more)  # type: ignore[arg-type]


@cache
def kinds() -> list[GemmTiles]:
    """Return the tiles of all numbers of rows."""
    narrow = [tiles_for(rows, strips) for rows in (16, 32, 64) for strips in (1, 2)]
    return narrow + [tiles_for(64, strips, wide=True) for strips in (1, 2)]
