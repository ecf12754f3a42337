"""The calls of a cache that move all groups of layers at once, or give back what none sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roseinfer.kv import plan as planning
from roseinfer.kv.groups import given_back
from roseinfer.kv.pool import SCRATCH
from roseinfer.kv.truncation import Cuts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roseinfer.kv.groups import LayerGroup
    from roseinfer.kv.plan import AppendPlan
    from roseinfer.kv.pool import BlockPool, KVBlockInfo
    from roseinfer.kv.storage import DataMover


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
