"""Tries, when a model is loaded, whether a token gets the same bits in batches of many sizes.

Our kernels add up in one order by design. Of torch's products, which take over where rows are
many, the order is torch's own: it is looked at on this GPU, with this model's weights.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import AttentionBackend, ResidentBatch, StepBatch

if TYPE_CHECKING:
    from torch import Tensor

    from roseinfer.models.causal import CausalModel

_LOOKED_AT = 64
"""Rows in front, and as many at the end, whose logits are compared."""
_ROWS = (1, 2, 16, 17, 33, 65, 96, 128, 129, 200, 256, 257, 384, 512, 513, 700, 1024, 1500, 2048)
"""Sizes at which products change over to other tiles or to torch's, and some between them."""
_MOST_ROWS = 8192


class _TokensAlone(AttentionBackend):
    """Lets every token see itself alone, so that no row depends on another."""

    def __init__(self) -> None:
        """Need no cache: nothing is kept."""
        self.path_counts = Counter()

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        """Do nothing: no batch says more than the tokens do."""

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1)


@torch.inference_mode()
def same_bits_in_any_batch(model: CausalModel, most_rows: int) -> bool:
    """Return True if rows have the bits that they have among few, in batches up to ``most_rows``.

    The model is one on fused kernels, which computes as it will then.
    """
    most = min(most_rows, _MOST_ROWS)
    sizes = sorted({size for size in _ROWS if size < most} | {most})
    tokens = torch.arange(most + _LOOKED_AT, device=model.device) * 7 % model.shape.vocab_size
    few = _logits(model, tokens, _LOOKED_AT)
    return all(_same_bits(model, tokens, rows, few) for rows in sizes)


def _same_bits(model: CausalModel, tokens: Tensor, rows: int, few: Tensor) -> bool:
    """Compare the first and the last of so many rows with the same ones among few."""
    first = torch.arange(min(rows, _LOOKED_AT), device=model.device)
    begin = rows - len(first)
    got = _logits(model, tokens, rows, last_rows=torch.cat([first, first + begin]))
    last = _logits(model, tokens, _LOOKED_AT, begin)
    return torch.equal(got, torch.cat([few[: len(first)], last[: len(first)]]))


def _logits(
    model: CausalModel, tokens: Tensor, rows: int, begin: int = 0, last_rows: Tensor | None = None
) -> Tensor:
    """Compute the logits of so many tokens from a position on."""
    positions = torch.arange(begin, begin + rows, device=model.device)
    return model.logits(
        tokens[begin : begin + rows], positions % model.shape.max_length, last_rows, _TokensAlone()
    )
