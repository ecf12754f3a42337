"""Adapter of SGLang's radix cache and paged allocator, driven as by its scheduler.

A prompt enters the tree once it is stored, and the request's output when the request ends.
"""

from __future__ import annotations

from array import array
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
from transformers.utils import is_torchvision_available

from pytest_roseinfer.adapters.cache import KVCacheAdapter
from pytest_roseinfer.capabilities.cache_data import CacheFull, CacheSpec, Ledger
from pytest_roseinfer.capabilities.payload import same_bits
from pytest_roseinfer.capabilities.prefixes import PrefixTraits
from pytest_roseinfer.targets.block_manager import BlockStore
from pytest_roseinfer.targets.partial_import import import_part, stub_package

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.targets.block_manager import KeysAndValues

# Imports of SGLang, without a GPU and without its kernels.


_INSTALL = "unpack its wheel, and those it imports, into a folder of PYTHONPATH"
_USED = {
    "managers.schedule_batch": (
        "FINISH_LENGTH",
        "Req",
        "SamplingParams",
        "ScheduleBatch",
        "release_req",
    ),
    "mem_cache.allocation": ("alloc_for_decode", "alloc_for_extend"),
    "mem_cache.allocator": ("PagedTokenToKVPoolAllocator", "TokenToKVPoolAllocator"),
    "mem_cache.allocator.swa": ("SWATokenToKVPoolAllocator",),
    "mem_cache.base_prefix_cache": ("EvictParams", "InitLoadBackParams", "MatchPrefixParams"),
    "mem_cache.base_swa_memory_pool": ("BaseSWAKVPool",),
    "mem_cache.cache_init_params": ("CacheInitParams",),
    "mem_cache.common": ("checkpoint_kv_cache", "evict_from_tree_cache", "release_kv_cache"),
    "mem_cache.memory_pool": ("HybridReqToTokenPool", "ReqToTokenPool"),
    "mem_cache.unified_radix_cache": ("ComponentType", "RadixKey", "UnifiedRadixCache"),
    "runtime_context": ("get_context",),
}


def sglang() -> SimpleNamespace:
    """Import SGLang's parts, and install a configuration, as each of its processes does."""
    is_torchvision_available()  # so that transformers caches the result
    images = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    with stub_package(*images):
        parts = {
            import_part("sglang", f"srt.{name}", _INSTALL): used for name, used in _USED.items()
        }
    names_used = {name: getattr(module, name) for module, names in parts.items() for name in names}
    context = names_used["get_context"]()
    if context._server_args is None:  # reading it would raise an error otherwise
        context.override_server_args().install()
    return SimpleNamespace(**names_used)


# Parts of SGLang's scheduler: pools, requests, and allocation for a batch.


def pools(sgl: SimpleNamespace, spec: CacheSpec) -> tuple[Any, Any]:
    """Build the allocator of token slots, and the pool of requests' slots."""
    page, size = spec.block_size, spec.block_size * spec.num_blocks
    pool = {"dtype": None, "kvcache": None, "need_sort": False, "device": spec.device}
    if page == 1:
        allocator = sgl.TokenToKVPoolAllocator(size, **pool)
    else:
        allocator = sgl.PagedTokenToKVPoolAllocator(size, page, **pool)
    return allocator, sgl.ReqToTokenPool(256, size + page, spec.device, enable_memory_saver=False)


def sliding_pools(sgl: SimpleNamespace, spec: CacheSpec) -> tuple[Any, Any]:
    """Build the same for full and windowed layers; a map leads from a slot to its window slot."""
    size = spec.block_size * spec.num_blocks
    # Only the map of the pool of keys and values is used.
    tensors = mock.MagicMock(spec=sgl.BaseSWAKVPool, swa_req_ring_size=None)
    pool = {"dtype": None, "need_sort": False, "device": spec.device, "kvcache": tensors}
    allocator = sgl.SWATokenToKVPoolAllocator(size, size, spec.block_size, **pool)
    tensors.full_to_swa_index_mapping = allocator.full_to_swa_index_mapping
    tensors.translate_loc_from_full_to_swa = tensors.full_to_swa_index_mapping.__getitem__
    return allocator, pools(sgl, spec)[1]


