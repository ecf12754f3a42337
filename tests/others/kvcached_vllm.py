"""Adapters of vLLM's block manager on kvcached's block pool, with the stand-in page allocator."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pytest_roseinfer.capabilities.cache_data import CacheFull, Ledger
from pytest_roseinfer.targets.block_manager import BlockStore
from pytest_roseinfer.targets.vllm_kv import (
    BlocksInUse,
    VllmAdapter,
    WindowsVllmAdapter,
    vllm_part,
)
from tests.others.kvcached_blocks import StandInPage, kvcached_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

_BLOCK_BYTES = 512 * 1024
"""Size of a block of one layer's keys or values; a page has 2 MiB."""
_enabled = mock.patch.dict(os.environ, ENABLE_KVCACHED="true")


def _patch_vllm() -> None:
    """Apply kvcached's patches of vLLM's block manager."""
    patches = kvcached_part("integration.vllm.patches")
    interfaces = kvcached_part("integration.vllm.interfaces")
    # As after init_kvcached() in a worker, which also starts a thread and needs a GPU.
    interfaces._kvcached_initialized = interfaces._is_worker = True
    for patch, module in (
        (patches.ElasticBlockPoolPatch, "block_pool"),
        (patches.KVCacheCoordinatorPatch, "kv_cache_coordinator"),
        (patches.KVCacheManagerAllocateSlotsPatch, "kv_cache_manager"),
    ):
        if not patch().apply(vllm_part(f"v1.core.{module}")):
            raise RuntimeError(f"{patch.__name__} does not apply to this release of vLLM")


class ElasticVllmAdapter(VllmAdapter):
    """Adapter with full attention, and four blocks in a page."""

    block_sizes: ClassVar[Sequence[int]] = (2, 4)
    cached_tokens: ClassVar[int] = -1
    """KVCACHED_MAX_CACHED_TOKENS; -1 for no limit."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.store = BlockStore(spec, self.pool.num_gpu_blocks)

    def manage(self, spec: CacheSpec) -> None:
        _patch_vllm()
        coordinator = vllm_part("v1.core.kv_cache_coordinator").KVCacheCoordinator
        with (
            _enabled,
            mock.patch.object(kvcached_part("utils"), "MAX_CACHED_TOKENS", self.cached_tokens),
            # vLLM 0.33.0 does not have it; kvcached then stores no prefixes.
            mock.patch.object(coordinator, "enable_caching", True, create=True),
        ):
            super().manage(spec)
        self.pool = self.manager.block_pool
        surplus = self.pool.num_gpu_blocks - 1 - spec.num_blocks
        self.hidden = {block.block_id for block in self.pool.get_new_blocks(surplus)}
        """Blocks of the last page beyond what the harness asks for."""

    def configure(self, config: Any, spec: CacheSpec) -> Any:
        """Return a configuration with large blocks in whole pages."""
        per_page = kvcached_part("utils").PAGE_SIZE // _BLOCK_BYTES
        blocks = -(-config.num_blocks // per_page) * per_page
        groups = [_large(group) for group in config.kv_cache_groups]
        return super().configure(replace(config, num_blocks=blocks, kv_cache_groups=groups), spec)

    @_enabled
    def begin(self, seq: int, token_ids: Sequence[int], namespace: int) -> int:
        return super().begin(seq, token_ids, namespace)

    @_enabled
    def extend(self, seq: int, token: int) -> None:
        super().extend(seq, token)

    def reset(self) -> None:
        """Reset the cache where no request runs, as vLLM's own pool does."""
        if any(block.ref_cnt for block in self._blocks()):
            raise BlocksInUse
        super().reset()

    def _blocks(self) -> list[Any]:
        """Return the blocks that sequences may use."""
        blocks = self.pool.kv_block_pool[1:]
        return [each for each in blocks if each.block_id not in self.hidden]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002  all layers share a pool
        books, blocks = self.pool.kv_cache_manager, self._blocks()
        mapped = books.avail_pages | books.full_pages
        free: list[int] = []
        for page in range(books.mem_size // books.page_size):
            page_blocks = StandInPage.get_block_range(page, books.page_size, _BLOCK_BYTES)
            free += mapped[page].free_blocks if page in mapped else range(*page_blocks)
        refcounts = {each.block_id: each.ref_cnt for each in blocks if each.ref_cnt}
        cached, count = set(self.pool._evictable_blocks), self.pool.get_num_free_blocks()
        return Ledger(refcounts, [*free, *cached], len(blocks), cached, num_free=count)


def _large(group: Any) -> Any:
    """Return a group of layers whose blocks have the size of a quarter of a page."""
    layer = group.kv_cache_spec
    numbers = _BLOCK_BYTES // (layer.block_size * layer.dtype.itemsize)
    large = replace(layer, num_kv_heads=1, head_size=numbers, head_size_v=numbers)
    return replace(group, layer_names=["0"], kv_cache_spec=large)


class CappedElasticAdapter(ElasticVllmAdapter):
    """With at most eight cached tokens, beyond which whole pages are evicted first."""

    prefixes = ElasticVllmAdapter.prefixes.but(evicts="any", finds="some")
    cached_tokens = 8


class WindowsElasticAdapter(ElasticVllmAdapter, WindowsVllmAdapter):
    """With windows, EAGLE, and some blocks that are not stored."""


class ResetsWhileRunning(ElasticVllmAdapter):
    """With kvcached's own reset, which succeeds while requests run."""

    reset_errors = ()
    reset = VllmAdapter.reset


class SharesTheGpu(ElasticVllmAdapter):
    """Allocates while another engine takes a page that seemed free."""

    def begin(self, seq: int, token_ids: Sequence[int], namespace: int) -> int:
        with self._contested():
            return super().begin(seq, token_ids, namespace)

    def extend(self, seq: int, token: int) -> None:
        with self._contested():
            super().extend(seq, token)

    def _contested(self) -> Any:
        return mock.patch.object(self.pool.kv_cache_manager.page_allocator, "contested", 1)


class FreesRefusedRequests(SharesTheGpu, WindowsElasticAdapter):
    """Frees a request that gets no room, with windows."""

    def _request(self, token_ids: Sequence[int], namespace: Any) -> Any:
        self.latest = super()._request(token_ids, namespace)
        return self.latest

    def begin(self, seq: int, token_ids: Sequence[int], namespace: int) -> int:
        try:
            return super().begin(seq, token_ids, namespace)
        except CacheFull:
            self.manager.free(self.requests[seq] if seq in self.preempted else self.latest)
            raise
