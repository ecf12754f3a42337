"""Products of so many rows that torch's are faster, in the parts that ours have."""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_in_parts(x: Tensor, weight: Tensor, parts: int) -> Tensor:
    """Compute ``x @ weight``, ``[rows, inputs]`` by ``[inputs, outputs]``, still to be added up.

    This returns ``[parts, rows, outputs]`` in float32. Where our kernels cut the inputs into as
    many parts, of the same size, every part has the bits that it has there: a part is one product
    of a batch, whose inputs torch adds up from the first to the last.
    """
    rows = x.view(len(x), parts, -1).transpose(0, 1)
    shares = weight.view(parts, -1, weight.shape[1])
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.bmm(rows, shares, out_dtype=torch.float32)
    return torch.bmm(rows.float(), shares.float())  # torch has no such product of others
