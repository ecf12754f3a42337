"""Adapter of LightLLM's radix cache and token allocator, driven as by its requests.

A prompt starts with the cached prefix, a token is allocated before it is written, and a request
that ends or is paused puts its tokens into the cache, as ``InferenceContext`` does it.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch

from pytest_roseinfer.capabilities.cache_data import CacheFull, Ledger
from pytest_roseinfer.targets.block_manager import BlockManagerAdapter
from pytest_roseinfer.targets.partial_import import import_part
from tests.others.without_gpu import unpinned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

_INSTALL = "python -m tests.others.fetch lightllm, and add its folder to PYTHONPATH"
_STUBS = (
    "easydict",
    "lightllm.common.req_manager",
    "lightllm.server.core.objs",
    "lightllm.server.embed_cache.embed_cache_client",
    "lightllm.server.multimodal_params",
    "lightllm.server.pd_io_struct",
    "lightllm.server.req_id_generator",
    "lightllm.server.router.model_infer.infer_req_ext",
    "lightllm.utils.custom_kernel_utis",
    "lightllm.utils.infer_utils",
)
"""Modules and packages of which nothing is called: most import kernels."""


def _part(name: str) -> Any:
    """Import a part of LightLLM without its kernels, which need a GPU."""
    for stub in _STUBS:
        sys.modules.setdefault(stub, mock.MagicMock(name=stub))
    logging.getLogger("lightllm").setLevel(logging.CRITICAL)
    memory = "lightllm.common.kv_cache_mem_manager"
    if memory not in sys.modules:
        package: Any = ModuleType(memory)
        spec = find_spec("lightllm")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"lightllm is not installed: {_INSTALL}", name="lightllm")
        package.__path__ = [str(Path(spec.origin).parent / "common" / "kv_cache_mem_manager")]
        package.MemoryManager = object
        sys.modules[memory] = package
    return import_part("lightllm", name, _INSTALL)


_ROWS = 1000
"""Most sequences at a time."""


class _Number:
    """Number that its processes share."""

    def __init__(self, *_: object, **__: object) -> None:
        self.arr = [0]

    def set_value(self, value: int) -> None:
        self.arr[0] = value


class LightllmRadixAdapter(BlockManagerAdapter):
    """LightLLM's radix cache, whose pages have one token."""

    prefixes = BlockManagerAdapter.prefixes.but(finds="some", evicts_when="needed")
    block_sizes: ClassVar[Sequence[int]] = (1,)

    def manage(self, spec: CacheSpec) -> None:
        allocators = _part("common.kv_cache_mem_manager.allocator")
        tree, batch = (
            _part("server.router.dynamic_prompt.radix_cache"),
            _part("server.router.model_infer.infer_batch"),
        )
        with (
            unpinned("arange"),
            mock.patch.object(tree, "SharedArray", _Number),
            mock.patch.multiple(
                allocators,
                SharedInt=_Number,
                get_current_rank_in_node=lambda: 0,
                get_unique_server_name=lambda: "",
            ),
        ):
            allocator = allocators.KvCacheAllocator(spec.num_blocks)
            self.memory = SimpleNamespace(
                allocator=allocator, alloc=allocator.alloc, free=allocator.free
            )
            self.cache = tree.RadixCache("", spec.num_blocks, 0, self.memory)
        self.batch, self.context = batch, batch.g_infer_context
        self.context.radix_cache = self.cache
        self.context.req_manager = SimpleNamespace(
            mem_manager=self.memory,
            req_to_token_indexs=torch.zeros((_ROWS, spec.num_blocks + 1), dtype=torch.int32),
        )
        self.requests: dict[int, Any] = {}
        self.rows = [*range(_ROWS)]

    def begin(self, seq: int, token_ids: Sequence[int], namespace: int) -> int:  # noqa: ARG002
        request = SimpleNamespace(
            req_idx=self.rows.pop(),
            cur_kv_len=0,
            shared_kv_node=None,
            sampling_param=SimpleNamespace(disable_prompt_cache=False),
            shm_req=SimpleNamespace(shm_prompt_ids=SimpleNamespace(arr=[*token_ids])),
        )
        texts = request.shm_req.shm_prompt_ids
        request.get_cur_total_len = lambda: len(texts.arr)
        request.get_input_token_ids = lambda: texts.arr
        self.batch.InferReq._match_radix_cache(request)
        cached: int = request.cur_kv_len
        try:
            self._allocate(request, len(token_ids) - cached)
        except CacheFull:
            self._free(request)
            raise
        self.requests[seq] = request
        return cached

    def _allocate(self, request: Any, count: int) -> None:
        if self.batch.InferenceContext.get_can_alloc_token_num(self.context) < count:
            raise CacheFull
        self.cache.free_radix_cache_to_get_enough_token(count)
        begin = request.cur_kv_len
        row = self.context.req_manager.req_to_token_indexs[request.req_idx]
        row[begin : begin + count] = self.memory.alloc(count)
        request.cur_kv_len += count

    def _free(self, request: Any) -> None:
        freed: list[torch.Tensor] = []
        # From a GPU's memory, this makes a copy.
        with mock.patch.object(torch.Tensor, "cpu", torch.Tensor.clone):
            self.batch.InferenceContext._full_att_free_req(self.context, freed, request)
        self.memory.free(torch.cat(freed))
        self.rows.append(request.req_idx)

    def extend(self, seq: int, token: int) -> None:
        request = self.requests[seq]
        self._allocate(request, 1)
        request.shm_req.shm_prompt_ids.arr.append(token)

    def release(self, seq: int) -> None:
        self._free(self.requests.pop(seq))
        self.cache.merge_unreferenced_nodes()

    def match_prefix(self, token_ids: Sequence[int]) -> int:
        if len(token_ids) < 2:
            return 0
        _, length, _ = self.cache.match_prefix(torch.tensor(token_ids[:-1]))
        return int(length)

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  one for all
        request = self.requests[seq]
        row = self.context.req_manager.req_to_token_indexs[request.req_idx]
        table: list[int] = row[: request.cur_kv_len].tolist()
        return table

    def ledger(self, layer: int) -> Ledger:
        refcounts: dict[int, int] = {}
        for seq in self.requests:
            for block in self.table(seq, layer):
                refcounts[block] = refcounts.get(block, 0) + 1
        allocator = self.memory.allocator
        free = allocator.mem_state[allocator.mark_start : allocator.mark_end].tolist()
        cached = {*self._cached()} - refcounts.keys()
        return Ledger(refcounts, [*free, *cached], allocator.size, cached)

    def _cached(self) -> Iterator[int]:
        nodes = [self.cache.root_node]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            yield from node.token_mem_index_value.tolist()
