"""SGLang's radix cache over its paged allocator, driven as its scheduler drives them.

A prompt is in the tree as soon as it is stored, and what its request decodes when that ends.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.adapters.cache import CacheSpec, KVCacheAdapter, Ledger
from pytest_roseinfer.targets.block_store import BlockStore
from pytest_roseinfer.targets.others import sglang_scheduler as scheduler
from pytest_roseinfer.targets.others.sglang_parts import sglang

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pytest_roseinfer.targets.block_store import KeysAndValues


class SglangAdapter(KVCacheAdapter):
    sharing: ClassVar[str] = "equal prefixes"
    match_leaves: ClassVar[int] = 1
    match_finds: ClassVar[str] = "some"
    option_choices: ClassVar[Mapping[str, Sequence[str]]] = {
        "tree_core_backend": ("rust", "python")
    }
    pools = staticmethod(scheduler.pools)

    def make(self, spec: CacheSpec) -> None:
        sgl = self.sgl = sglang()
        self.allocator, self.rows = self.pools(sgl, spec)
        self.books = getattr(self.allocator, "full_attn_allocator", self.allocator)
        params = (False, self.rows, self.allocator, spec.block_size)
        self.tree = sgl.UnifiedRadixCache(sgl.CacheInitParams(*params, **self.kind(spec)))
        self.store = BlockStore(spec, spec.num_blocks + 1)  # the first is for padding
        self.requests: dict[int, Any] = {}

    def kind(self, spec: CacheSpec) -> dict[str, Any]:
        return {"tree_components": (self.sgl.ComponentType.FULL,), **spec.options}

    def namespaces(self, names: Sequence[int]) -> None:
        self.extra_keys = [f"of {name}" if name else None for name in names]

    def texts(self, said: Sequence[Sequence[int]]) -> None:
        self.coming = said

    def _request(self, row: int = 0) -> Any:
        return scheduler.new_request(self.sgl, self.coming[row], self.extra_keys[row])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, self._request(), key, value)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, self.requests[seq], key, value)

    def _begin(self, seq: int, request: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        scheduler.take_room(self.sgl, self.tree, [request], [])
        self.requests[seq] = request
        rest = key[:, request.prefix_len :], value[:, request.prefix_len :]
        self.store.write_slots(self._slots(seq), *rest)
        self.sgl.checkpoint_kv_cache(request, self.tree)

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        new = {s: self._request(row) for row, s in enumerate(seqs) if s not in self.requests}
        grown = [self.requests[seq] for seq in seqs if seq not in new]
        scheduler.take_room(self.sgl, self.tree, [*new.values()], grown)
        self.requests |= new
        for row, seq in enumerate(seqs):
            new_row = key[:, row : row + 1], value[:, row : row + 1]
            self.store.write_slots(self._slots(seq), *new_row)
            if seq in new:
                self.sgl.checkpoint_kv_cache(new[seq], self.tree)
            else:
                self.requests[seq].output_ids.extend(self.coming[row])

    def _slots(self, seq: int) -> torch.Tensor:
        return scheduler.slots_of(self.tree, self.requests[seq])

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        return self.store.read_slots(self._slots(seq), layer)

    def free(self, seq: int) -> None:
        request = self.requests.pop(seq)
        request.finished_reason = self.sgl.FINISH_LENGTH(length=0)
        if request.kv.holds_kv:
            self.sgl.release_kv_cache(request, self.tree, checkpoint=True)

    def preempt(self, seq: int) -> None:
        scheduler.retract(self.sgl, self.tree, self.requests[seq])

    def matched(self, said: Sequence[int]) -> int:
        key = self.sgl.RadixKey(array("q", said[:-1]), self.extra_keys[0])
        return int(self.tree.match_prefix(self.sgl.MatchPrefixParams(key)).device_prefix_len)

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  one for all
        return self.store.table(self._slots(seq))

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        held: Counter[int] = Counter()
        for seq, request in self.requests.items():
            if request.kv.holds_kv:
                held.update(self.store.table(self.tree.path_device_indices(request.lock.node)))
                held.update(self.store.table(self._slots(seq)[request.kv.cache_protected_len :]))
        kept = self.store.table(self.tree.all_values_flatten())
        cached = [page for page in kept if page not in held]
        free = [*self.books.get_all_free_pages().tolist(), *cached]
        size = self.store.block_size
        num_free = (self.books.available_size() + self.tree.evictable_size()) // size
        return Ledger(held, free, self.books.size // size, cached, num_free=num_free)

    def arena(self) -> KeysAndValues:
        return self.store.arena