def hybrid_pools(sgl: SimpleNamespace, spec: CacheSpec) -> tuple[Any, Any]:
    """Build the same, with a pool of states of recurrent layers and of their convolutions."""
    shapes = SimpleNamespace(conv=[(1, 2)], temporal=(spec.num_heads, spec.head_dim))
    dtype = getattr(torch, spec.dtype)
    dtypes = SimpleNamespace(conv=torch.int64, temporal=dtype)
    rows = sgl.HybridReqToTokenPool(
        size=256,
        mamba_size=spec.options["states"],
        mamba_spec_state_size=0,
        max_context_len=spec.block_size * spec.num_blocks + spec.block_size,
        device=spec.device,
        enable_memory_saver=False,
        cache_params=SimpleNamespace(shape=shapes, dtype=dtypes, is_kda=False),
        mamba_layer_ids=[*range(spec.num_layers)],
        enable_mamba_extra_buffer=False,
    )
    return pools(sgl, spec)[0], rows


def new_request(
    sgl: SimpleNamespace, text: Sequence[int], namespace: str | None, lora_id: str | None = None
) -> Any:
    params = sgl.SamplingParams(max_new_tokens=1 << 20)
    return sgl.Req("", "", array("q", text), params, extra_key=namespace, lora_id=lora_id)


