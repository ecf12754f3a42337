"""What SGLang's scheduler does to its cache, and has: pools, requests, room for a batch of them."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from pytest_roseinfer.adapters.cache import CacheFull

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_roseinfer.adapters.cache import CacheSpec


def pools(sgl: SimpleNamespace, spec: CacheSpec) -> tuple[Any, Any]:
    """Build what hands out slots for tokens, and what remembers them for requests."""
    page, size = spec.block_size, spec.block_size * spec.num_blocks
    pool = {"dtype": None, "kvcache": None, "need_sort": False, "device": spec.device}
    if page == 1:
        allocator = sgl.TokenToKVPoolAllocator(size, **pool)
    else:
        allocator = sgl.PagedTokenToKVPoolAllocator(size, page, **pool)
    return allocator, sgl.ReqToTokenPool(128, size + page, spec.device, enable_memory_saver=False)


def sliding_pools(sgl: SimpleNamespace, spec: CacheSpec) -> tuple[Any, Any]:
    """Build the same for layers of both kinds; a map leads from a slot to that of the windows."""
    size = spec.block_size * spec.num_blocks
    # Of the pool that holds keys and values it is the map that is needed.
    tensors = mock.MagicMock(spec=sgl.BaseSWAKVPool, swa_req_ring_size=None)
    pool = {"dtype": None, "need_sort": False, "device": spec.device, "kvcache": tensors}
    allocator = sgl.SWATokenToKVPoolAllocator(size, size, spec.block_size, **pool)
    tensors.full_to_swa_index_mapping = allocator.full_to_swa_index_mapping
    tensors.translate_loc_from_full_to_swa = tensors.full_to_swa_index_mapping.__getitem__
    return allocator, pools(sgl, spec)[1]


def new_request(sgl: SimpleNamespace, text: Sequence[int], namespace: str | None) -> Any:
    wanted = sgl.SamplingParams(max_new_tokens=1 << 20)
    return sgl.Req("", "", array("q", text), wanted, extra_key=namespace)


def take_room(sgl: SimpleNamespace, tree: Any, begun: list[Any], grown: list[Any]) -> None:
    """Lock what is found of new requests, and allocate the rest and a token for each of others.

    That is done for all of them or none.
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
        raise CacheFull
    if begun:
        sgl.alloc_for_extend(_batch(begun, [each.extend_end for each in begun], tree))
    if grown:
        lengths = [each.kv.kv_committed_len for each in grown]
        sgl.alloc_for_decode(_batch(grown, lengths, tree), token_per_req=1)


def _batch(reqs: list[Any], lengths: list[int], tree: Any) -> SimpleNamespace:
    """Return what allocation reads of a ``ScheduleBatch``."""
    found = [request.prefix_len for request in reqs]
    rows = torch.tensor([request.kv.req_pool_idx or 0 for request in reqs])
    return SimpleNamespace(
        reqs=reqs,
        tree_cache=tree,
        req_to_token_pool=tree.req_to_token_pool,
        device=tree.req_to_token_pool.device,
        prefix_lens=found,
        extend_lens=[length - prefix for length, prefix in zip(lengths, found, strict=True)],
        extend_num_tokens=sum(lengths) - sum(found),
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
    """Take back what a request has; it starts again from its text."""
    sgl.release_req(
        req=request,
        remaing_req_count=0,
        req_to_token_pool=tree.req_to_token_pool,
        token_to_kv_pool_allocator=tree.token_to_kv_pool_allocator,
        tree_cache=tree,
        hisparse_coordinator=None,
    )
