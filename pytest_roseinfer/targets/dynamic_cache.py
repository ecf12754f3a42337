"""transformers' ``DynamicCache``, the default of ``generate``.

One cache holds a batch: a row for each sequence, all of one length. So the sequences of a
history live in as many caches as their lengths and batches ask for. Those that start
together share one; a row is forked the way beams are, by selecting it twice; and where
only some rows of a batch go on, a copy of the cache is cut down to them, as is done with
one that several prompts begin with. There are no blocks, so there is no table and no limit.

What attention was handed is one route back (``gather``), the layers themselves the other
(``peek``). With a sliding window both are only the end of a sequence, from the position on
that ``get_mask_sizes`` tells the model; what came before it stays as it was handed over.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import DynamicCache, GPT2Config

from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True, eq=False)
class Rows:
    """A cache and the sequence in each row of it."""

    cache: Any
    seqs: list[int]


class DynamicCacheAdapter(KVCacheAdapter):
    """Layers made one by one, or as a model's configuration says; rows picked either way."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        # The first is drawn most; and a sliding layer does all that a full one does.
        "layers": ("sliding_attention", "full_attention", "lazy"),
        # Not 1: docs/found.md says what happens then.
        "window": (3, 2, 5, 16),
        "select": ("batch_select_indices", "reorder_cache", "batch_repeat_interleave"),
    }

    fork_shares = "nothing"

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.home: dict[int, Rows] = {}
        self.attended: dict[int, list[_KeysAndValues]] = {}
        """What attention was handed of a sequence, by layer."""

    def new_cache(self) -> Any:
        options = self.spec.options
        if options["layers"] == "lazy":
            return DynamicCache()
        # Of a model's configuration only this is read.
        return DynamicCache(
            config=GPT2Config(
                n_layer=self.spec.num_layers,
                layer_types=[options["layers"]] * self.spec.num_layers,
                sliding_window=options["window"],
            )
        )

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many(seqs, [1] * len(seqs), key, value)

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        ends = accumulate(counts)
        columns = {
            seq: slice(end - count, end) for seq, count, end in zip(seqs, counts, ends, strict=True)
        }
        groups: dict[tuple[Rows | None, int], list[int]] = {}
        for seq, count in zip(seqs, counts, strict=True):
            groups.setdefault((self.home.get(seq), count), []).append(seq)
        for (rows, _), together in groups.items():
            batch = self._start(together) if rows is None else self._only(rows, together)
            for layer in range(self.spec.num_layers):
                states = [
                    self._as_states(tensor[layer], [columns[seq] for seq in batch.seqs])
                    for tensor in (key, value)
                ]
                _, unseen = batch.cache.get_mask_sizes(states[0].shape[-2], layer)
                self._attend(batch, layer, unseen, batch.cache.update(*states, layer))

    def _as_states(self, tokens: torch.Tensor, columns: Sequence[slice]) -> torch.Tensor:
        """``[batch, heads, tokens, head_dim]``, in the model's own dtype."""
        rows = [tokens[column].to(self.dtype).transpose(0, 1) for column in columns]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def _attend(self, batch: Rows, layer: int, unseen: int, found: Sequence[torch.Tensor]) -> None:
        """Keep what attention is handed, after what it sees no longer."""
        for row, seq in enumerate(batch.seqs):
            keys, values = (
                torch.cat([before[:unseen], cache[row].transpose(0, 1)])
                for before, cache in zip(self.attended[seq][layer], found, strict=True)
            )
            self.attended[seq][layer] = (keys, values)

    def _start(self, seqs: list[int]) -> Rows:
        rows = Rows(self.new_cache(), list(seqs))
        nothing = torch.empty(
            (0, self.spec.num_heads, self.spec.head_dim),
            dtype=self.dtype,
            device=self.spec.device,
        )
        for seq in seqs:
            self.home[seq] = rows
            self.attended[seq] = [(nothing, nothing)] * self.spec.num_layers
        return rows

    def _only(self, rows: Rows, seqs: list[int]) -> Rows:
        """A batch of just these sequences, parted from the rest of theirs if it has more."""
        if len(seqs) == len(rows.seqs):
            return rows
        parted = Rows(copy.deepcopy(rows.cache), list(rows.seqs))
        self._pick(parted, seqs)
        self._pick(rows, [seq for seq in rows.seqs if seq not in seqs])
        self.home.update(dict.fromkeys(seqs, parted))
        return parted

    def _pick(self, rows: Rows, seqs: list[int]) -> None:
        """Keep the rows of these sequences, in this order."""
        self._select(rows, [rows.seqs.index(seq) for seq in seqs])
        rows.seqs = list(seqs)

    def _select(self, rows: Rows, indices: list[int]) -> None:
        """Make these rows, some perhaps twice, the rows of a cache."""
        how = self.spec.options["select"]
        if how == "batch_repeat_interleave":
            # Two of each, and then those that are wanted.
            rows.cache.batch_repeat_interleave(2)
            indices = [2 * index + (index in indices[:at]) for at, index in enumerate(indices)]
        picked = torch.tensor(indices, device=self.spec.device)
        if how == "reorder_cache":
            rows.cache.reorder_cache(picked)
        else:
            rows.cache.batch_select_indices(picked)

    def fork(self, parent: int, child: int) -> None:
        rows = self.home[parent]
        self._select(rows, [*range(len(rows.seqs)), rows.seqs.index(parent)])
        rows.seqs.append(child)
        self.home[child] = rows
        self.attended[child] = list(self.attended[parent])

    def free(self, seq: int) -> None:
        rows = self.home.pop(seq)
        del self.attended[seq]
        rest = [other for other in rows.seqs if other != seq]
        if rest:
            self._pick(rows, rest)

    def gather(self, seq: int, layer: int) -> _KeysAndValues:
        return self.attended[seq][layer]

    def peek(self, seq: int, layer: int) -> _KeysAndValues:
        rows = self.home[seq]
        row = rows.seqs.index(seq)
        stored = rows.cache.layers[layer]
        dropped = rows.cache.get_seq_length(layer) - stored.keys.shape[-2]
        keys, values = (
            torch.cat([before[:dropped], cache[row].transpose(0, 1)])
            for before, cache in zip(
                self.attended[seq][layer], (stored.keys, stored.values), strict=True
            )
        )
        return keys, values
