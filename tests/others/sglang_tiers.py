"""Adapter of SGLang's hierarchical cache: its radix cache, with copies of blocks in host memory.

Its own tree, allocators, controller and books of host memory are used. A stand-in for its transfer
engine holds each copy back until the harness ends it; on a GPU a stream would make it.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from pytest_roseinfer.capabilities.cache_data import CacheSpec, Ledger, Transfer
from pytest_roseinfer.capabilities.tiers import TierTraits
from pytest_roseinfer.targets.block_manager import BlockStore
from pytest_roseinfer.targets.partial_import import import_part
from pytest_roseinfer.targets.sglang_radix import (
    SglangAdapter,
    batch_fields,
    new_request,
    pools,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pytest_roseinfer.capabilities.cache_data import TransferResult
    from pytest_roseinfer.targets.block_manager import KeysAndValues


class Event:
    """An event of a device's stream, which has come unless a copy in flight records it."""

    def __init__(self, copy: Copy | None = None, **_: object) -> None:
        self.copy = copy

    def record(self) -> None:
        self.copy = None

    def query(self) -> bool:
        return self.copy is None

    def synchronize(self) -> None:
        if self.copy is not None:
            self.copy.make()


@dataclass(slots=True, eq=False)
class Copy:
    """A copy between device and host memory that was begun."""

    number: int
    kind: str
    host: torch.Tensor
    device: torch.Tensor
    engine: Copies
    events: list[Event] = field(default_factory=list)

    def move(self) -> None:
        first, lower, size = self.engine.device, self.engine.host, self.engine.device.block_size
        blocks, chunks = self.device[::size] // size, self.host[::size] // size
        for stored, kept in zip(first.arena, lower.arena, strict=True):
            if self.kind == "store":
                kept[:, chunks] = stored[:, blocks]
            else:
                stored[:, blocks] = kept[:, chunks]

    def make(self) -> None:
        if self.kind == "store":
            self.move()
        for event in self.events:
            event.record()
        self.engine.copies.remove(self)


class Copies:
    """Stand-in for ``L2TransferEngine``."""

    def __init__(self, device: BlockStore, host: BlockStore) -> None:
        self.device, self.host = device, host
        self.copies: list[Copy] = []
        self.numbers = itertools.count()

    def _begin(self, kind: str, transfers: list[Any], events: Sequence[Event]) -> Any:
        (transfer,) = transfers
        slots = transfer.host_indices.clone(), transfer.device_indices.clone()
        copy = Copy(next(self.numbers), kind, *slots, self)
        finish = Event(copy)
        copy.events = [finish, *events]
        for event in events:
            event.copy = copy
        self.copies.append(copy)
        return SimpleNamespace(start_event=Event(), finish_event=finish, timing_enabled=False)

    def submit_device_to_host(self, transfers: list[Any]) -> Any:
        return self._begin("store", transfers, ())

    def submit_host_to_device(self, transfers: list[Any], *, on_layer_done: Any, **_: Any) -> Any:
        """Copy at once, since a forward pass waits for its loads. SGLang sees the end later."""
        completion = self._begin("load", transfers, on_layer_done.__self__.load_events)
        self.copies[-1].move()
        return completion


def host_memory(size: int, page_size: int) -> Any:
    """Return SGLang's books of slots in host memory, without the memory."""
    base = import_part("sglang", "srt.mem_cache.pool_host.base", "").HostKVCache

    class HostMemory(base):  # type: ignore[misc,valid-type]
        # Not called without the memory.
        get_size_per_token = init_kv_buffer = get_data_page = get_dummy_flat_data_page = None
        load_to_device_per_layer = backup_from_device_all_layer = set_from_flat_data_page = None

    return HostMemory(
        dtype=None,
        device_capacity_tokens=size,
        size_per_token=1,
        start_layer=0,
        end_layer=1,
        host_to_device_ratio=1,
        host_size=0,
        page_size=page_size,
        layout="layer_first",
        pin_memory=False,
        device="cpu",
        host_token_capacity=size,
        is_dummy=True,
    )


