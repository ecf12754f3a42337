"""Trial of a model's fused kernels on a few tokens: its own modules must agree.

A wrapper of a module, such as an adapter or a quantised weight, changes the module's output. Fused
kernels read the original weights.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import AttentionBackend, ResidentBatch
from roseinfer.attention.reference import attend
from roseinfer.kernels.kernel import compile_in_parallel
from roseinfer.models.load_checks import differ_by_rounding, is_close, trial_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.kv.manager import StepBatch
    from roseinfer.layer_traits import LayerTraits
    from roseinfer.models.causal import CausalModel


class _SingleSequenceAttention(AttentionBackend):
    """Attention in one sequence whose tokens are all in the step; it stores nothing."""

    def __init__(self, traits: Sequence[LayerTraits]) -> None:
        self.traits = traits
        self.path_counts = Counter()

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        """Do nothing: the tokens say all that a batch would."""

    def store_and_attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        return attend(query, keys, values, self.traits[layer]).contiguous()


def _compile_first(model: CausalModel, work: Callable[[], object]) -> None:
    """Compile the kernels of a check at the same time, before it needs one after the other."""
    if not model.ranks:
        compile_in_parallel(work, model.device)


_SECOND_TRIAL_TOKENS = 32


@torch.inference_mode()
def matches_modules(fused: CausalModel) -> bool:
    """Return True if the fused kernels and the model's own modules agree, but for rounding.

    The last of the trial's tokens have the highest positions of the model. Trained models amplify
    rounding there: they are tried again, with more tokens and no gap between positions.
    """
    tokens = torch.tensor(trial_tokens(fused.config, fused.shape), device=fused.device)
    positions = torch.arange(len(tokens), device=fused.device)
    positions[len(tokens) // 2 :] += fused.shape.max_length - len(tokens)
    attention = _SingleSequenceAttention(fused.traits)
    _compile_first(fused, lambda: fused.logits(tokens, positions, None, attention))
    if is_close(*fused.fused_and_module_logits(tokens, positions, attention)):
        return True
    num_tokens = min(_SECOND_TRIAL_TOKENS, fused.shape.max_length)
    return all(
        _differ_by_rounding_at(fused, first, num_tokens)
        for first in (0, fused.shape.max_length - num_tokens)
    )


def _differ_by_rounding_at(fused: CausalModel, first: int, num_tokens: int) -> bool:
    """Run tokens from all over the vocabulary at positions from ``first`` on."""
    numbers = torch.arange(num_tokens, device=fused.device)
    tokens = (numbers * 2 + 1) * fused.shape.vocab_size // (2 * num_tokens)
    inputs = tokens, numbers + first, _SingleSequenceAttention(fused.traits)
    return differ_by_rounding(
        *fused.fused_and_module_logits(*inputs),
        fused.network,
        lambda: fused.fused_and_module_logits(*inputs)[1],
    )


# Batch invariance: a token must get the same bits in batches of many sizes.
#
# The engine's kernels add up in one order by design. Torch's GEMMs, which take over for many rows,
# have an order of their own, which is checked on this GPU, with this model's weights.


_SMALL_BATCH_ROWS = 64
"""Rows of a small batch, which is computed alone."""
_MAX_ROWS_WITH_LOGITS = 2112
"""Largest batch, in rows, whose logits are all computed; of a larger one, 64 rows are."""
_DIGEST_NUMBERS = 1 << 25
"""Numbers of rows whose digests are computed at a time."""
_BATCH_SIZES = (
    1, 2, 16, 17, 33, *range(64, 577, 32), *range(65, 545, 96), 600, 700, 777,
    *range(640, 2049, 128), 1000, 1023, 1500,
)  # fmt: skip
"""Batch sizes that change GEMMs to other tiles or to torch's, and some in between."""
_SIZES_COMPILED_FIRST = (1, 2, 16, 32, 64, 96)
"""Batch sizes whose kernels are compiled at the same time. Most other sizes have the same ones, or
torch's."""
_MAX_BATCH_ROWS = 1 << 14
_SAMPLED_BLOCKS = 16
"""Small batches that are compared among the rows after ``_MAX_ROWS_WITH_LOGITS``."""


