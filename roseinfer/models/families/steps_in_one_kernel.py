"""Steps of one resident sequence in one kernel, for the models and the caches that it is for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from roseinfer.engine_paths import EnginePath
from roseinfer.kernels.persistent.prepared import prepared
from roseinfer.models.families.whole_step_trial import WholeStepTrial

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.kernels.persistent.step_weights import StepWeights
    from roseinfer.kernels.persistent.whole_step import WholeStep
    from roseinfer.kv.manager import KVBlockManager
    from roseinfer.models.causal import CausalModel

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
