"""Adapter of transformers' ``DynamicCache``, the default of ``generate``.

One cache holds a batch: a row per sequence, all of one length. So a history's sequences live in
several caches. A row is forked as in beam search, by selecting it twice. If only some rows of a
batch go on, a copy of the cache is cut down to them. The cache has no blocks and no size limit.

It is read back in two ways: the keys and values that attention got (``gather``), and the layers
themselves (``peek``). Tokens outside of a sliding window stay as attention last got them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import DynamicCache, GPT2Config

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.truncation import TruncationTraits
from pytest_roseinfer.targets.attention_context import empty_context, prepend_unseen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec
    from pytest_roseinfer.targets.attention_context import KeysAndValues


@dataclass(slots=True, eq=False)
class BatchRows:
    """A cache of transformers with a batch, and the sequence in each of its rows."""

    cache: Any
    seqs: list[int]
    how: str
    """Method that selects rows."""
    device: str

    def update(
        self, layer: int, tokens: Sequence[KeysAndValues], dtype: torch.dtype
    ) -> tuple[int, list[KeysAndValues]]:
        """Append tokens; return the number of tokens hidden from attention, and the visible ones.

        The visible keys and values are returned for each row.
        """
        # In a model's format: its own dtype, and ``[batch, heads, tokens, head_dim]``.
        batches = (
            [each[layer].to(dtype).transpose(0, 1)[None] for each in kind]
            for kind in zip(*tokens, strict=True)
        )
        states = [batch[0] if len(batch) == 1 else torch.cat(batch) for batch in batches]
        _, unseen = self.cache.get_mask_sizes(states[0].shape[-2], layer)
        keys, values = self.cache.update(*states, layer)
        rows = range(len(self.seqs))
        return unseen, [(keys[row].transpose(0, 1), values[row].transpose(0, 1)) for row in rows]

    def visible_window(self, seq: int, layer: int) -> tuple[int, KeysAndValues]:
        """Return the number of tokens of a sequence that a layer has dropped, and the others."""
        stored, row = self.cache.layers[layer], self.seqs.index(seq)
        dropped = self.cache.get_seq_length(layer) - stored.keys.shape[-2]
        return dropped, (stored.keys[row].transpose(0, 1), stored.values[row].transpose(0, 1))

    def split_off(self, seqs: list[int]) -> BatchRows:
        """Return a batch of only these sequences; the others stay in this one."""
        batch = BatchRows(copy.deepcopy(self.cache), self.seqs, self.how, self.device)
        batch.pick(seqs)
        self.pick([seq for seq in self.seqs if seq not in seqs])
        return batch

    def pick(self, seqs: list[int]) -> None:
        """Keep the rows of these sequences, in this order."""
        self._select([self.seqs.index(seq) for seq in seqs])
        self.seqs = seqs

    def fork(self, parent: int, child: int) -> None:
        self._select([*range(len(self.seqs)), self.seqs.index(parent)])
        self.seqs.append(child)

    def reorder(self, sources: Mapping[int, int]) -> None:
        """Give each of these sequences the row of its source, in place of all rows."""
        self._select([self.seqs.index(source) for source in sources.values()])
        self.seqs = [*sources]

    def _select(self, indices: list[int]) -> None:
        """Replace the rows of the cache by these; some may be repeated."""
        how = self.how
        if how == "batch_repeat_interleave":
            # Duplicate all rows, then select.
            self.cache.batch_repeat_interleave(2)
            indices = [2 * index + (index in indices[:at]) for at, index in enumerate(indices)]
            how = "batch_select_indices"
        getattr(self.cache, how)(torch.tensor(indices, device=self.device))


class DynamicCacheAdapter(KVCacheAdapter):
    """Adapter with lazy layers or those of a model's config, and all methods of row selection."""

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        # The first is drawn most; sliding layers run all the code of full ones.
        "layers": ("sliding_attention", "full_attention", "lazy"),
        "window": (3, 2, 5, 16),  # not 1: see docs/findings
        "select": ("batch_select_indices", "reorder_cache", "batch_repeat_interleave"),
    }

    fork_shares = "nothing"
    truncation = TruncationTraits(errors=(RuntimeError, ValueError))

    def make(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.home: dict[int, BatchRows] = {}
        self.attended = empty_context(spec)

    def new_cache(self) -> Any:
        options, layers = self.spec.options, self.spec.num_layers
        if options["layers"] == "lazy":
            return DynamicCache()
        # The cache reads only these fields of a model's config.
        model = {"layer_types": [options["layers"]] * layers, "sliding_window": options["window"]}
        return DynamicCache(config=GPT2Config(n_layer=layers, **model))

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.append_many([seq], [key.shape[1]], key, value)

    def append_many(
        self, seqs: Sequence[int], counts: Sequence[int], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        columns = [torch.split(kind, list(counts), dim=1) for kind in (key, value)]
        tokens = dict(zip(seqs, zip(*columns, strict=True), strict=True))
        batches: dict[tuple[BatchRows | None, int], list[int]] = {}
        for seq, count in zip(seqs, counts, strict=True):
            batches.setdefault((self.home.get(seq), count), []).append(seq)
        for (rows, _), together in batches.items():
            if rows is None:
                how = self.spec.options["select"]
                rows = BatchRows(self.new_cache(), together, how, self.spec.device)
                self.home.update(dict.fromkeys(together, rows))
            else:
                rows = self._only(rows, together)
            for layer in range(self.spec.num_layers):
                unseen, visible = rows.update(layer, [tokens[seq] for seq in rows.seqs], self.dtype)
                for seq, new in zip(rows.seqs, visible, strict=True):
                    self.attended[seq][layer] = prepend_unseen(
                        self.attended[seq][layer], unseen, new
                    )

    def _only(self, rows: BatchRows, seqs: list[int]) -> BatchRows:
        """Return a batch of only these sequences; the others keep a batch of their own."""
        if len(seqs) == len(rows.seqs):
            return rows
        batch = rows.split_off(seqs)
        self.home.update(dict.fromkeys(seqs, batch))
        return batch

    def fork(self, parent: int, child: int) -> None:
        rows = self.home[child] = self.home[parent]
        rows.fork(parent, child)
        self.attended[child] = list(self.attended[parent])

    def reorder(self, seqs: Sequence[int], sources: Sequence[int]) -> None:
        """Select the rows of each batch anew: of sequences that stay there, and of sources."""
        source_of = {seq: seq for seq in self.home} | dict(zip(seqs, sources, strict=True))
        batches: dict[BatchRows, dict[int, int]] = {}
        for seq, source in source_of.items():
            batches.setdefault(self.home[source], {})[seq] = source
        self.attended.update({seq: list(self.attended[source_of[seq]]) for seq in seqs})
        for rows, selected in batches.items():
            rows.reorder(selected)
            self.home.update(dict.fromkeys(selected, rows))

    @classmethod
    def can_truncate(cls, spec: CacheSpec, stored: int, length: int) -> bool:
        """Return False for a full window, which has dropped the tokens before it."""
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
            rows.pick(rest)

    def gather(self, seq: int, layer: int) -> KeysAndValues:
        return self.attended[seq][layer]

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        return prepend_unseen(self.attended[seq][layer], *self.home[seq].visible_window(seq, layer))
