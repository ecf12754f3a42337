"""Steps of one resident sequence in one kernel, for the models and the caches that it is for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import ResidentBatch
from roseinfer.kernels.cuda.whole_step import prepared
from roseinfer.kv.manager import KVBlockManager
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.kernels.cuda.whole_step import StepWeights, WholeStep
    from roseinfer.models.causal import CausalModel

# What a step of one sequence computes, to compare one kernel with several before the first one.
#
# They add up in one order by design, but by other instructions: `mma.sync` in place of `wgmma`, or
# of what GPUs to come have. It is looked at on this GPU, with this model's weights.


_CONTEXTS = (0, 20, 129, 300)
"""Tokens before the step: none, one part of a context, and several parts."""
_TOKENS = 8
"""Random tokens for each context: few sums are rounded differently when their order differs."""


class WholeStepTrial:
    """One sequence of numbers drawn by chance, in a cache of its own."""

    def __init__(self, model: CausalModel, like: AttentionBackend) -> None:
        """Attend as ``like`` does, and have blocks as its cache has them."""
        shape, kv = model.shape, like.kv
        self._model = model
        self._contexts = [min(context, shape.max_length - 1) for context in _CONTEXTS]
        blocks = max(self._contexts) // kv.block_size + 1
        self.kv = KVBlockManager(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, kv.block_size, blocks + 1,
            kv.device, kv.dtype, layers_per_group=shape.num_layers,
        )  # fmt: skip
        self._attention = type(like)(model.traits, self.kv, like.staging, self.kv.path_counts)
        self._table = torch.arange(blocks, 0, -1, device=kv.device)[None]

    @torch.inference_mode()
    def computed(self) -> list[Tensor]:
        """Return the logits of steps, and the block of keys and values that each step writes to."""
        caches = [each for layer in range(self.kv.num_layers) for each in self.kv.caches(layer)]
        draw = torch.Generator(self.kv.device).manual_seed(0)
        for cache in caches:
            cache.normal_(generator=draw)
        shape = (len(self._contexts), _TOKENS, 1)
        tokens = torch.randint(
            self._model.shape.vocab_size, shape, generator=draw, device=self.kv.device
        )
        found = []
        for context, drawn in zip(self._contexts, tokens, strict=True):
            length = torch.full_like(drawn[0], context)
            block = self._table[0, context // self.kv.block_size]
            self._attention.prepare(ResidentBatch([self._table], length))
            for token in drawn:
                found.append(self._model.logits(token, length, None, self._attention).clone())
                found += [cache[block].clone() for cache in caches]
        return found


_LOG = logging.getLogger("roseinfer")
LONGEST = 10240
"""Tokens of a sequence. With more, parts of a context are too long to be shared out evenly."""


class StepsInOneKernel:
    """Computes the steps of a model for which there is such a kernel."""

    def __init__(self, model: CausalModel, weights: Callable[[], StepWeights]) -> None:
        """``weights`` returns them where they lie; it is called when the first step is due."""
        self._model = model
        self._weights = weights
        self._kernel: WholeStep | None = None
        self._prepared_on: KVBlockManager | None = None

    def logits(self, token_ids: Tensor, attention: AttentionBackend) -> Tensor | None:
        """Compute the products of the head, or return None where other kernels must do."""
        model = self._model
        row = attention.lone_row() if model.whole_steps and not model.ranks else None
        if row is None or len(row.tables) > 1:
            return None
        if self._prepared_on is not attention.kv:
            self._prepare(attention)
        if self._kernel is None:
            return None
        attention.path_counts[EnginePath.WHOLE_STEP] += 1
        return self._kernel.logits(token_ids, row.lengths, row.tables[0])

    def _prepare(self, attention: AttentionBackend) -> None:
        """Have the kernel, unless its bits would differ where they must not."""
        kernel = self._made(attention.kv)
        must_agree = kernel is not None and self._model.batch_invariant
        if must_agree and not self._gives_same_bits(attention):
            kernel = None
            _LOG.info("steps of one sequence run in several kernels: one gives other bits here")
        self._prepared_on, self._kernel = attention.kv, kernel

    def _gives_same_bits(self, attention: AttentionBackend) -> bool:
        trial = WholeStepTrial(self._model, attention)
        self._prepared_on, self._kernel = trial.kv, None
        in_several = trial.computed()
        self._kernel = self._made(trial.kv)
        in_one = trial.computed()
        return all(torch.equal(*pair) for pair in zip(in_one, in_several, strict=True))

    def _made(self, kv: KVBlockManager) -> WholeStep | None:
        model, shape = self._model, self._model.shape
        caches = [kv.caches(layer) for layer in range(shape.num_layers)]
        return prepared(self._weights(), shape.head_dim, shape.max_length, caches, model.traits)
