"""Products of few rows and of many, which the kernels of Llama's family and torch compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn.functional import linear as torch_linear

from roseinfer.kernels.products.gated import linear_gated, multiply_gated
from roseinfer.kernels.products.many_rows import multiply_in_parts
from roseinfer.kernels.products.streamed import (
    cut_evenly,
    num_parts,
    stream_linear,
    stream_linear_in_parts,
)
from roseinfer.kernels.warpgroups.paired_products import (
    add_product,
    adds_product,
    gate_product,
    gates_product,
)

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 64
"""With more, our products read their weights once for each tile of rows, and torch's once."""
_MOST_ROWS_IN_PARTS = 512
"""With more, a whole product has enough to do for all of a GPU, and is rounded in another way."""


def whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``."""
    few = len(x) <= MOST_ROWS
    return stream_linear(x, weight, bias) if few else torch_linear(x, weight, bias)


def in_parts(x: Tensor, weight: Tensor, *, always: bool) -> Tensor:
    """Compute a product as ``[parts, rows, outputs]``, still to be added up.

    The parts are those of few rows ``always``, or where that is faster than a whole product.
    """
    if len(x) > MOST_ROWS:
        if not always and len(x) > _MOST_ROWS_IN_PARTS:
            return (x @ weight.T)[None]
        if cut_evenly(*weight.shape):
            return multiply_in_parts(x, weight.T, num_parts(*weight.shape))
        if not always:
            return (x @ weight.T)[None]
    return stream_linear_in_parts(x, weight)


@dataclass(frozen=True, slots=True)
class Product:
    """A product that is to be added to the residual stream."""

    x: Tensor
    weight: Tensor

    def parts(self, *, always: bool) -> Tensor:
        """Compute it ``in_parts``."""
        return in_parts(self.x, self.weight, always=always)

    def added_in_pairs(self, residual: Tensor, times: float) -> bool:
        """Add it, ``times`` all of its parts, where that is faster than adding them up behind.

        The bits are the same.
        """
        if len(self.x) <= MOST_ROWS or not cut_evenly(*self.weight.shape):
            return False
        parts = num_parts(*self.weight.shape)
        if not adds_product(residual, self.x, self.weight, parts):
            return False
        add_product(residual, self.x, self.weight, parts, times)
        return True


def gated(x: Tensor, gates_and_ups: Tensor) -> Tensor:
    """Compute the first half of a gated MLP."""
    if len(x) <= MOST_ROWS:
        return linear_gated(x, gates_and_ups)
    if gates_product(x, gates_and_ups):
        return gate_product(x, gates_and_ups)
    return multiply_gated(x @ gates_and_ups.T)
