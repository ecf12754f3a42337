"""SGLang's radix cache with a sliding window in every other layer.

What is in windows has slots of its own, in pages that are given back as it leaves them. Books are
those of the other layers: the harness cannot follow when pages of windows come and go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter
from pytest_roseinfer.targets.block_store import BlockStore
from pytest_roseinfer.targets.others import sglang_scheduler as scheduler
from pytest_roseinfer.targets.others.sglang_radix import SglangAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.targets.block_store import KeysAndValues


class SlidingSglangAdapter(SglangAdapter):
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **SglangAdapter.option_choices,
        "window": (3, 2, 5, 9),
        "evicted": (0, 1, 3),  # tokens of windows before each write, as if room was short
    }
    pools = staticmethod(scheduler.sliding_pools)
    arena = KVCacheAdapter.arena  # not offered

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.evicted = self.sgl.EvictParams(swa_num_tokens=spec.options["evicted"])
        self.store = _WindowedStore(spec, self.allocator)

    def kind(self, spec: CacheSpec) -> dict[str, Any]:
        kinds = self.sgl.ComponentType
        return {
            "tree_components": (kinds.FULL, kinds.SWA),
            "tree_core_backend": spec.options["tree_core_backend"],
            "sliding_window_size": spec.options["window"] - 1,  # it leaves out the token itself
        }

    def _begin(self, seq: int, request: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        self.tree.evict(self.evicted)
        super()._begin(seq, request, key, value)

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.tree.evict(self.evicted)
        for request in (self.requests[seq] for seq in seqs if seq in self.requests):
            self.tree.evict_sliding_windows(request, request.kv.kv_committed_len)
        super().append(seqs, key, value)


class _WindowedStore(BlockStore):
    """Stores each token twice: what left a window is still there for whom it may concern."""

    def __init__(self, spec: CacheSpec, allocator: Any) -> None:
        super().__init__(spec, spec.num_blocks + 1)
        self.windows = BlockStore(spec, spec.num_blocks + 1)
        self.allocator = allocator
        self.seen = spec.options["window"] - 1
        """How many tokens the next one sees before itself."""

    def write_slots(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self._add_up()
        before, new = slots[: -key.shape[1]], slots[-key.shape[1] :]
        for layer in range(0, key.shape[0], 2):
            seen, stored = self.read_slots(before, layer), super().read_slots(before, layer)
            pairs = zip(seen, stored, strict=True)
            if not all(torch.allclose(*each, rtol=0, atol=0, equal_nan=True) for each in pairs):
                raise AssertionError(f"the window behind token {len(before)} holds something else")
        super().write_slots(new, key, value)
        self.windows.write_slots(self._of_windows(new), key, value)

    def read_slots(self, slots: torch.Tensor, layer: int) -> KeysAndValues:
        if layer % 2:
            return super().read_slots(slots, layer)
        gone = max(0, len(slots) - self.seen)
        old = super().read_slots(slots[:gone], layer)
        new = self.windows.read_slots(self._of_windows(slots[gone:]), layer)
        keys, values = (torch.cat(both) for both in zip(old, new, strict=True))
        return keys, values

    def _of_windows(self, slots: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.allocator.full_to_swa_index_mapping[slots]
        if not (found > 0).all():
            raise AssertionError(f"tokens in a window have the slots {found.tolist()}")
        return found

    def _add_up(self) -> None:
        """Make sure that each page of windows is either free or has a token, and none is both."""
        of_windows = self.allocator.full_to_swa_index_mapping
        pages = self.allocator.swa_attn_allocator.get_all_free_pages().tolist()
        pages += (of_windows[of_windows > 0] // self.block_size).unique().tolist()
        if sorted(pages) != [*range(1, self.arena[0].shape[1])]:
            raise AssertionError(f"of the windows' pages, {sorted(pages)} are free or mapped")