def take_room(sgl: SimpleNamespace, tree: Any, begun: list[Any], grown: list[Any]) -> None:
    """Lock cached prefixes of new requests, allocate the rest, and a token for running requests.

    Allocate for all of them, or raise ``CacheFull`` and allocate for none.
    """
    pages = sum(not request.kv.kv_committed_len % tree.page_size for request in grown)
    for request in begun:
        request.init_next_round_input(tree)
        request.extend_end = len(request.full_untruncated_fill_ids)
        request.lock = tree.lock(request.last_node)
        pages += -(-request.extend_end // tree.page_size) - request.prefix_len // tree.page_size
    needed = pages * tree.page_size
    sgl.evict_from_tree_cache(tree, needed)
    if tree.token_to_kv_pool_allocator.available_size() < needed:
        for request in begun:
            tree.unlock(request.lock)
            release_state(tree, request)
        raise CacheFull
    if begun:
        sgl.alloc_for_extend(batch_fields(begun, [each.extend_end for each in begun], tree))
    if grown:
        lengths = [each.kv.kv_committed_len for each in grown]
        sgl.alloc_for_decode(batch_fields(grown, lengths, tree), token_per_req=1)


def release_state(tree: Any, request: Any) -> None:
    """Free the slot of a state that a request got before it was refused, as its scheduler does."""
    if request.kv.holds_mamba:
        request.kv.mamba_cow_src_index, request.kv.mamba_needs_clear = None, False
        tree.req_to_token_pool.mamba_allocator.free(request.kv.mamba_pool_idx.unsqueeze(-1))
        request.kv.mamba_pool_idx = None


def copy_found_states(sgl: SimpleNamespace, tree: Any, begun: list[Any]) -> None:
    """Copy the states that new requests begin with, and clear others, as a forward pass does."""
    batch, rows = SimpleNamespace(), tree.req_to_token_pool
    sgl.ScheduleBatch._collect_deferred_mamba_cow_and_clear(batch, begun)
    if (slots := batch.mamba_clear_indices) is not None:
        rows.mamba_pool.clear_slots(rows.translate_mamba_indices(slots))
    if (sources := batch.mamba_cow_src_indices) is not None:
        targets = rows.translate_mamba_indices(batch.mamba_cow_dst_indices)
        rows.copy_mamba_state(rows.translate_mamba_indices(sources), targets)


def batch_fields(reqs: list[Any], lengths: list[int], tree: Any) -> SimpleNamespace:
    """Return the fields of a ``ScheduleBatch`` that allocation reads."""
    prefixes = [request.prefix_len for request in reqs]
    rows = torch.tensor([request.kv.req_pool_idx or 0 for request in reqs])
    return SimpleNamespace(
        reqs=reqs,
        tree_cache=tree,
        req_to_token_pool=tree.req_to_token_pool,
        device=tree.req_to_token_pool.device,
        prefix_lens=prefixes,
        extend_lens=[length - prefix for length, prefix in zip(lengths, prefixes, strict=True)],
        extend_num_tokens=sum(lengths) - sum(prefixes),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        hisparse_coordinator=None,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        is_dllm=lambda: False,
        maybe_evict_swa=lambda: None,
    )


def slots_of(tree: Any, request: Any) -> torch.Tensor:
    """Return the slots of all tokens of a request."""
    row: torch.Tensor = tree.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
    return row[: request.kv.kv_allocated_len].long()


def retract(sgl: SimpleNamespace, tree: Any, request: Any) -> None:
    """Preempt a request; it starts again from its text."""
    sgl.release_req(
        req=request,
        remaing_req_count=0,
        req_to_token_pool=tree.req_to_token_pool,
        token_to_kv_pool_allocator=tree.token_to_kv_pool_allocator,
        tree_cache=tree,
        hisparse_coordinator=None,
    )


class StillRunning(Exception):
    """Refusal of a flush while requests run."""


class SglangAdapter(KVCacheAdapter):
    """SGLang's radix cache and its pools."""

    reset_errors = (StillRunning,)
    prefixes = PrefixTraits(shares="equal prefixes", recomputed_tokens=1, finds="some")
    option_choices: ClassVar[Mapping[str, Sequence[str]]] = {
        "tree_core_backend": ("rust", "python")
    }
    pools = staticmethod(pools)

    def make(self, spec: CacheSpec) -> None:
        sgl = self.sgl = sglang()
        self.allocator, self.rows = self.pools(sgl, spec)
        self.books = getattr(self.allocator, "full_attn_allocator", self.allocator)
        params = (False, self.rows, self.allocator, spec.block_size)
        self.tree = sgl.UnifiedRadixCache(sgl.CacheInitParams(*params, **self.kind(spec)))
        self.store = BlockStore(spec, spec.num_blocks + 1)  # block 0 is for padding
        self.requests: dict[int, Any] = {}

    def kind(self, spec: CacheSpec) -> dict[str, Any]:
        return {"tree_components": (self.sgl.ComponentType.FULL,), **spec.options}

    def use_namespaces(self, names: Sequence[int]) -> None:
        self.extra_keys = [f"of {name}" if name else None for name in names]

    def use_tokens(self, token_ids: Sequence[Sequence[int]]) -> None:
        self.row_tokens = token_ids

    def _request(self, row: int = 0) -> Any:
        return new_request(self.sgl, self.row_tokens[row], self.extra_keys[row])

    def prefill(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, self._request(), key, value)

    def resume(self, seq: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._begin(seq, self.requests[seq], key, value)

    def _begin(self, seq: int, request: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        take_room(self.sgl, self.tree, [request], [])
        self.requests[seq] = request
        self._store([seq], [slice(request.prefix_len, None)], key, value)
        self.sgl.checkpoint_kv_cache(request, self.tree)

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        new = {s: self._request(row) for row, s in enumerate(seqs) if s not in self.requests}
        grown = [self.requests[seq] for seq in seqs if seq not in new]
        take_room(self.sgl, self.tree, [*new.values()], grown)
        self.requests |= new
        self._store(seqs, [slice(row, row + 1) for row in range(len(seqs))], key, value)
        for row, seq in enumerate(seqs):
            if seq in new:
                self.sgl.checkpoint_kv_cache(new[seq], self.tree)
            else:
                self.requests[seq].output_ids.extend(self.row_tokens[row])

    def _store(
        self, seqs: Sequence[int], rows: Sequence[slice], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store the new tokens of each sequence, which are these rows of the keys and values."""
        for seq, own in zip(seqs, rows, strict=True):
            self.store.write_slots(self._slots(seq), key[:, own], value[:, own])

    def _slots(self, seq: int) -> torch.Tensor:
        return slots_of(self.tree, self.requests[seq])

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        return self.store.read_slots(self._slots(seq), layer)

    def free(self, seq: int) -> None:
        request = self.requests.pop(seq)
        request.finished_reason = self.sgl.FINISH_LENGTH(length=0)
        if request.kv.holds_kv:
            self.sgl.release_kv_cache(request, self.tree, checkpoint=True)

    def preempt(self, seq: int) -> None:
        retract(self.sgl, self.tree, self.requests[seq])

    def reset(self) -> None:
        """Flush the cache, as its scheduler does where no request runs."""
        if any(request.kv.holds_kv for request in self.requests.values()):
            raise StillRunning
        self.tree.reset()
        self.rows.clear()
        self.allocator.clear()

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        key = self.sgl.RadixKey(array("q", token_ids[:-1]), self.extra_keys[0])
        return int(self.tree.match_prefix(self.sgl.MatchPrefixParams(key)).device_prefix_len)

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  one for all
        return self.store.table(self._slots(seq))

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        refcounts: Counter[int] = Counter()
        for seq, request in self.requests.items():
            if request.kv.holds_kv:
                refcounts.update(self.store.table(self.tree.path_device_indices(request.lock.node)))
                refcounts.update(
                    self.store.table(self._slots(seq)[request.kv.cache_protected_len :])
                )
        cached_slots = self.store.table(self.tree.all_values_flatten())
        cached = [page for page in cached_slots if page not in refcounts]
        free = [*self.books.get_all_free_pages().tolist(), *cached]
        size = self.store.block_size
        num_free = (self.books.available_size() + self.tree.evictable_size()) // size
        return Ledger(refcounts, free, self.books.size // size, cached, num_free=num_free)

    def arena(self) -> KeysAndValues:
        return self.store.arena


class HybridSglangAdapter(SglangAdapter):
    """Adapter of SGLang's radix cache for a model with recurrent layers, whose states it keeps.

    The state after a prompt enters the tree, and that of a request when it ends. A prefix is found
    up to a token whose state is stored.
    """

    block_sizes = (1,)
    max_sequences = 6
    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **SglangAdapter.option_choices,
        # Slots for three states per request, as its server has at least, and a few more.
        "states": (3 * max_sequences, 3 * max_sequences + 2, 7 * max_sequences),
    }
    pools = staticmethod(hybrid_pools)

    def make(self, spec: CacheSpec) -> None:
        # Its server computes it from the config of a model.
        sglang().get_context()._server_args._mamba_cache_chunk_size = 64
        super().make(spec)
        self.states_by_slot = self.rows.mamba_pool.mamba_cache.temporal
        # In place of the states of convolutions, the number of tokens before them.
        (self.lengths,) = self.rows.mamba_pool.mamba_cache.conv
        self.states_by_slot.fill_(torch.nan)

    def kind(self, spec: CacheSpec) -> dict[str, Any]:
        kinds = self.sgl.ComponentType
        return {
            "tree_components": (kinds.FULL, kinds.MAMBA),
            "tree_core_backend": spec.options["tree_core_backend"],
        }

    def use_states(self, states: torch.Tensor) -> None:
        self.states = states

    def _store(
        self, seqs: Sequence[int], rows: Sequence[slice], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store tokens, and the states after them, which are computed from those before."""
        requests = [self.requests[seq] for seq in seqs]
        copy_found_states(self.sgl, self.tree, requests)
        super()._store(seqs, rows, key, value)
        for request, own in zip(requests, rows, strict=True):
            slot = self.rows.translate_mamba_indices(request.kv.mamba_pool_idx)
            new, length = self.states[:, own], request.kv.kv_allocated_len
            before = length - new.shape[1]
            if (lengths := self.lengths[:, slot].unique().tolist()) != [before]:
                raise AssertionError(f"{before} tokens have the states after {lengths} tokens")
            found = before if own.stop is None else 0
            if found and not same_bits(self.states_by_slot[:, slot], self.states[:, found - 1]):
                raise AssertionError(f"{found} tokens were found with another state")
            self.states_by_slot[:, slot] = new[:, -1]
            self.lengths[:, slot] = length

    def peek_state(self, seq: int) -> torch.Tensor:
        slot = self.rows.translate_mamba_indices(self.requests[seq].kv.mamba_pool_idx)
        state: torch.Tensor = self.states_by_slot[:, slot]
        return state


class SlidingSglangAdapter(SglangAdapter):
    """Adapter of SGLang's radix cache with a sliding window in every other layer.

    Tokens in windows have their own slots, in pages that are freed when they leave the window. Only
    the books of the other layers are checked: the harness does not know when window pages change.
    """

    option_choices: ClassVar[Mapping[str, Sequence[Any]]] = {
        **SglangAdapter.option_choices,
        "window": (3, 2, 5, 9),
        "evicted": (0, 1, 3),  # window tokens evicted before each write, as if room was short
    }
    pools = staticmethod(sliding_pools)
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
            "sliding_window_size": spec.options["window"] - 1,  # without the token itself
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
    """Store of each token twice, so that tokens that left a window can still be compared."""

    def __init__(self, spec: CacheSpec, allocator: Any) -> None:
        super().__init__(spec, spec.num_blocks + 1)
        self.window_store = BlockStore(spec, spec.num_blocks + 1)
        self.allocator = allocator
        self.num_visible = spec.options["window"] - 1
        """Number of previous tokens that the next token sees."""

    def write_slots(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self._add_up()
        before, new = slots[: -key.shape[1]], slots[-key.shape[1] :]
        for layer in range(0, key.shape[0], 2):
            visible, stored = self.read_slots(before, layer), super().read_slots(before, layer)
            pairs = zip(visible, stored, strict=True)
            if not all(torch.allclose(*each, rtol=0, atol=0, equal_nan=True) for each in pairs):
                raise AssertionError(f"the window before token {len(before)} has wrong contents")
        super().write_slots(new, key, value)
        self.window_store.write_slots(self._of_windows(new), key, value)

    def read_slots(self, slots: torch.Tensor, layer: int) -> KeysAndValues:
        if layer % 2:
            return super().read_slots(slots, layer)
        num_freed = max(0, len(slots) - self.num_visible)
        old = super().read_slots(slots[:num_freed], layer)
        new = self.window_store.read_slots(self._of_windows(slots[num_freed:]), layer)
        keys, values = (torch.cat(both) for both in zip(old, new, strict=True))
        return keys, values

    def _of_windows(self, slots: torch.Tensor) -> torch.Tensor:
        window_slots: torch.Tensor = self.allocator.full_to_swa_index_mapping[slots]
        if not (window_slots > 0).all():
            raise AssertionError(f"tokens in a window have the slots {window_slots.tolist()}")
        return window_slots

    def _add_up(self) -> None:
        """Check that each window page is either free or has a token, and not both."""
        of_windows = self.allocator.full_to_swa_index_mapping
        pages = self.allocator.swa_attn_allocator.get_all_free_pages().tolist()
        pages += (of_windows[of_windows > 0] // self.block_size).unique().tolist()
        if sorted(pages) != [*range(1, self.arena[0].shape[1])]:
            raise AssertionError(f"of the windows' pages, {sorted(pages)} are free or mapped")
