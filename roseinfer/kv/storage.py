"""Tensors of the cache, staging of append indices, and execution of append plans."""

from __future__ import annotations

import functools
import warnings
from array import array
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from roseinfer.errors import BadArgument, StalePlan, TritonUnavailable
from roseinfer.kernels.runtime import unusable_reason
from roseinfer.kv import transfers
from roseinfer.kv.groups import check_dtype
from roseinfer.kv.plan import StagedIndices
from roseinfer.kv.transfers import outside_inference_mode
from roseinfer.paths import GATHER_PATHS, SCALAR_POSITION_PATHS, Condition, Path, Work

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.config import AppendPolicy
    from roseinfer.kv.plan import AppendPlan
    from roseinfer.paths import PathCounts

_NUM_RING_BUFFERS = 64
_INITIAL_CAPACITY = 256
_ALIGNMENT_MARGIN = 3
"""Extra indices that three columns may need so that each starts on 16 bytes."""
_MAX_RING_INDICES = 1 << 14
"""Most indices of one staging in the ring, which then takes 8 MiB; long prompts bypass it."""
_MAX_CACHED_VIEWS = 8 * _NUM_RING_BUFFERS
"""Most views that the ring caches; decoding needs one or two for each of its buffers."""


class KVStorage:
    """Keys and values as ``[layers, blocks, kv_heads, block_size, head_dim]``.

    Does not check blocks and positions: the manager has done so.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int], device: torch.device, dtype: torch.dtype
    ):
        check_dtype(dtype)
        try:
            with outside_inference_mode():
                self.keys = torch.zeros(shape, device=device, dtype=dtype)
                self.values = torch.zeros(shape, device=device, dtype=dtype)
        except (RuntimeError, MemoryError) as error:
            num_bytes = 2 * prod(shape) * dtype.itemsize
            raise BadArgument(
                "num_layers, max_blocks_per_layer, num_heads, block_size and head_dim of "
                f"{list(shape)} take {num_bytes / 2**30:.1f} GiB, which {device} does not have"
            ) from error
        self.device = self.keys.device
        self.dtype = dtype
        self.key_layers = list(self.keys.unbind(0))
        self.value_layers = list(self.values.unbind(0))
        # [blocks, block_size, heads, head_dim]: indexed by block and position at once.
        self._key_token_views = [layer.transpose(1, 2) for layer in self.key_layers]
        self._value_token_views = [layer.transpose(1, 2) for layer in self.value_layers]

    def to_cache_dtype(self, new: Tensor) -> Tensor:
        """Return ``new`` in the cache's dtype. Nothing else converts dtypes."""
        if new.requires_grad:
            new = new.detach()
        return new if new.dtype is self.dtype else new.to(self.dtype)

    def write_token(
        self, layer: int, block: int, position: int, key: Tensor, value: Tensor
    ) -> None:
        self._key_token_views[layer][block, position].copy_(key)
        self._value_token_views[layer][block, position].copy_(value)

    def write_scalar(
        self, layer: int, block_idx: Tensor, pos: int, key: Tensor, value: Tensor
    ) -> None:
        """Write every row to the same position of its own block."""
        self.key_layers[layer].select(2, pos).index_copy_(0, block_idx, key)
        self.value_layers[layer].select(2, pos).index_copy_(0, block_idx, value)

    def write_vector(
        self, layer: int, block_idx: Tensor, pos: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Write every row to its own position of its own block."""
        self._key_token_views[layer].index_put_((block_idx, pos), key)
        self._value_token_views[layer].index_put_((block_idx, pos), value)

    def copy_block(self, layer: int, source: int, target: int) -> None:
        self.key_layers[layer][target].copy_(self.key_layers[layer][source])
        self.value_layers[layer][target].copy_(self.value_layers[layer][source])

    def clone_blocks(self, layers: range, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks in several layers; every source is read before any target changes."""
        for layer in layers:  # one by one, so that the allocator reuses the small temporary copies
            for cache in (self.key_layers[layer], self.value_layers[layer]):
                cache.index_copy_(0, target, cache.index_select(0, source))

    def gather(self, layer: int, blocks: list[int], length: int) -> tuple[Tensor, Tensor]:
        """Read the first ``length`` tokens of consecutive blocks of one sequence.

        All blocks but the last are full; the results are ``[heads, length, head_dim]``.
        """
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        keys, values = (
            cache[layer].index_select(0, index).transpose(0, 1).flatten(1, 2)[:, :length]
            for cache in (self.key_layers, self.value_layers)
        )
        return keys, values


@dataclass(frozen=True, slots=True)
class _BufferViews:
    """Views of one ring buffer as columns of one length: to fill, copy and read."""

    host_columns: tuple[memoryview, ...]
    source: Tensor
    target: Tensor
    columns: tuple[Tensor, ...]


class IndexStaging:
    """Ring of index buffers: filled on the host, copied to the device, then reused.

    On a GPU the host side is pinned and copies are asynchronous, so a buffer must not be rewritten
    while a copy from it is in flight. One event per half of the ring guards that: it is recorded
    when the half is left and waited for when the half is entered again, which costs nothing as
    long as the device lags by less than half a ring. All copies are made on the caller's current
    stream, in the order the plans are written.
    """

    def __init__(self, device: torch.device, work_counts: Counter[str]) -> None:
        self.device = device
        self.work_counts = work_counts
        self._num_buffers = _NUM_RING_BUFFERS
        self._transfers = transfers.Transfers(device)
        self._stage_count = 0
        self._allocate(_INITIAL_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        # Plans staged earlier keep the old buffers alive through their columns.
        self._capacity = capacity
        host = self._transfers.host_buffer((self._num_buffers, capacity), torch.int64)
        device = self._transfers.device_buffer(host)
        self._host_buffers, self._device_buffers = host.unbind(0), device.unbind(0)
        self._memory = memoryview(host.numpy().data).cast("B").cast("q")
        self._views: dict[tuple[int, int, int], _BufferViews] = {}
        self._half_events = [self._transfers.event() for _ in range(2 * self._transfers.is_async)]

    def check(self, staged: StagedIndices) -> None:
        """Raise unless the columns are this ring's and still hold the staged numbers."""
        if staged.ring is not self:
            raise BadArgument("the plan was made by another cache")
        if (
            staged.stage_count is not None
            and self._stage_count - staged.stage_count >= self._num_buffers
        ):
            raise StalePlan(
                f"this plan's indices were overwritten: {self._stage_count - staged.stage_count} "
                f"plans were made after it and at most {self._num_buffers - 1} may be; write a "
                "plan before making many more"
            )

    def stage(self, columns: Sequence[Sequence[int]]) -> StagedIndices:
        """Upload columns of equal length with a single copy."""
        length = len(columns[0])
        size = length * len(columns)
        self.work_counts[Work.STAGED_INDICES] += size
        if size > _MAX_RING_INDICES:
            arrays = [array("q", column) for column in columns]  # NumPy is slow to read lists
            return StagedIndices(
                self._transfers.upload_columns(arrays, torch.int64).unbind(0), self, None
            )
        slot = self._next_buffer(size)
        views = self._views.get((slot, length, len(columns)))
        if views is None:
            views = self._make_views(slot, length, len(columns))
        for memory, column in zip(views.host_columns, columns, strict=True):
            memory[:] = array("q", column)
        if self._transfers.is_async:
            views.target.copy_(views.source, non_blocking=True)
        return StagedIndices(views.columns, self, self._stage_count)

    def _make_views(self, slot: int, length: int, columns: int) -> _BufferViews:
        pitch = length + length % 2  # columns start on 16 bytes, to suit compiled kernels
        total = pitch * columns
        begins = range(0, total, pitch)
        host, device = self._host_buffers[slot], self._device_buffers[slot]
        memory = self._memory[slot * self._capacity : (slot + 1) * self._capacity]
        if len(self._views) >= _MAX_CACHED_VIEWS:
            self._views.clear()
        views = self._views[slot, length, columns] = _BufferViews(
            tuple(memory[at : at + length] for at in begins),
            host[:total],
            device[:total],
            tuple(device[at : at + length] for at in begins),
        )
        return views

    def _next_buffer(self, size: int) -> int:
        if size + _ALIGNMENT_MARGIN > self._capacity:
            self._allocate(1 << (size + _ALIGNMENT_MARGIN - 1).bit_length())
        self._stage_count += 1
        slot = self._stage_count % self._num_buffers
        if self._transfers.is_async and slot % (self._num_buffers // 2) == 0:
            entered = slot // (self._num_buffers // 2)
            self._half_events[1 - entered].record(self._transfers.stream())
            self._half_events[entered].synchronize()  # returns at once if it was never recorded
        return slot


def choose_write_path(policy: AppendPolicy, plan: AppendPlan, *, triton: bool) -> Path:
    """Choose the fastest path that the plan and the policy allow."""
    identity = plan.rows is None and policy.identity
    num_tokens = len(plan.blocks)
    scalar = identity and plan.constant_position and policy.scalar_position
    if triton and scalar and num_tokens >= policy.full_batch_threshold:
        return Path.TRITON_FULL_BATCH
    if triton and num_tokens >= policy.triton_min_batch:
        return Path.TRITON_IDENTITY_POS if identity else Path.TRITON_GATHER
    if scalar:
        return Path.TORCH_SCALAR
    return Path.TORCH_VECTOR if identity else Path.TORCH_GATHER


class AppendExecutor:
    """Writer of append plans to storage, which counts the paths taken."""

    def __init__(
        self,
        storage: KVStorage,
        layers_per_group: int,
        policy: AppendPolicy,
        path_counts: PathCounts,
        work_counts: Counter[str],
    ) -> None:
        self._storage = storage
        self._layers_per_group = layers_per_group
        self._counts = path_counts
        self._staging = IndexStaging(storage.device, work_counts)
        self._kernels: dict[Path, Callable[..., None]] = {}
        self.on_block_copies: Callable[[AppendPlan], None] | None = None
        """Callback for plans with block copies, just before these are made; None for none."""
        self.set_policy(policy)

    def set_policy(self, policy: AppendPolicy) -> None:
        """Apply ``policy`` from the next plan on."""
        self.policy = policy
        if not policy.triton or self._kernels:
            return
        if reason := unusable_reason(self._storage.device):
            _warn_once(reason)
            return
        from roseinfer.kernels.triton import append, clone

        self._kernels = {
            Path.TRITON_FULL_BATCH: append.launch_full_batch,
            Path.TRITON_IDENTITY_POS: append.launch_identity_pos,
            Path.TRITON_GATHER: append.launch_gather,
            Path.CLONE_TRITON: clone.launch_clone,
        }

    def prepare(self, plan: AppendPlan) -> None:
        """Copy shared blocks and stage the indices, before any layer is written."""
        self.copy_shared_blocks(plan)
        if not plan.blocks:
            return
        plan.path = choose_write_path(self.policy, plan, triton=self.policy.triton)
        if self.policy.triton and not self._kernels and plan.path.needs_triton:
            self._counts[Condition.TRITON_UNAVAILABLE] += 1
            plan.path = choose_write_path(self.policy, plan, triton=False)
        columns = [plan.blocks]
        if plan.path not in SCALAR_POSITION_PATHS:
            columns.append(plan.positions)
        if plan.path in GATHER_PATHS:
            columns.append(plan.rows if plan.rows is not None else list(range(len(plan.blocks))))
        plan.staged_indices = self._staging.stage(columns)

    def write(self, plan: AppendPlan, layer: int, key: Tensor, value: Tensor) -> None:
        """Write one layer of a plan that ``prepare`` was called with."""
        if plan.staged_indices is None:
            return
        self._staging.check(plan.staged_indices)
        storage, path, columns = self._storage, plan.path, plan.staged_indices.columns
        key, value = storage.to_cache_dtype(key), storage.to_cache_dtype(value)
        self._counts[path] += 1
        if path is Path.TORCH_SCALAR:
            storage.write_scalar(layer, columns[0], plan.positions[0], key, value)
        elif path is Path.TORCH_VECTOR:
            storage.write_vector(layer, columns[0], columns[1], key, value)
        elif path is Path.TORCH_GATHER:
            block_idx, pos, rows = columns
            key, value = key.index_select(0, rows), value.index_select(0, rows)
            storage.write_vector(layer, block_idx, pos, key, value)
        else:
            where = (columns[0], plan.positions[0]) if path is Path.TRITON_FULL_BATCH else columns
            k_cache, v_cache = storage.key_layers[layer], storage.value_layers[layer]
            self._kernels[path](k_cache, v_cache, key, value, *where)

    def copy_shared_blocks(self, plan: AppendPlan) -> None:
        """Make the block copies of a plan (copy-on-write)."""
        if not plan.copy_to:
            return
        if self.on_block_copies is not None:
            self.on_block_copies(plan)
        storage = self._storage
        layers = range(plan.layer, plan.layer + self._layers_per_group)
        if not self.policy.batched_copy_on_write:
            for source, target in zip(plan.copy_from, plan.copy_to, strict=True):
                for layer in layers:
                    storage.copy_block(layer, source, target)
            return
        source_idx, target_idx = self._staging.stage([plan.copy_from, plan.copy_to]).columns
        if self.policy.triton and self._kernels:
            self._counts[Path.CLONE_TRITON] += 1
            first, end = layers.start, layers.stop
            caches = storage.keys[first:end], storage.values[first:end]
            self._kernels[Path.CLONE_TRITON](*caches, *caches, source_idx, target_idx)
            return
        if self.policy.triton:
            self._counts[Condition.TRITON_UNAVAILABLE] += 1
        self._counts[Path.CLONE_TORCH] += 1
        storage.clone_blocks(layers, source_idx, target_idx)


@functools.cache
def _warn_once(reason: str) -> None:
    """Warn, once per reason and process, that torch operations replace Triton's kernels."""
    warnings.warn(
        f"Triton KV append is on but cannot run: {reason}. Torch operations write instead; "
        "AppendPolicy(triton=False) silences this warning.",
        TritonUnavailable,
        stacklevel=2,
    )
