"""Tries a model's fused kernels on a few tokens when it is loaded: its own modules must agree.

Who wraps a module, with an adapter or a quantised weight, changes what it computes. Fused kernels
read the weights that it had.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import AttentionBackend, ResidentBatch, StepBatch
from roseinfer.attention.reference import attend
from roseinfer.models.checks import alike, trial_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.layer_traits import LayerTraits
    from roseinfer.models.causal import CausalModel


class _OneText(AttentionBackend):
    """Attends to one text, all of whose tokens are in the step, and keeps nothing."""

    def __init__(self, traits: Sequence[LayerTraits]) -> None:
        self.traits = traits
        self.path_counts = Counter()

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        """Do nothing: no batch says more than the tokens do."""

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        return attend(query, keys, values, self.traits[layer]).contiguous()


@torch.inference_mode()
def agrees_with_its_modules(fused: CausalModel) -> bool:
    """Return True if the fused kernels compute what the model's own modules do, but for rounding.

    The last of the tokens are as far on as a text can come.
    """
    tokens = torch.tensor(trial_tokens(fused.config, fused.shape), device=fused.device)
    positions = torch.arange(len(tokens), device=fused.device)
    positions[len(tokens) // 2 :] += fused.shape.max_length - len(tokens)
    attention = _OneText(fused.traits)
    return alike(*fused.logits_in_two_ways(tokens, positions, attention))


# Tries, when a model is loaded, whether a token gets the same bits in batches of many sizes.
#
# Our kernels add up in one order by design. Of torch's products, which take over where rows are
# many, the order is torch's own: it is looked at on this GPU, with this model's weights.


_FEW = 64
"""Rows of a small batch, which are computed with those of no other."""
_MOST_LOGITS = 2112
"""Rows of a batch up to which all logits are computed; of a larger one, those of 64 rows are."""
_DIGESTED = 256
"""Rows whose digests are computed at a time."""
_ROWS = (
    1, 2, 16, 17, 33, *range(64, 577, 32), *range(65, 545, 96), 600, 700, 777,
    *range(640, 2049, 128), 1000, 1023, 1500,
)  # fmt: skip
"""Sizes at which products change over to other tiles or to torch's, and some between them."""
_MOST_ROWS = 8192


class _TokensAlone(AttentionBackend):
    """Lets every token see itself alone, so that no row depends on another; digests what it saw."""

    def __init__(self) -> None:
        """Need no cache: nothing is kept."""
        self.path_counts = Counter()
        self.digests: list[Tensor] = []

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        """Do nothing: no batch says more than the tokens do."""

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002
        self.digests += [_digest(query), _digest(key), _digest(value)]
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1)


@torch.inference_mode()
def same_bits_in_any_batch(model: CausalModel, most_rows: int) -> bool:
    """Return True if rows have the bits that they have among few, in batches up to ``most_rows``.

    Compared are the queries, keys and values of all rows in every layer, and the logits. The model
    is one on fused kernels, which computes as it will then.
    """
    most = min(most_rows, _MOST_ROWS)
    tokens = torch.arange(most, device=model.device) * 7 % model.shape.vocab_size
    parts = [
        _digests(model, tokens, begin, min(begin + _FEW, most)) for begin in range(0, most, _FEW)
    ]
    inner, logits = (torch.cat(each) for each in zip(*parts, strict=True))
    for rows in sorted({size for size in _ROWS if size < most} | {most}):
        last_rows = None
        if rows > _MOST_LOGITS:
            last_rows = torch.arange(_FEW, device=model.device) * rows // _FEW
        got_inner, got_logits = _digests(model, tokens, 0, rows, last_rows)
        if not torch.equal(got_inner, inner[:rows]):
            return False
        if not torch.equal(got_logits, logits[:rows] if last_rows is None else logits[last_rows]):
            return False
    return True


def _digests(
    model: CausalModel, tokens: Tensor, begin: int, end: int, last_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Digest, for each of these tokens, what attention saw of it, and its logits."""
    seen = _TokensAlone()
    positions = torch.arange(begin, end, device=model.device) % model.shape.max_length
    logits = model.logits(tokens[begin:end], positions, last_rows, seen)
    return torch.stack(seen.digests, 1), _digest(logits)


def _digest(rows: Tensor) -> Tensor:
    """Return a number for each row that another bit in it would change."""
    bits = rows.flatten(1).contiguous().view(torch.int16)
    odd = torch.arange(bits.shape[1], device=bits.device, dtype=torch.int32) * 40503 % 32768 | 1
    parts = (bits[at : at + _DIGESTED] * odd for at in range(0, len(bits), _DIGESTED))
    return torch.cat([part.sum(1, dtype=torch.int64) for part in parts])
