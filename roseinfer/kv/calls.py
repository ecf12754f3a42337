"""Calls of ``KVBlockManager`` on one layer, and on all groups of layers at once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument, to_argument_error
from roseinfer.kv import plan as planning
from roseinfer.kv.groups import count_out_of_window
from roseinfer.kv.pool import SCRATCH
from roseinfer.kv.truncation import TruncationBatch
from roseinfer.paths import Condition, Path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.kv.groups import LayerGroup
    from roseinfer.kv.plan import AppendAnalysis, AppendPlan, UnbatchedRows
    from roseinfer.kv.pool import BlockPool, KVBlockInfo
    from roseinfer.kv.storage import AppendExecutor, KVStorage
    from roseinfer.paths import PathCounts


class PerLayerMixin:
    """Append calls for one layer; refused where several layers share a block list.

    The manager that inherits from this class defines the attributes declared here.
    """

    num_heads: int
    head_dim: int
    block_size: int
    layers_per_group: int
    has_own_lists: bool
    path_counts: PathCounts
    _storage: KVStorage
    _append_executor: AppendExecutor
    _pool: Callable[[int], BlockPool]
    _check_inputs: Callable[[Tensor, Tensor, tuple[int, ...]], None]
    plan_append: Callable[..., AppendPlan]
    _commit: Callable[..., AppendPlan]

    def append_token(
        self, layer_idx: int, block_ids: list[int], key: Tensor, value: Tensor
    ) -> None:
        """Append one token, ``[heads, head_dim]``, to one sequence's list in one layer.

        Every fast path must leave the whole cache exactly as calls of this method would.
        """
        pool = self._require_own_pool(layer_idx, "append_token")
        self._check_inputs(key, value, (self.num_heads, self.head_dim))
        if not isinstance(block_ids, list):
            raise BadArgument(f"a block list must be a list, not {block_ids!r}")
        storage = self._storage
        key, value = storage.to_cache_dtype(key), storage.to_cache_dtype(value)
        try:
            last = pool.held_block_info(block_ids[-1]) if block_ids else None
        except Exception as error:
            raise to_argument_error(
                error, "block_ids must be a list of block ids", block_ids
            ) from None
        if last is None:
            met = Condition.FRESH
            info = pool.allocate(start=0, length=0)
            block_ids.append(pool.first_id + info.block_index)
        elif last.length == self.block_size:
            shared = pool.refcounts[last.block_index] > 1
            met = Condition.ROLLOVER_SHARED if shared else Condition.ROLLOVER
            info = pool.allocate(start=last.start + last.length, length=0)
            block_ids.append(pool.first_id + info.block_index)
        elif pool.refcounts[last.block_index] > 1:
            met = Condition.COPY_ON_WRITE
            info = pool.allocate(start=last.start, length=last.length)
            storage.copy_block(layer_idx, last.block_index, info.block_index)
            pool.decref(last.block_index)
            block_ids[-1] = pool.first_id + info.block_index
        else:
            met = Condition.IN_PLACE
            info = last
        storage.write_token(layer_idx, info.block_index, info.length, key, value)
        info.length += 1
        self.path_counts[met] += 1
        self.path_counts[Path.PER_TOKEN] += 1

    def append_token_batch(
        self, layer_idx: int, block_ids_list: Sequence[list[int] | None], key: Tensor, value: Tensor
    ) -> None:
        """Append row ``i`` of ``[batch, heads, head_dim]`` to ``block_ids_list[i]``.

        A row whose list is None is padding: it writes to the scratch block only.
        """
        pool = self._require_own_pool(layer_idx, "append_token_batch")
        try:
            rows = len(block_ids_list)
        except TypeError as error:
            wanted = "block_ids_list must be a list of block lists"
            raise to_argument_error(error, wanted, block_ids_list) from None
        self._check_inputs(key, value, (rows, self.num_heads, self.head_dim))
        seen = planning.analyze_append(pool, block_ids_list, None)
        if not self._append_executor.policy.batched:
            for row, block_ids in enumerate(block_ids_list):
                if block_ids is None:
                    self.path_counts[Condition.PADDING] += 1
                    continue
                self.append_token(layer_idx, block_ids, key[row], value[row])
            return
        unbatched_rows = self._find_unbatched_rows(seen, layer_idx, key, value)
        plan = self._commit(pool, seen, None, unbatched_rows)
        self._append_executor.prepare(plan)
        self._append_executor.write(plan, layer_idx, key, value)

    def register_prefill_layer(self, layer_idx: int, key: Tensor, value: Tensor) -> list[int]:
        """Store a prompt, ``[1, heads, tokens, head_dim]``, in new blocks; return their ids."""
        self._require_own_pool(layer_idx, "register_prefill_layer")
        shape: Sequence[int] = getattr(key, "shape", ())
        num_tokens = shape[2] if len(shape) == 4 else 0
        self._check_inputs(key, value, (1, self.num_heads, num_tokens, self.head_dim))
        block_ids: list[int] = []
        if num_tokens:
            plan = self.plan_append(layer_idx, [block_ids], [num_tokens])
            self._append_executor.write(
                plan, layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1)
            )
        return block_ids

    def _require_own_pool(self, layer_idx: int, call: str) -> BlockPool:
        if not self.has_own_lists:
            raise BadArgument(
                f"{call}: appends to one layer, but {self.layers_per_group} layers share a block "
                "list (layers_per_group, windows); use plan_append and write"
            )
        return self._pool(layer_idx)

    def _find_unbatched_rows(
        self, seen: AppendAnalysis, layer_idx: int, key: Tensor, value: Tensor
    ) -> UnbatchedRows | None:
        """Return the rows that the policy appends by ``append_token``; None for no such row."""
        policy = self._append_executor.policy
        if policy.batched_rollover and policy.batched_copy_on_write:
            return None
        unbatched_rows = {}
        for row, met in seen.new_block_rows.items():
            copies = met is Condition.COPY_ON_WRITE
            batched = policy.batched_copy_on_write if copies else policy.batched_rollover
            block_ids = seen.block_lists[row]
            if block_ids is not None and not batched:
                unbatched_rows[row] = partial(
                    self.append_token, layer_idx, block_ids, key[row], value[row]
                )
        return unbatched_rows


# Calls on all groups of layers at once, and freeing of blocks that left a window.


class LayerGroupMixin:
    """Calls that append to and truncate all block lists of a sequence, one per group of layers.

    The manager that inherits from this class defines the attributes declared here.
    """

    block_size: int
    one_pool: bool
    groups: Sequence[LayerGroup]
    _group_of: Sequence[int]
    _pools: Sequence[BlockPool]
    _append_executor: AppendExecutor
    _pool: Callable[[int], BlockPool]
    _check_truncation: Callable[..., list[list[KVBlockInfo]]]
    _commit: Callable[..., AppendPlan]

    def plan_groups(
        self,
        block_lists: Sequence[Sequence[list[int]]],
        num_tokens: Sequence[int] | None = None,
    ) -> list[AppendPlan]:
        """Plan an append in all groups or none; ``block_lists[i]`` are the lists of sequence i."""
        by_group = [list(lists) for lists in zip(*block_lists, strict=True)]
        pools = [self._pool(group.layers[0]) for group in self.groups]
        surveys = [
            planning.analyze_append(pool, lists, num_tokens)
            for pool, lists in zip(pools, by_group, strict=True)
        ]
        if self.one_pool:
            self._pools[0].require_free_blocks(sum(seen.blocks_needed for seen in surveys))
        plans = []
        for at, (pool, seen) in enumerate(zip(pools, surveys, strict=True)):
            plan = self._commit(pool, seen, num_tokens)
            plan.group = at
            self._append_executor.prepare(plan)
            plans.append(plan)
        return plans

    def truncate_groups(
        self, block_lists: Sequence[Sequence[list[int]]], lengths: Sequence[int]
    ) -> None:
        """Truncate sequences in all groups or none; ``block_lists[i]`` are those of sequence i."""
        firsts = [group.layers[0] for group in self.groups]
        by_group = [list(lists) for lists in zip(*block_lists, strict=True)]
        stored = [
            self._check_truncation(first, lists, lengths)
            for first, lists in zip(firsts, by_group, strict=True)
        ]
        if self.one_pool:
            by_row = [list(own) for own in zip(*stored, strict=True)]
            cuts = [TruncationBatch(self._pools[0], block_lists, by_row, lengths)]
        else:
            cuts = [
                TruncationBatch.with_row_per_list(self._pool(first), lists, own, lengths)
                for first, lists, own in zip(firsts, by_group, stored, strict=True)
            ]
        for each in cuts:
            each.require_copy_blocks()
        for plan in [plan for each in cuts for plan in each.commit()]:
            self._append_executor.copy_shared_blocks(plan)

    def tell_copies(self, listener: Callable[[AppendPlan], None]) -> None:
        """Set the callback that gets every plan with block copies just before they are made."""
        self._append_executor.on_block_copies = listener

    def carry_out(self, plan: AppendPlan) -> None:
        """Make the block copies of another cache's plan, and stage its indices for ``write``."""
        self._append_executor.prepare(plan)

    def adopt(self, layer_idx: int, block_ids: Sequence[int], stored: int) -> None:
        """Record the blocks of a list that another cache allocated, with ``stored`` tokens."""
        pool, size = self._pool(layer_idx), self.block_size
        for at in range(count_out_of_window(block_ids), len(block_ids)):
            pool.adopt(block_ids[at], at * size, min(size, stored - at * size))

    def give_back(self, layer_idx: int, block_ids: list[int], stored: int) -> list[int]:
        """Free the blocks that left the window now that ``stored`` tokens are stored.

        The scratch block replaces them in the list. Returns the ids of the freed blocks, the last
        of the list first.
        """
        pool, group = self._pool(layer_idx), self.groups[self._group_of[layer_idx]]
        at = group.first_visible_position(stored) // self.block_size - 1
        leaving = []
        while at >= 0 and block_ids[at] != SCRATCH:
            leaving.append(block_ids[at])
            at -= 1
        pool.check_decref(leaving)
        for block_id in leaving:
            pool.decref(block_id)
        block_ids[at + 1 : at + 1 + len(leaving)] = [SCRATCH] * len(leaving)
        return leaving
