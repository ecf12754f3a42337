"""transformers' ``DynamicCache``, the default of ``generate``.

One cache holds a batch: a row for each sequence, all of one length. So a history's sequences
live in several caches. Those that start together share one. A row is forked as beams are, by
selecting it twice. Where only some rows of a batch go on, a copy of the cache is cut down to
them, as it is for several prompts with a common beginning. There are no blocks, so there is no
table and no limit.

What attention was handed is one route back (``gather``), the layers themselves the other
(``peek``). With a sliding window both hold only the end of a sequence, from the position that
``get_mask_sizes`` tells the model; what came before stays as attention was handed it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import DynamicCache, GPT2Config

from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter
from pytest_roseinfer.targets.attended import behind, nothing_attended

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.targets.attended import KeysAndValues


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
    untrimmable_errors = (RuntimeError, ValueError)
    """Of newer and of older versions of transformers."""

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.home: dict[int, Rows] = {}
        self.attended = nothing_attended(spec)

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
        columns = [torch.split(kind, list(counts), dim=1) for kind in (key, value)]
        tokens = dict(zip(seqs, zip(*columns, strict=True), strict=True))
        batches: dict[tuple[Rows | None, int], list[int]] = {}
        for seq, count in zip(seqs, counts, strict=True):
            batches.setdefault((self.home.get(seq), count), []).append(seq)
        for (rows, _), together in batches.items():
            if rows is None:
                rows = Rows(self.new_cache(), together)
                self.home.update(dict.fromkeys(together, rows))
            else:
                rows = self._only(rows, together)
            for layer in range(self.spec.num_layers):
                self._update(rows, layer, [tokens[seq] for seq in rows.seqs])

    def _update(self, rows: Rows, layer: int, tokens: Sequence[KeysAndValues]) -> None:
        # As a model hands them over: its own dtype, and ``[batch, heads, tokens, head_dim]``.
        batches = (
            [each[layer].to(self.dtype).transpose(0, 1)[None] for each in kind]
            for kind in zip(*tokens, strict=True)
        )
        states = [batch[0] if len(batch) == 1 else torch.cat(batch) for batch in batches]
        _, unseen = rows.cache.get_mask_sizes(states[0].shape[-2], layer)
        seen = rows.cache.update(*states, layer)
        for row, seq in enumerate(rows.seqs):
            new = (cache[row].transpose(0, 1) for cache in seen)
            self.attended[seq][layer] = behind(self.attended[seq][layer], unseen, new)

    def _only(self, rows: Rows, seqs: list[int]) -> Rows:
        """Return a batch of just these sequences; the others keep one of their own."""
        if len(seqs) == len(rows.seqs):
            return rows
        parted = Rows(copy.deepcopy(rows.cache), rows.seqs)
        self._pick(parted, seqs)
        self._pick(rows, [seq for seq in rows.seqs if seq not in seqs])
        self.home.update(dict.fromkeys(seqs, parted))
        return parted

    def _pick(self, rows: Rows, seqs: list[int]) -> None:
        """Keep the rows of these sequences, in this order."""
        self._select(rows, [rows.seqs.index(seq) for seq in seqs])
        rows.seqs = seqs

    def _select(self, rows: Rows, indices: list[int]) -> None:
        """Make these rows, some perhaps twice, the rows of a cache."""
        how = self.spec.options["select"]
        if how == "batch_repeat_interleave":
            # Two of each, and then those that are wanted.
            rows.cache.batch_repeat_interleave(2)
            indices = [2 * index + (index in indices[:at]) for at, index in enumerate(indices)]
            how = "batch_select_indices"
        getattr(rows.cache, how)(torch.tensor(indices, device=self.spec.device))

    def fork(self, parent: int, child: int) -> None:
        rows = self.home[parent]
        self._select(rows, [*range(len(rows.seqs)), rows.seqs.index(parent)])
        rows.seqs.append(child)
        self.home[child] = rows
        self.attended[child] = list(self.attended[parent])

    @classmethod
    def trimmable(cls, spec: CacheSpec, stored: int, length: int) -> bool:
        """A window that is full has forgotten what stood in front of it."""
        slides = spec.options["layers"] == "sliding_attention"
        return length == stored or not slides or stored < spec.options["window"]

    def truncate(self, seq: int, length: int) -> None:
        stored = self.attended[seq][0][0].shape[0]
        if length == stored:
            return
        self._only(self.home[seq], [seq]).cache.crop(length - stored)
        self.attended[seq] = [
            (keys[:length], values[:length]) for keys, values in self.attended[seq]
        ]

    def free(self, seq: int) -> None:
        rows = self.home.pop(seq)
        del self.attended[seq]
        if rest := [other for other in rows.seqs if other != seq]:
            self._pick(rows, rest)

    def gather(self, seq: int, layer: int) -> KeysAndValues:
        return self.attended[seq][layer]

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        rows = self.home[seq]
        stored, row = rows.cache.layers[layer], rows.seqs.index(seq)
        dropped = rows.cache.get_seq_length(layer) - stored.keys.shape[-2]
        kept = (cache[row].transpose(0, 1) for cache in (stored.keys, stored.values))
        return behind(self.attended[seq][layer], dropped, kept)
