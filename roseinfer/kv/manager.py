"""Paged KV cache, whose fast paths all leave it as ``append_token`` would."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from roseinfer.config import AppendPolicy
from roseinfer.errors import BadArgument, to_argument_error
from roseinfer.kv import plan as planning
from roseinfer.kv.groups import (
    check_policy,
    make_layer_layout,
    validate_device,
    validate_size,
)
from roseinfer.kv.pool import SCRATCH, BlockPool, KVBlockInfo, count_out_of_window
from roseinfer.kv.storage import AppendExecutor, KVStorage
from roseinfer.paths import Condition, Path, PathCounts, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from roseinfer.kv.plan import AppendAnalysis, AppendPlan, UnbatchedRows


_MAX_LAYERS = 1 << 16
"""Upper bound of ``num_layers``: the manager keeps a few numbers for each layer."""


class KVBlockManager:
    """Keys and values of many sequences in blocks of ``block_size`` tokens.

    A sequence is a plain list of block ids, owned by the caller and changed in place. Ids are
    global: ``group * max_blocks_per_layer + index``. By default every layer is a group of its own,
    so a sequence has one list per layer. With ``layers_per_group`` larger, that many consecutive
    layers share one list: ``plan_append`` decides once where tokens go and ``write`` is called once
    per layer. ``append_token`` and ``append_token_batch`` append to one layer.

    With ``windows`` (one per layer), layers of the same window share lists, up to
    ``layers_per_group`` of them, and all groups allocate blocks from one pool, whose ids are block
    indices. ``free_out_of_window`` frees the blocks of a list that have left its window.

    Block 0 of every group is never allocated. All calls of one manager belong on one CUDA stream.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        block_size: int,
        max_blocks_per_layer: int,
        device: torch.device | str,
        dtype: torch.dtype,
        policy: AppendPolicy | None = None,
        *,
        layers_per_group: int | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self.num_layers = num_layers = validate_size("num_layers", num_layers)
        if num_layers > _MAX_LAYERS:
            raise BadArgument(f"num_layers must be at most {_MAX_LAYERS}, not {num_layers}")
        self.num_heads = num_heads = validate_size("num_heads", num_heads)
        self.head_dim = head_dim = validate_size("head_dim", head_dim)
        self.block_size = block_size = validate_size("block_size", block_size)
        max_blocks_per_layer = validate_size("max_blocks_per_layer", max_blocks_per_layer)
        self.max_blocks_per_layer = max_blocks_per_layer
        if max_blocks_per_layer < 2:
            raise BadArgument(
                f"max_blocks_per_layer={max_blocks_per_layer}: at least 2 are needed, "
                "since block 0 is scratch"
            )
        self.path_counts: PathCounts = PathCounts()
        self.work_counts: Counter[str] = Counter()
        """Amount of work that the host has done, by ``Work``."""
        layout = make_layer_layout(num_layers, layers_per_group, windows)
        self.groups = layout.groups
        self.layers_per_group = layout.layers_per_group
        self.one_pool = layout.one_pool
        """True if all groups allocate from one pool."""
        self.has_own_lists = self.layers_per_group == 1 and not self.one_pool
        """True if every layer has block lists of its own."""
        self._storage_layer_of, self._group_of = layout.storage_layer_of, layout.group_of
        shape = (layout.num_storage_layers, max_blocks_per_layer, num_heads, block_size, head_dim)
        self._storage = KVStorage(shape, validate_device(device), dtype)
        self.keys, self.values = self._storage.keys, self._storage.values
        """All keys and all values, ``[layers, blocks, kv_heads, block_size, head_dim]``.

        With windows, ``layers`` are the layers of any one group.
        """
        self.device, self.dtype = self.keys.device, dtype
        self._pools = [
            BlockPool(
                layer=group * self.layers_per_group,
                first_id=group * max_blocks_per_layer,
                size=max_blocks_per_layer,
                block_size=block_size,
                frees_out_of_window=self.one_pool,
            )
            for group in range(1 if self.one_pool else len(self.groups))
        ]
        policy = AppendPolicy.from_env() if policy is None else policy
        check_policy(policy)
        self._append_executor = AppendExecutor(
            self._storage, self.layers_per_group, policy, self.path_counts, self.work_counts
        )

    @property
    def policy(self) -> AppendPolicy:
        """Optimisations that may run; may be replaced between calls."""
        return self._append_executor.policy

    @policy.setter
    def policy(self, policy: AppendPolicy) -> None:
        check_policy(policy)
        self._append_executor.set_policy(policy)

    # --------------------------------------- appending to one layer, with block lists of its own

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

    # ------------------------------------------------------- appending to groups of layers

    def plan_append(
        self,
        layer_idx: int,
        block_ids_list: Sequence[list[int] | None],
        num_tokens: Sequence[int] | None = None,
    ) -> AppendPlan:
        """Allocate blocks for new tokens in the group of ``layer_idx``, and plan their positions.

        List ``i`` gets one token, or ``num_tokens[i]``; None instead of a list is a padding row,
        whose token goes to the scratch block. Once this returns, the lists count the tokens as
        stored and shared blocks have been copied; one ``write`` per layer remains to be called.
        """
        pool = self._pool(layer_idx)
        plan = self._commit(
            pool, planning.analyze_append(pool, block_ids_list, num_tokens), num_tokens
        )
        plan.group = self._group_of[layer_idx]
        self._append_executor.prepare(plan)
        return plan

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

    def reserve(
        self, layer_idx: int, block_ids_list: Sequence[list[int]], num_tokens: Sequence[int]
    ) -> None:
        """Allocate blocks as ``plan_append`` does, for a writer that needs no plan.

        The lists count the tokens as stored. ``truncate`` undoes this for tokens not written.
        """
        pool = self._pool(layer_idx)
        seen = planning.analyze_append(pool, block_ids_list, num_tokens)
        self._append_executor.copy_shared_blocks(self._commit(pool, seen, num_tokens))

    def write(self, plan: AppendPlan, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Write one layer's ``[tokens, heads, head_dim]`` to the positions of ``plan``.

        Tokens are in the order of the plan's lists.
        """
        self._pool(layer_idx)
        try:
            planned = plan.group
        except AttributeError as error:
            wanted = "plan must be a return value of plan_append"
            raise to_argument_error(error, wanted, plan) from None
        if planned != self._group_of[layer_idx]:
            layers = ", ".join(map(str, self.groups[planned].layers))
            raise BadArgument(
                f"the plan is for layers {layers}; layer {layer_idx} has other block lists"
            )
        self._check_inputs(key, value, (plan.num_inputs, self.num_heads, self.head_dim))
        self._append_executor.write(plan, self._storage_layer_of[layer_idx], key, value)

    # ------------------------------------------------------------------- freeing blocks

    def truncate(self, layer_idx: int, block_ids: list[int], length: int) -> None:
        """Keep the first ``length`` tokens of a list; free the blocks that hold none of them.

        Where the cut falls inside a block that other lists hold, the list gets a copy of it, which
        may use a block that this call freed.
        """
        self.truncate_batch(layer_idx, [block_ids], [length])

    def truncate_batch(
        self, layer_idx: int, block_ids_list: Sequence[list[int]], lengths: Sequence[int]
    ) -> None:
        """Truncate list ``i`` to ``lengths[i]`` tokens, in order; all lists or none."""
        pool = self._pool(layer_idx)
        try:
            stored = self._check_truncation(layer_idx, block_ids_list, lengths)
            cuts = planning.TruncationBatch.with_row_per_list(pool, block_ids_list, stored, lengths)
            cuts.require_copy_blocks()
        except Exception as error:
            wanted = "block_ids must be a list of block ids, and length a whole number, for each"
            raise to_argument_error(error, wanted, block_ids_list, lengths) from None
        for plan in cuts.commit():
            self._append_executor.copy_shared_blocks(plan)

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
            cuts = [planning.TruncationBatch(self._pools[0], block_lists, by_row, lengths)]
        else:
            cuts = [
                planning.TruncationBatch.with_row_per_list(self._pool(first), lists, own, lengths)
                for first, lists, own in zip(firsts, by_group, stored, strict=True)
            ]
        for each in cuts:
            each.require_copy_blocks()
        for plan in [plan for each in cuts for plan in each.commit()]:
            self._append_executor.copy_shared_blocks(plan)

    def free_out_of_window(self, layer_idx: int, block_ids: list[int], stored: int) -> list[int]:
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

    def incref_blocks(self, block_ids: Sequence[int]) -> None:
        """Increment the refcount of every block, so that another sequence may use the list too."""
        held = []
        try:
            for block_id in block_ids:
                pool = self._pool_of(block_id)
                held.append((pool, pool.held_block_info(block_id).block_index))
        except Exception as error:
            raise to_argument_error(
                error, "block_ids must be a list of block ids", block_ids
            ) from None
        for pool, index in held:
            pool.incref(index)

    def free_blocks(self, layer_idx: int, block_ids: Sequence[int]) -> None:
        """Decrement the refcount of every block, freeing it at 0. The list is not changed."""
        pool = self._pool(layer_idx)
        try:
            block_ids = list(map(operator.index, self._blocks_in_window(layer_idx, block_ids)))
        except Exception as error:
            raise to_argument_error(
                error, "block_ids must be a list of block ids", block_ids
            ) from None
        pool.check_decref(block_ids)
        for block_id in block_ids:
            pool.decref(block_id - pool.first_id)

    # ------------------------------------------------------------------------------ reading

    def gather_sequence(
        self, layer_idx: int, block_ids: Sequence[int], total_len: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read the first ``total_len`` tokens, or all stored, as ``[heads, tokens, head_dim]``.

        Blocks that left the window are skipped, and their tokens are not counted.
        """
        pool = self._pool(layer_idx)
        try:
            infos = self._block_infos(pool, self._blocks_in_window(layer_idx, block_ids))
            stored = sum(info.length for info in infos)
            length = stored if total_len is None else operator.index(total_len)
        except Exception as error:
            wanted = "block_ids must be a list of block ids, and total_len a whole number or None"
            raise to_argument_error(error, wanted, block_ids, total_len) from None
        if not 0 <= length <= stored:
            raise BadArgument(f"total_len={length}, but {stored} tokens are stored")
        return self._storage.gather(
            self._storage_layer_of[layer_idx], [info.block_index for info in infos], length
        )

    def caches(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, ``[blocks, kv_heads, block_size, head_dim]``."""
        plane = self._storage_layer_of[layer_idx]
        return self._storage.key_layers[plane], self._storage.value_layers[plane]

    def first_id(self, layer_idx: int) -> int:
        """Return the lowest block id of a layer's pool, which is its scratch block."""
        return self._pool(layer_idx).first_id

    def group_of(self, layer_idx: int) -> int:
        """Return the index in ``groups`` of a layer's group; a sequence has one list per group."""
        return self._group_of[layer_idx]

    def num_free_blocks(self, layer_idx: int) -> int:
        return self._pool(layer_idx).num_free

    def refcount(self, block_id: int) -> int:
        """Return the number of lists that hold the block; 0 when it is free."""
        return self._pool_of(block_id).refcount(block_id)

    def block_info(self, block_id: int) -> KVBlockInfo:
        """Return a held block's live record, which changes as tokens are appended.

        A free block's record has length 0 and must not be kept.
        """
        return self._pool_of(block_id).info(block_id)

    # ------------------------------------------------ caches of the ranks of one model

    def observe_block_copies(self, observer: Callable[[AppendPlan], None]) -> None:
        """Set the callback that gets every plan with block copies just before they are made."""
        self._append_executor.on_block_copies = observer

    def apply_plan(self, plan: AppendPlan) -> None:
        """Make the block copies of another cache's plan, and stage its indices for ``write``."""
        self._append_executor.prepare(plan)

    def mirror_blocks(self, layer_idx: int, block_ids: Sequence[int], stored: int) -> None:
        """Record the blocks of a list that another cache allocated, with ``stored`` tokens."""
        pool, size = self._pool(layer_idx), self.block_size
        for at in range(count_out_of_window(block_ids), len(block_ids)):
            pool.mirror_block(block_ids[at], at * size, min(size, stored - at * size))

    # ------------------------------------------------------------------------------ private

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

    def _pool(self, layer_idx: int) -> BlockPool:
        try:
            if 0 <= layer_idx < self.num_layers:
                return self._pools[0 if self.one_pool else self._group_of[layer_idx]]
        except Exception as error:
            raise to_argument_error(error, "layer_idx must be a whole number", layer_idx) from None
        raise BadArgument(f"layer {layer_idx} of a cache with {self.num_layers} layers")

    def _check_truncation(
        self, layer_idx: int, lists: Sequence[list[int]], lengths: Sequence[int]
    ) -> list[list[KVBlockInfo]]:
        """Raise for lists that cannot be truncated; return the records of every list's blocks."""
        pool = self._pool(layer_idx)
        stored = [
            self._block_infos(pool, self._blocks_in_window(layer_idx, block_ids))
            for block_ids in lists
        ]
        group = self.groups[self._group_of[layer_idx]]
        planning.check_truncation(pool, group, lists, stored, lengths)
        return stored

    def _blocks_in_window(self, layer_idx: int, block_ids: Sequence[int]) -> Sequence[int]:
        """Return a list without the blocks that left the window."""
        if self.groups[self._group_of[layer_idx]].window is None:
            return block_ids
        return block_ids[count_out_of_window(block_ids) :]

    def _block_infos(self, pool: BlockPool, block_ids: Sequence[int]) -> list[KVBlockInfo]:
        """Return the records of a list; raise unless all blocks but the last are full."""
        infos = [pool.held_block_info(block_id) for block_id in block_ids]
        for info, block_id in zip(infos[:-1], block_ids, strict=False):
            if info.length < self.block_size:
                raise BadArgument(
                    f"block {block_id} holds {info.length} of {self.block_size} tokens and is not "
                    "the last of its list: the list is not one sequence"
                )
        return infos

    def _pool_of(self, block_id: int) -> BlockPool:
        try:
            group = block_id // self.max_blocks_per_layer
            # For an id outside every group, the nearest pool raises, with its range in the message.
            return self._pools[min(max(group, 0), len(self._pools) - 1)]
        except Exception as error:
            raise to_argument_error(error, "a block id must be a whole number", block_id) from None

    def _check_inputs(self, key: Tensor, value: Tensor, shape: tuple[int, ...]) -> None:
        try:
            floats = key.is_floating_point() and value.is_floating_point()
        except (AttributeError, TypeError) as error:
            raise to_argument_error(error, "key and value must be tensors", key, value) from None
        if key.shape != shape or value.shape != shape:
            raise BadArgument(
                f"key and value must be {list(shape)}; they are {list(key.shape)} and "
                f"{list(value.shape)}"
            )
        if not floats:
            raise BadArgument(f"key and value must be floats; they are {key.dtype}, {value.dtype}")
        if key.device != self.device or value.device != self.device:
            raise BadArgument(
                f"the cache is on {self.device}; key is on {key.device}, value on {value.device}"
            )

    def _commit(
        self,
        pool: BlockPool,
        seen: AppendAnalysis,
        counts: Sequence[int] | None,
        unbatched_rows: UnbatchedRows | None = None,
    ) -> AppendPlan:
        """Commit an append and count its rows' conditions; ``unbatched_rows`` count their own."""
        self.work_counts[Work.KV_PLANS] += 1
        met = self.path_counts
        for row, condition in seen.new_block_rows.items():
            if not unbatched_rows or row not in unbatched_rows:
                met[condition] += 1
        in_place = len(seen.positions) - len(seen.new_block_rows)
        if in_place:
            met[Condition.IN_PLACE] += in_place
        return planning.commit(pool, seen, counts, unbatched_rows)


@dataclass(slots=True)
class StepBatch:
    """New tokens of a step planned by the host, sequence by sequence.

    They are appended a layer at a time. A group is planned when its first layer is written.
    """

    kv: KVBlockManager
    block_lists: Sequence[Sequence[list[int]]]
    """``block_lists[i][g]`` is sequence ``i``'s list in layer group ``g``."""
    counts: Sequence[int]
    """New tokens of each sequence."""
    lengths: Sequence[int]
    """Tokens of each sequence, the new ones included."""
    num_decodes: int
    """Leading sequences that have one new token each."""
    plans: dict[int, AppendPlan] = field(default_factory=dict)
    """Plans by group; a group is missing until it is planned."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Append ``[tokens, kv_heads, head_dim]`` to every sequence in one layer."""
        group = self.kv.group_of(layer)
        if group not in self.plans:
            lists = [own[group] for own in self.block_lists]
            one_token_each = self.num_decodes == len(self.counts)
            if one_token_each and self.kv.has_own_lists:  # applies the whole policy
                self.kv.append_token_batch(layer, lists, key, value)
                return
            if self.kv.one_pool:
                self.plan_all()
            else:
                self.plans[group] = self.kv.plan_append(layer, lists, self.counts)
        self.kv.write(self.plans[group], layer, key, value)

    def plan_all(self) -> None:
        """Plan every group now."""
        if self.kv.one_pool:
            plans = self.kv.plan_groups(self.block_lists, self.counts)
        else:
            plans = [
                self.kv.plan_append(
                    group.layers[0], [own[at] for own in self.block_lists], self.counts
                )
                for at, group in enumerate(self.kv.groups)
            ]
        self.plans = dict(enumerate(plans))
