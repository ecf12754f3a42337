"""Adapter of kvcached's block manager on a stand-in for its page allocator.

The allocator is C++ that maps pages of a GPU's memory. The stand-in keeps the same lists of page
numbers and maps nothing.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter, deque
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_roseinfer.capabilities.cache_data import CacheFull, Ledger
from pytest_roseinfer.targets.block_manager import BlockManagerAdapter, BlockStore, RowRecorder
from pytest_roseinfer.targets.partial_import import import_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_roseinfer.capabilities.cache_data import CacheSpec

_INSTALL = "python -m tests.others.fetch kvcached, and add its folder to PYTHONPATH"
_KIB = 1024
_MOST_RESERVED = 10
"""Free pages that stay mapped."""


class StandInPage:
    """Blocks of one page; a block that crosses into the next page belongs to neither."""

    def __init__(self, page_id: int, page_size: int) -> None:
        self.page_id, self.page_size = page_id, page_size
        self.num_blocks = 0
        self.free_blocks: list[int] = []

    def init(self, block_bytes: int) -> None:
        begin, end = self.get_block_range(self.page_id, self.page_size, block_bytes)
        self.free_blocks = [*range(begin, end)]
        self.num_blocks = end - begin

    def alloc(self, count: int) -> list[int]:
        taken, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        return taken

    def free_batch(self, blocks: Sequence[int]) -> None:
        self.free_blocks += blocks

    def empty(self) -> bool:
        return len(self.free_blocks) == self.num_blocks

    def full(self) -> bool:
        return not self.free_blocks

    def num_free_blocks(self) -> int:
        return len(self.free_blocks)

    @staticmethod
    def get_block_range(page_id: int, page_size: int, block_bytes: int) -> tuple[int, int]:
        return -(-page_id * page_size // block_bytes), (page_id + 1) * page_size // block_bytes

    @staticmethod
    def get_num_blocks(page_size: int, block_bytes: int) -> int:
        return page_size // block_bytes


class StandInAllocator:
    """Page numbers that are free and unmapped, or free and mapped."""

    def __init__(
        self, num_layers: int, mem_size: int, page_size: int, world_size: int, **_: Any
    ) -> None:
        del num_layers, world_size
        self.page_size = page_size
        self.unmapped = deque(range(mem_size // page_size))
        self.reserved: deque[int] = deque()
        self.contested = 0
        """Pages that seem free until one is needed: another engine on the GPU takes them first."""

    def alloc_page(self) -> StandInPage:
        for pages in (self.reserved, self.unmapped):
            if pages:
                return StandInPage(pages.popleft(), self.page_size)
        self.contested = 0
        raise RuntimeError("No free pages left")

    def free_pages(self, pages: Sequence[int]) -> None:
        kept = max(0, _MOST_RESERVED - len(self.reserved))
        self.reserved.extend(pages[:kept])
        self.unmapped.extend(pages[kept:])

    def group_indices_by_page(
        self, blocks: Sequence[int], block_bytes: int
    ) -> Mapping[int, list[int]]:
        grouped: dict[int, list[int]] = {}
        for block in blocks:
            grouped.setdefault(block * block_bytes // self.page_size, []).append(block)
        return grouped

    def get_num_free_pages(self) -> int:
        return len(self.reserved) + self.get_avail_physical_pages()

    def get_num_reserved_pages(self) -> int:
        return len(self.reserved)

    def get_avail_physical_pages(self) -> int:
        return len(self.unmapped) + self.contested

    def get_resize_target(self) -> int:
        return -1

    def set_use_worker_ipc(self, value: bool) -> None:
        pass

    def start_prealloc_thread(self) -> None:
        pass


def kvcached_part(name: str) -> Any:
    """Import a part of kvcached with the stand-in for its extension."""
    extension: Any = ModuleType("kvcached.vmm_ops")
    extension.PageAllocator, extension.InternalPage = StandInAllocator, StandInPage
    extension.kv_tensors_created = lambda group_id=0: True  # noqa: ARG005
    for called_on_a_gpu in (
        *("map_to_kv_tensors", "unmap_from_kv_tensors"),
        *("create_kv_tensors", "init_kvcached", "shutdown_kvcached"),
    ):
        setattr(extension, called_on_a_gpu, None)
    sys.modules.setdefault("kvcached.vmm_ops", extension)
    logging.getLogger("kvcached").setLevel(logging.CRITICAL)
    return import_part("kvcached", name, _INSTALL)


class KvcachedAdapter(BlockManagerAdapter):
    """kvcached's block manager, with four blocks in a page of one layer's keys or values."""

    prefixes = RowRecorder.prefixes
    block_sizes: ClassVar[Sequence[int]] = (2, 4)
    block_kib: ClassVar[int] = 512
    """KiB of a block; a page has 2,048."""

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.store = BlockStore(spec, self.manager.num_blocks)

    def manage(self, spec: CacheSpec) -> None:
        managers = kvcached_part("kv_cache_manager")
        block_bytes, page_size = self.block_kib * _KIB, managers.PAGE_SIZE
        usable: list[int] = []
        pages = 0
        while len(usable) < spec.num_blocks:
            usable += range(*StandInPage.get_block_range(pages, page_size, block_bytes))
            pages += 1
        num_blocks = -(-pages * page_size // block_bytes)
        self.manager = managers.KVCacheManager(num_blocks, 1, block_bytes, spec.num_layers)
        self.usable = set(usable)
        self.hidden: list[int] = []
        """Blocks of the last page beyond what the harness asks for."""
        self.tables: dict[int, list[int]] = {}
        if surplus := len(usable) - spec.num_blocks:
            self.hidden = self._allocate(surplus)

    def _allocate(self, count: int) -> list[int]:
        blocks: list[int] | None = self.manager.alloc(count)
        if blocks is None:
            raise CacheFull
        return blocks

    def begin(self, seq: int, token_ids: Sequence[int], namespace: int) -> int:  # noqa: ARG002
        self.tables[seq] = self._allocate(-(-len(token_ids) // self.spec.block_size))
        return 0

    def extend(self, seq: int, token: int) -> None:  # noqa: ARG002
        stored, _ = self.stored_tokens[seq]
        if len(stored) % self.spec.block_size == 0:
            self.tables[seq] += self._allocate(1)

    def release(self, seq: int) -> None:
        self.manager.free(self.tables.pop(seq))

    def table(self, seq: int, layer: int) -> list[int]:  # noqa: ARG002  one for all
        return self.tables[seq]

    def ledger(self, layer: int) -> Ledger:  # noqa: ARG002
        refcounts = Counter(block for table in self.tables.values() for block in table)
        free = self.usable - refcounts.keys() - set(self.hidden)
        count = self.manager.available_size()
        return Ledger(refcounts, [*free], len(self.usable) - len(self.hidden), num_free=count)


class BlocksAcrossPages(KvcachedAdapter):
    """With blocks that cross into the next page, as those of 80 KiB and of most other sizes do."""

    block_kib = 800
