"""The calls of a cache that move one layer alone: every layer has block lists of its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument, wrong_kind
from roseinfer.kv import plan as planning
from roseinfer.kv.groups import given_back
from roseinfer.kv.pool import SCRATCH
from roseinfer.kv.truncation import Cuts
from roseinfer.paths import Condition, Path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roseinfer.kv.groups import LayerGroup
    from roseinfer.kv.plan import Apart, AppendPlan, Survey
    from roseinfer.kv.pool import BlockPool, KVBlockInfo
    from roseinfer.kv.storage import DataMover, KVStorage
    from roseinfer.paths import PathCounts


class PerLayerCalls:
    """Appends to one layer's block lists. They are refused where several layers share a list.

    The manager that inherits them has what they use.
    """

    num_heads: int
    head_dim: int
    block_size: int
    layers_per_group: int
    has_own_lists: bool
    path_counts: PathCounts
    _storage: KVStorage
    _mover: DataMover
    _pool: Callable[[int], BlockPool]
    _check_inputs: Callable[[Tensor, Tensor, tuple[int, ...]], None]
    plan_append: Callable[..., AppendPlan]
    _commit: Callable[..., AppendPlan]

    def append_token(
        self, layer_idx: int, block_ids: list[int], key: Tensor, value: Tensor
    ) -> None:
        """Append one token, ``[heads, head_dim]``, to one sequence's list in one layer.

        Every fast path must leave the whole cache as calls of this would.
        """
        pool = self._own_pool(layer_idx, "append_token")
        self._check_inputs(key, value, (self.num_heads, self.head_dim))
        if not isinstance(block_ids, list):
            raise BadArgument(f"a block list must be a list, not {block_ids!r}")
        storage = self._storage
        key, value = storage.as_stored(key), storage.as_stored(value)
        try:
            last = pool.held(block_ids[-1]) if block_ids else None
        except Exception as error:
            raise wrong_kind(error, "block_ids must be a list of block ids", block_ids) from None
        if last is None:
            met = Condition.FRESH
            info = pool.take(start=0, length=0)
            block_ids.append(pool.first_id + info.block_index)
        elif last.length == self.block_size:
            shared = pool.refcounts[last.block_index] > 1
            met = Condition.ROLLOVER_SHARED if shared else Condition.ROLLOVER
            info = pool.take(start=last.start + last.length, length=0)
            block_ids.append(pool.first_id + info.block_index)
        elif pool.refcounts[last.block_index] > 1:
            met = Condition.COPY_ON_WRITE
            info = pool.take(start=last.start, length=last.length)
            storage.copy_block(layer_idx, last.block_index, info.block_index)
            pool.drop(last.block_index)
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

        A row whose list is None is padding: it may write to the scratch block only.
        """
        pool = self._own_pool(layer_idx, "append_token_batch")
        try:
            rows = len(block_ids_list)
        except TypeError as error:
            wanted = "block_ids_list must be a list of block lists"
            raise wrong_kind(error, wanted, block_ids_list) from None
        self._check_inputs(key, value, (rows, self.num_heads, self.head_dim))
        seen = planning.survey(pool, block_ids_list, None)
        if not self._mover.policy.batched:
            for row, block_ids in enumerate(block_ids_list):
                if block_ids is None:
                    self.path_counts[Condition.PADDING] += 1
                    continue
                self.append_token(layer_idx, block_ids, key[row], value[row])
            return
        apart = self._rows_apart(seen, layer_idx, key, value)
        plan = self._commit(pool, seen, None, apart)
        self._mover.prepare(plan)
        self._mover.write(plan, layer_idx, key, value)

    def register_prefill_layer(self, layer_idx: int, key: Tensor, value: Tensor) -> list[int]:
        """Store a whole prompt, ``[1, heads, tokens, head_dim]``, in new blocks; return them."""
        self._own_pool(layer_idx, "register_prefill_layer")
        shape: Sequence[int] = getattr(key, "shape", ())
        num_tokens = shape[2] if len(shape) == 4 else 0
        self._check_inputs(key, value, (1, self.num_heads, num_tokens, self.head_dim))
        block_ids: list[int] = []
        if num_tokens:
            plan = self.plan_append(layer_idx, [block_ids], [num_tokens])
            self._mover.write(plan, layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return block_ids

    def _own_pool(self, layer_idx: int, call: str) -> BlockPool:
        if not self.has_own_lists:
            raise BadArgument(
                f"{call} moves one layer alone, and here {self.layers_per_group} layers share a "
                "block list: use plan_append and write"
            )
        return self._pool(layer_idx)

    def _rows_apart(self, seen: Survey, layer_idx: int, key: Tensor, value: Tensor) -> Apart | None:
        """Find the rows that the policy sends through ``append_token``."""
        policy = self._mover.policy
        if policy.batched_rollover and policy.batched_copy_on_write:
            return None
        apart = {}
        for row, met in seen.needs_block.items():
            copies = met is Condition.COPY_ON_WRITE
            batched = policy.batched_copy_on_write if copies else policy.batched_rollover
            block_ids = seen.block_lists[row]
            if block_ids is not None and not batched:
                apart[row] = partial(self.append_token, layer_idx, block_ids, key[row], value[row])
        return apart


# The calls of a cache that move all groups of layers at once, or give back what none sees.


class GroupCalls:
    """Appends to all of a sequence's block lists and cuts them, one list for each group of layers.

    The manager that inherits them has what they use.
    """

    block_size: int
    one_pool: bool
    groups: Sequence[LayerGroup]
    _group_of: Sequence[int]
    _pools: Sequence[BlockPool]
    _mover: DataMover
    _pool: Callable[[int], BlockPool]
    _check_cuts: Callable[..., list[list[KVBlockInfo]]]
    _commit: Callable[..., AppendPlan]

    def plan_groups(
        self,
        block_lists: Sequence[Sequence[list[int]]],
        num_tokens: Sequence[int] | None = None,
    ) -> list[AppendPlan]:
        """Plan an append in all groups, all or none; ``block_lists[i]`` are a sequence's lists."""
        by_group = [list(lists) for lists in zip(*block_lists, strict=True)]
        pools = [self._pool(group.layers[0]) for group in self.groups]
        surveys = [
            planning.survey(pool, lists, num_tokens)
            for pool, lists in zip(pools, by_group, strict=True)
        ]
        if self.one_pool:
            self._pools[0].require(sum(seen.blocks_needed for seen in surveys))
        plans = []
        for at, (pool, seen) in enumerate(zip(pools, surveys, strict=True)):
            plan = self._commit(pool, seen, num_tokens)
            plan.group = at
            self._mover.prepare(plan)
            plans.append(plan)
        return plans

    def truncate_groups(
        self, block_lists: Sequence[Sequence[list[int]]], lengths: Sequence[int]
    ) -> None:
        """Truncate sequences in all groups, all or nothing; ``block_lists[i]`` are one's lists."""
        firsts = [group.layers[0] for group in self.groups]
        by_group = [list(lists) for lists in zip(*block_lists, strict=True)]
        stored = [
            self._check_cuts(first, lists, lengths)
            for first, lists in zip(firsts, by_group, strict=True)
        ]
        if self.one_pool:
            by_row = [list(own) for own in zip(*stored, strict=True)]
            cuts = [Cuts(self._pools[0], block_lists, by_row, lengths)]
        else:
            cuts = [
                Cuts.one_by_one(self._pool(first), lists, own, lengths)
                for first, lists, own in zip(firsts, by_group, stored, strict=True)
            ]
        for each in cuts:
            each.require_room()
        for plan in [plan for each in cuts for plan in each.commit()]:
            self._mover.copy_shared(plan)

    def tell_copies(self, listener: Callable[[AppendPlan], None]) -> None:
        """Call ``listener`` with every plan whose copies are to be made, just before they are."""
        self._mover.on_copies = listener

    def carry_out(self, plan: AppendPlan) -> None:
        """Make the copies of a plan that another cache has made, and get ready to write it."""
        self._mover.prepare(plan)

    def adopt(self, layer_idx: int, block_ids: Sequence[int], stored: int) -> None:
        """Count the tokens of a list, which another cache has given out, as stored here too."""
        pool, size = self._pool(layer_idx), self.block_size
        for at in range(given_back(block_ids), len(block_ids)):
            pool.adopt(block_ids[at], at * size, min(size, stored - at * size))

    def give_back(self, layer_idx: int, block_ids: list[int], stored: int) -> list[int]:
        """Let go of the blocks that no token sees any more once ``stored`` tokens are stored.

        The scratch block takes their places in the list. They are returned, the last one first.
        """
        pool, group = self._pool(layer_idx), self.groups[self._group_of[layer_idx]]
        at = group.first_seen(stored) // self.block_size - 1
        leaving = []
        while at >= 0 and block_ids[at] != SCRATCH:
            leaving.append(block_ids[at])
            at -= 1
        pool.check_release(leaving)
        for block_id in leaving:
            pool.drop(block_id)
        block_ids[at + 1 : at + 1 + len(leaving)] = [SCRATCH] * len(leaving)
        return leaving
