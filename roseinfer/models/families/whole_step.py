"""Decode steps of one resident sequence in one kernel, for the models and caches it supports."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import ResidentBatch
from roseinfer.kernels.cuda.whole_step import prepare_megakernel
from roseinfer.kernels.kernel import compiles_only
from roseinfer.kv.manager import KVBlockManager
from roseinfer.paths import EnginePath

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.kernels.cuda.whole_step import Megakernel, MegakernelWeights
    from roseinfer.models.causal import CausalModel

# Trial that compares the megakernel with separate kernels before its first step.
#
# Both add up in one order by design, but by other instructions: `mma.sync` in place of `wgmma`, or
# of what future GPUs have. The trial runs on this GPU, with this model's weights.


_CONTEXTS = (0, 20, 129, 300)
"""Tokens before the step: none, one part of a context, and several parts."""
_TOKENS = 8
"""Random tokens per context: few sums are rounded differently when their order differs."""


class MegakernelTrial:
    """One sequence of random keys and values, in a cache of its own."""

    def __init__(self, model: CausalModel, like: AttentionBackend) -> None:
        """Attend as ``like`` does, with blocks like its cache's."""
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
    def compute_steps(self) -> list[Tensor]:
        """Return the logits of the steps, and the blocks of keys and values that they write to."""
        caches = [each for layer in range(self.kv.num_layers) for each in self.kv.caches(layer)]
        draw = torch.Generator(self.kv.device).manual_seed(0)
        for cache in caches:
            cache.normal_(generator=draw)
        shape = (len(self._contexts), _TOKENS, 1)
        tokens = torch.randint(
            self._model.shape.vocab_size, shape, generator=draw, device=self.kv.device
        )
        results = []
        for context, drawn in zip(self._contexts, tokens, strict=True):
            length = torch.full_like(drawn[0], context)
            block = self._table[0, context // self.kv.block_size]
            self._attention.prepare(ResidentBatch([self._table], length))
            for token in drawn:
                results.append(self._model.logits(token, length, None, self._attention).clone())
                results += [cache[block].clone() for cache in caches]
        return results


_LOG = logging.getLogger("roseinfer")
MAX_MEGAKERNEL_TOKENS = 10240
"""Longest sequence for the megakernel, in tokens.

With more tokens, parts of a context are too long to be distributed evenly.
"""


class MegakernelRunner:
    """Runner of the decode steps that have a megakernel."""

    def __init__(self, model: CausalModel, weights: Callable[[], MegakernelWeights]) -> None:
        """``weights`` returns views of the weights; it is called before the first step."""
        self._model = model
        self._weights = weights
        self._kernel: Megakernel | None = None
        self._prepared_cache: KVBlockManager | None = None

    def logits(self, token_ids: Tensor, attention: AttentionBackend) -> Tensor | None:
        """Compute the logits, or return None where other kernels must."""
        model = self._model
        row = (
            attention.single_row_batch()
            if model.max_megakernel_tokens and not model.ranks
            else None
        )
        if row is None or len(row.tables) > 1 or compiles_only():
            return None
        if self._prepared_cache is not attention.kv:
            self._prepare(attention)
        if self._kernel is None:
            return None
        attention.path_counts[EnginePath.MEGAKERNEL] += 1
        return self._kernel.logits(token_ids, row.lengths, row.tables[0])

    def _prepare(self, attention: AttentionBackend) -> None:
        """Build the kernel, unless its bits would differ where they must not."""
        kernel = self._build_kernel(attention.kv)
        must_agree = kernel is not None and self._model.batch_invariant
        if must_agree and not self._is_bit_identical(attention):
            kernel = None
            _LOG.info(
                "steps of one sequence run in several kernels: the megakernel has other bits here"
            )
        self._prepared_cache, self._kernel = attention.kv, kernel

    def _is_bit_identical(self, attention: AttentionBackend) -> bool:
        trial = MegakernelTrial(self._model, attention)
        self._prepared_cache, self._kernel = trial.kv, None
        in_several = trial.compute_steps()
        self._kernel = self._build_kernel(trial.kv)
        in_one = trial.compute_steps()
        return all(torch.equal(*pair) for pair in zip(in_one, in_several, strict=True))

    def _build_kernel(self, kv: KVBlockManager) -> Megakernel | None:
        model, shape = self._model, self._model.shape
        caches = [kv.caches(layer) for layer in range(shape.num_layers)]
        return prepare_megakernel(
            self._weights(), shape.head_dim, shape.max_length, caches, model.traits
        )