class TieredSglangAdapter(SglangAdapter):
    """SGLang's radix cache with host memory for a few blocks below it."""

    HOST_BLOCKS: ClassVar[int] = 6
    tiers = TierTraits(can_fail=False)
    WRITE_POLICY: ClassVar[str] = "write_through"

    @staticmethod
    def pools(sgl: SimpleNamespace, spec: CacheSpec) -> tuple[Any, Any]:
        allocator, rows = pools(sgl, spec)
        allocator._kvcache = mock.Mock(device="cpu", layer_num=spec.num_layers)
        return allocator, rows

    def make(self, spec: CacheSpec) -> None:
        super().make(spec)
        self.spec = spec
        self.lower = BlockStore(spec, self.HOST_BLOCKS)
        self._attach(spec)

    def _attach(self, spec: CacheSpec) -> None:
        """Attach host memory to the tree, as ``init_hicache`` does on a GPU."""
        group = import_part("sglang", "srt.mem_cache.pool_host.group", "")
        names = import_part("sglang", "srt.mem_cache.hicache_storage", "").PoolName
        controllers = import_part("sglang", "srt.managers.cache_controller", "")
        hybrid = import_part("sglang", "srt.mem_cache.hybrid_cache.hybrid_cache_controller", "")
        host = host_memory(self.HOST_BLOCKS * spec.block_size, spec.block_size)
        entry = group.PoolEntry(
            names.KV, host, self.allocator.get_kvcache(), lambda layer: layer, True
        )
        tree, policy = self.tree, self.WRITE_POLICY
        self.copies = Copies(self.store, self.lower)
        with (
            mock.patch.object(controllers, "device_module", SimpleNamespace(Event=Event)),
            mock.patch.object(controllers, "L2TransferEngine", return_value=self.copies),
        ):
            tree.cache_controller = hybrid.HybridCacheController(
                self.allocator,
                group.HostPoolGroup([entry]),
                spec.block_size,
                None,
                None,
                write_policy=policy,
                io_backend="direct",
            )
        tree.host_pool_group = tree.cache_controller.mem_pool_host
        (full,) = tree.components.values()
        full._full_kv_pool_host = host
        tree.tree_core.set_hicache_enabled()
        tree.is_write_back = policy == "write_back"
        tree.write_through_threshold = 1 if policy == "write_through" else 2
        tree.load_back_threshold = 1  # it is 10 tokens otherwise

    def look_up(self, token_ids: Sequence[int]) -> object:
        return list(token_ids), self.extra_keys[0]

    def begin_with(self, prefix: Any, seq: int) -> int:
        return self._begin_with(prefix, seq, loads=False)

    def load_prefix(self, prefix: Any, seq: int) -> tuple[int, int]:
        return self._begin_with(prefix, seq, loads=True), 0

    def _begin_with(self, prefix: Any, seq: int, *, loads: bool) -> int:
        """Begin a request with what is found of its text, as its scheduler admits one."""
        tokens, extra_key = prefix
        request = new_request(self.sgl, tokens, extra_key)
        request.init_next_round_input(self.tree)
        if loads and request.needs_host_load_back():
            self._load_back(request)
        if not request.prefix_len:
            return 0
        text = tokens[: request.prefix_len]
        request.origin_input_ids, request.extend_end = array("q", text), len(text)
        request.lock = self.tree.lock(request.last_node)
        self.sgl.alloc_for_extend(batch_fields([request], [len(text)], self.tree))
        self.requests[seq] = request
        self.tree.ready_to_load_host_cache()
        return int(request.prefix_len)

    def _load_back(self, request: Any) -> None:
        """Begin to load what host memory has, as its scheduler does for one request."""
        counter = self.tree.cache_controller.layer_done_counter
        following = (counter.producer_index + 1) % counter.num_counters
        if not counter.events[following].finish_event.query():
            return
        tree, node = self.tree, request.best_match_node
        host_lock = tree.inc_host_lock_ref(node).to_dec_params()
        lock = tree.lock(node)
        params = self.sgl.InitLoadBackParams(node, request.host_hit_length, req=request)
        request.host_loaded_length, request.last_node = tree.init_load_back(params)
        tree.unlock(lock)
        tree.dec_host_lock_ref(node, host_lock)
        request.prefix_len += request.host_loaded_length
        request.kv.cache_protected_len = request.prefix_len

    def match_tiers(self, token_ids: Sequence[int]) -> int:
        key = self.sgl.RadixKey(array("q", token_ids[:-1]), self.extra_keys[0])
        found = self.tree.match_prefix(self.sgl.MatchPrefixParams(key))
        return int(found.device_prefix_len + found.host_hit_length)

    def transfers_in_flight(self) -> Sequence[Transfer]:
        """List copies that have not ended, with the blocks up to theirs, which are locked too.

        A load is listed as a store: the forward pass of its request waits for it, and so its
        blocks are in use at once.
        """
        controller, tree = self.tree.cache_controller, self.tree
        acks = [(ack, tree.ongoing_write_through) for ack in controller.ack_write_queue]
        acks += [(ack, tree.ongoing_load_back) for ack in controller.ack_load_queue]
        transfers = []
        for ack, ongoing in acks:
            if copy := ack.finish_event.copy:
                paths = [tree.path_device_indices(ongoing[node].node_id) for node in ack.node_ids]
                blocks = {block for path in paths for block in self.store.table(path)}
                transfers.append(Transfer(copy.number, "store", sorted(blocks)))
        return sorted(transfers, key=lambda transfer: transfer.id)

    def end_transfer(self, transfer: Transfer, result: TransferResult) -> None:  # noqa: ARG002
        copy = next(each for each in self.copies.copies if each.number == transfer.id)
        copy.make()
        self._poll()

    def _poll(self) -> None:
        """Begin stores, and note what has ended, as its scheduler does in each step."""
        controller = self.tree.cache_controller
        for queue in (controller.ack_write_queue, controller.ack_load_queue):
            # On a stream, those that began first end first.
            queue.sort(key=lambda ack: not ack.finish_event.query())
        self.tree.check_hicache_events()

    # Steps of its scheduler

    def _begin(self, seq: int, request: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        super()._begin(seq, request, key, value)
        self._poll()

    def append(self, seqs: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        super().append(seqs, key, value)
        self._poll()

    def free(self, seq: int) -> None:
        if seq not in self.requests:  # it began without a token
            return
        super().free(seq)
        self._poll()

    def table(self, seq: int, layer: int) -> list[int]:
        return super().table(seq, layer) if seq in self.requests else []

    def peek(self, seq: int, layer: int) -> KeysAndValues:
        if seq not in self.requests:
            empty = self.store.arena[0].new_empty(0, self.spec.num_heads, self.spec.head_dim)
            return empty, empty
        return super().peek(seq, layer)

    def ledger(self, layer: int) -> Ledger:
        books = super().ledger(layer)
        held = {block for each in self.transfers_in_flight() for block in each.blocks}
        cached = [block for block in books.cached if block not in held]
        free = [block for block in books.free if block not in held]
        refcounts = {**dict.fromkeys(held, 1), **books.refcounts}
        return replace(books, refcounts=refcounts, cached=cached, free=free)

    def reset(self) -> None:
        if not any(request.kv.holds_kv for request in self.requests.values()):
            for copy in [*self.copies.copies]:
                copy.make()
            self._poll()
        super().reset()


class SelectiveSglangAdapter(TieredSglangAdapter):
    """Adapter that stores blocks when they are found for the second time."""

    WRITE_POLICY = "write_through_selective"


class WriteBackSglangAdapter(TieredSglangAdapter):
    """Adapter that stores blocks when they are evicted, and waits for that."""

    WRITE_POLICY = "write_back"
    tiers = TieredSglangAdapter.tiers.but(stores_evicted=True)
