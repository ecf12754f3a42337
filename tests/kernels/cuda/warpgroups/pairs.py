"""Products of many rows by pairs of programs, and what they should be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roseinfer.kernels.cuda.paired import KERNEL, PairedSizes, add_paired_gemm, paired_gate_up
from tests.kernels.cuda.whole_step.emulated import EMULATION, EmulatedProgram

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from roseinfer.kernels.cuda.toolchain import Program

SMALL = {gates: PairedSizes(gates, stages=2) for gates in (False, True)}
"""Rings so short that programs wait for each other all the time."""


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    inputs: int
    outputs: int
    parts: int = 1
    gates: bool = False
    times: float = 1.0


SHAPES = {
    "one item": Shape(256, 192, 128),
    "parts": Shape(300, 512, 192, parts=4),
    "a factor, and rows of one program alone": Shape(100, 128, 320, parts=2, times=0.22),
    "one row": Shape(1, 64, 64),
    "gates": Shape(290, 192, 192, gates=True),
    "gates of one tile": Shape(70, 64, 64, gates=True),
}


class Paired:
    """Rows and weights, and what is added to, among numbers that must stay as they are."""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(shape.rows)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=draw).bfloat16().to(device)

        self.shape = shape
        strips = 2 if shape.gates else 1
        self.weight = numbers(shape.outputs * strips, shape.inputs) * shape.inputs**-0.5
        self.x = numbers(shape.rows + 3, shape.inputs + 64)[: shape.rows, : shape.inputs]
        self.room = numbers(shape.rows + 2, shape.outputs + 64)
        self.before = self.room.clone()

    @property
    def residual(self) -> Tensor:
        return self.room[: self.shape.rows, : self.shape.outputs]

    def computed(
        self,
        program: Program | None = None,
        sizes: PairedSizes | None = None,
        pairs: int | None = None,
    ) -> Tensor:
        """Have the kernel add to the residual stream, or gate."""
        shape = self.shape
        if shape.gates:
            return paired_gate_up(self.x, self.weight, sizes=sizes, program=program, pairs=pairs)
        add_paired_gemm(
            self.residual, self.x, self.weight, shape.parts, shape.times,
            sizes=sizes, program=program, pairs=pairs,
        )  # fmt: skip
        return self.residual

    def expected(self) -> Tensor:
        """Compute it in float64, and round where the model's own modules do."""
        made: Tensor = self.x.double() @ self.weight.double().T
        if self.shape.gates:
            gates, ups = made.bfloat16().chunk(2, 1)
            return torch.nn.functional.silu(gates.float()).bfloat16() * ups
        residual = self.before[: self.shape.rows, : self.shape.outputs].double()
        return (residual + made * self.shape.times).bfloat16()

    def spoilt(self) -> bool:
        """Tell if anything has been written beside the residual stream."""
        rest = self.before.clone()
        rest[: self.shape.rows, : self.shape.outputs] = self.residual
        return not torch.equal(rest, self.room)


def off(got: Tensor, want: Tensor) -> float:
    """Return how far a result is off, as a share of its length."""
    return float((got.double() - want.double()).norm() / want.double().norm())


TOLERANCE = 3e-3
"""Roundings to bfloat16 that two orders of adding up decide in other ways."""


def emulated(
    sizes: PairedSizes, folder: Path, text: str | None = None, **more: object
) -> EmulatedProgram:
    """Return the kernel for an emulated machine; ``text`` is what runs in place of its source."""
    text = text or sizes.source(EMULATION)
    return EmulatedProgram(sizes, folder, kernel=KERNEL, text=text, **more)  # type: ignore[arg-type]