class _SelfAttentionOnly(AttentionBackend):
    """Attention of every token to itself alone: rows are independent. It digests its inputs."""

    def __init__(self) -> None:
        """Need no cache: nothing is stored."""
        self.path_counts = Counter()
        self.digests: list[Tensor] = []

    def prepare(self, batch: StepBatch | ResidentBatch) -> None:
        """Do nothing: the tokens say all that a batch would."""

    def store_and_attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002
        self.digests += [_digest(query), _digest(key), _digest(value)]
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1)


@torch.inference_mode()
def is_batch_invariant(model: CausalModel, max_rows: int) -> bool:
    """Return True if rows get the bits of a small batch in batches of up to ``max_rows`` rows.

    The queries, keys and values in every layer are compared, and the logits: those of all rows, but
    of a sample of the rows after ``_MAX_ROWS_WITH_LOGITS``. The model has fused kernels and is in
    its final state.
    """
    num_rows = min(max_rows, _MAX_BATCH_ROWS)
    tokens = torch.arange(num_rows, device=model.device) * 7 % model.shape.vocab_size
    small = [size for size in _SIZES_COMPILED_FIRST if size <= num_rows]
    _compile_first(model, lambda: [_digests(model, tokens, 0, rows) for rows in small])
    blocks = [(begin, min(begin + _SMALL_BATCH_ROWS, num_rows)) for begin in _compared(num_rows)]
    parts = [_digests(model, tokens, *block) for block in blocks]
    inner, logits = (torch.cat(each) for each in zip(*parts, strict=True))
    compared = torch.cat([torch.arange(*block, device=model.device) for block in blocks])
    for rows in sorted({size for size in _BATCH_SIZES if size < num_rows} | {num_rows}):
        here = compared < rows
        with_logits = torch.arange(int(here.sum()), device=model.device)
        last_rows = None
        if rows > _MAX_ROWS_WITH_LOGITS:
            with_logits = with_logits[:: len(with_logits) // _SMALL_BATCH_ROWS]
            last_rows = compared[with_logits]
        got_inner, got_logits = _digests(model, tokens, 0, rows, last_rows)
        if not torch.equal(got_inner[compared[here]], inner[here]):
            return False
        if not torch.equal(got_logits, logits[with_logits]):
            return False
    return True


def _compared(num_rows: int) -> list[int]:
    """Return where the small batches begin whose rows are compared."""
    begins = range(0, num_rows, _SMALL_BATCH_ROWS)
    first = -(-_MAX_ROWS_WITH_LOGITS // _SMALL_BATCH_ROWS)
    step = -(-max(1, len(begins) - first) // _SAMPLED_BLOCKS)
    return sorted({*begins[:first], *begins[first::step], begins[-1]})


def _digests(
    model: CausalModel, tokens: Tensor, begin: int, end: int, last_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a digest of each token's attention inputs and logits."""
    attention = _SelfAttentionOnly()
    positions = torch.arange(begin, end, device=model.device) % model.shape.max_length
    logits = model.logits(tokens[begin:end], positions, last_rows, attention)
    return torch.stack(attention.digests, 1), _digest(logits)


def _digest(rows: Tensor) -> Tensor:
    """Return a number for each row that changes with any bit of it."""
    bits = rows.flatten(1).contiguous().view(torch.int16)
    num_rows = max(1, _DIGEST_NUMBERS // bits.shape[1])
    odd = _odd_numbers(bits.shape[1], bits.device)
    parts = [(part * odd).sum(1, dtype=torch.int64) for part in torch.split(bits, num_rows)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@lru_cache(maxsize=8)
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device, dtype=torch.int32) * 40503 % 32768 | 1
