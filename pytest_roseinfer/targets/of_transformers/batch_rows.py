"""A cache of transformers that holds a batch, and the sequence in each of its rows."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.targets.attended import KeysAndValues


@dataclass(slots=True, eq=False)
class BatchRows:
    cache: Any
    seqs: list[int]
    how: str
    """The method that selects rows."""
    device: str

    def update(
        self, layer: int, tokens: Sequence[KeysAndValues], dtype: torch.dtype
    ) -> tuple[int, list[KeysAndValues]]:
        """Append tokens; return where what attention sees begins, and that for each row."""
        # As a model hands them over: its own dtype, and ``[batch, heads, tokens, head_dim]``.
        batches = (
            [each[layer].to(dtype).transpose(0, 1)[None] for each in kind]
            for kind in zip(*tokens, strict=True)
        )
        states = [batch[0] if len(batch) == 1 else torch.cat(batch) for batch in batches]
        _, unseen = self.cache.get_mask_sizes(states[0].shape[-2], layer)
        keys, values = self.cache.update(*states, layer)
        rows = range(len(self.seqs))
        return unseen, [(keys[row].transpose(0, 1), values[row].transpose(0, 1)) for row in rows]

    def kept(self, seq: int, layer: int) -> tuple[int, KeysAndValues]:
        """Return how many tokens of a sequence a layer has dropped, and the others."""
        stored, row = self.cache.layers[layer], self.seqs.index(seq)
        dropped = self.cache.get_seq_length(layer) - stored.keys.shape[-2]
        return dropped, (stored.keys[row].transpose(0, 1), stored.values[row].transpose(0, 1))

    def parted(self, seqs: list[int]) -> BatchRows:
        """Return a batch of just these sequences; the others stay in this one."""
        parted = BatchRows(copy.deepcopy(self.cache), self.seqs, self.how, self.device)
        parted.pick(seqs)
        self.pick([seq for seq in self.seqs if seq not in seqs])
        return parted

    def pick(self, seqs: list[int]) -> None:
        """Keep the rows of these sequences, in this order."""
        self._select([self.seqs.index(seq) for seq in seqs])
        self.seqs = seqs

    def fork(self, parent: int, child: int) -> None:
        self._select([*range(len(self.seqs)), self.seqs.index(parent)])
        self.seqs.append(child)

    def _select(self, indices: list[int]) -> None:
        """Make these rows, some perhaps twice, the rows of the cache."""
        how = self.how
        if how == "batch_repeat_interleave":
            # Two of each, and then those that are wanted.
            self.cache.batch_repeat_interleave(2)
            indices = [2 * index + (index in indices[:at]) for at, index in enumerate(indices)]
            how = "batch_select_indices"
        getattr(self.cache, how)(torch.tensor(indices, device=self.device))
