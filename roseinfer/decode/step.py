"""One decode step on the device, from the slots' last tokens to their next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roseinfer.attention.backend import ResidentBatch
from roseinfer.engine_paths import EnginePath
from roseinfer.kv.lasting import lasting
from roseinfer.sampling import rows_without_a_distribution

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from roseinfer.attention.backend import AttentionBackend
    from roseinfer.decode.slots import DecodeSlots
    from roseinfer.models.causal import CausalModel


class DecodeStep:
    """Asks nothing of the host, so that it can be captured once and replayed."""

    def __init__(
        self,
        model: CausalModel,
        slots: DecodeSlots,
        attention: AttentionBackend,
        advance: Callable[..., None] | None,
        path_counts: Counter[str],
    ) -> None:
        self._model = model
        self._slots = slots
        self._attention = attention
        self._advance = advance
        self._path_counts = path_counts
        with lasting():
            self.chosen = torch.zeros_like(slots.tokens)
            """What the last step chose for each slot, -1 where there was nothing to choose."""

    @torch.inference_mode()
    def run(self, count: int, *, greedy: bool) -> None:
        """Store the token of each of the first ``count`` slots and choose the next one."""
        slots = self._slots
        for path in self._model.paths:
            self._path_counts[path] += 1
        lengths = slots.lengths(count)
        self._attention.prepare(ResidentBatch(slots.tables(count), lengths))
        logits = self._model.logits(slots.tokens[:count], lengths, None, self._attention)
        if greedy and self._advance is not None:
            self._path_counts[EnginePath.LIKELIEST] += 1
            chosen, tokens = self.chosen[:count], slots.tokens[:count]
            self._advance(logits, chosen, tokens, lengths, slots.active(count))
            return
        chosen = slots.sampling(count, greedy=greedy).choose(logits, lengths + 1)
        chosen = torch.where(rows_without_a_distribution(logits), -1, chosen)
        self.chosen[:count] = chosen
        slots.tokens[:count] = chosen.clamp(min=0)
        lengths += slots.active(count)
