"""Plans of truncations, in two phases as for appends: check every list, then commit.

``check`` and ``TruncationBatch.require_copy_blocks`` only read, and raise;
``TruncationBatch.commit`` changes metadata and cannot fail. None of them touches a tensor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument, BadRefcount
from roseinfer.kv.groups import count_out_of_window
from roseinfer.kv.plan import AppendPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from roseinfer.kv.groups import LayerGroup
    from roseinfer.kv.pool import BlockPool, KVBlockInfo


def check(
    pool: BlockPool,
    group: LayerGroup,
    block_lists: Sequence[list[int]],
    infos: Sequence[list[KVBlockInfo]],
    lengths: Sequence[int],
) -> None:
    """Raise unless every list can be truncated, provided that blocks for copies are free.

    ``infos[i]`` are the records of list ``i``'s blocks, without those that left the window.
    """
    if len(lengths) != len(block_lists):
        raise BadArgument(f"{len(lengths)} lengths for {len(block_lists)} block lists")
    _check_holders(pool, block_lists)
    for block_ids, own, length in zip(block_lists, infos, lengths, strict=True):
        if not isinstance(block_ids, list):
            raise BadArgument(f"a block list must be a list, not {block_ids!r}")
        gone = len(block_ids) - len(own)
        stored = gone * pool.block_size + sum(info.length for info in own)
        if not 0 <= length <= stored:
            raise BadArgument(f"truncate to {length}, but {stored} tokens are stored")
        if length and group.first_visible_position(length) // pool.block_size < gone:
            raise BadArgument(
                f"truncate to {length}: the next token would attend to blocks that were freed when "
                f"they left the window of {group.window} tokens"
            )


@dataclass(frozen=True, slots=True)
class TruncationBatch:
    """Lists of one pool to truncate in order; each row has the lists of one sequence.

    Blocks that a row frees are available for its own copies and for those of later rows.
    """

    pool: BlockPool
    rows: Sequence[Sequence[list[int]]]
    infos: Sequence[Sequence[list[KVBlockInfo]]]
    """Records of every list's blocks, without those that left the window."""
    lengths: Sequence[int]

    @classmethod
    def with_row_per_list(
        cls,
        pool: BlockPool,
        block_lists: Sequence[list[int]],
        infos: Sequence[list[KVBlockInfo]],
        lengths: Sequence[int],
    ) -> Self:
        """Make a batch with one row per list."""
        return cls(pool, [[own] for own in block_lists], [[own] for own in infos], lengths)

    def require_copy_blocks(self) -> None:
        """Raise unless a block is free for every copy."""
        pool, free = self.pool, self.pool.num_free
        leaving: Counter[int] = Counter()  # block index -> earlier lists that release it
        for lists, records, length in zip(self.rows, self.infos, self.lengths, strict=True):
            last = []
            for block_ids, own in zip(lists, records, strict=True):
                gone = len(block_ids) - len(own)
                stored = gone * pool.block_size + sum(info.length for info in own)
                kept, cut = split_length(pool, length)
                kept -= gone
                for info in own[max(0, kept) :]:
                    leaving[info.block_index] += 1
                    free += leaving[info.block_index] == pool.refcounts[info.block_index]
                if length < stored and cut:
                    last.append(own[kept - 1].block_index)
            for index in last:
                copied = pool.refcounts[index] - leaving[index] > 1
                leaving[index] += copied
                free -= copied
            if free < 0:
                pool.require_free_blocks(pool.num_free - free)  # raises, with the reason

    def commit(self) -> list[AppendPlan]:
        """Free blocks and shorten the last ones; return plans of the block copies, in order.

        The copies of one plan are made at once, so none writes to a block that another reads.
        """
        pool = self.pool
        plans = [AppendPlan(pool.layer, [], [])]
        for lists, length in zip(self.rows, self.lengths, strict=True):
            kept, cut = split_length(pool, length)
            for block_ids in lists:
                for block_id in block_ids[max(kept, count_out_of_window(block_ids)) :]:
                    pool.decref(block_id - pool.first_id)
                del block_ids[kept:]
            for block_ids in lists if cut else ():
                _truncate_last_block(pool, block_ids, cut, plans)
        return plans


def split_length(pool: BlockPool, length: int) -> tuple[int, int]:
    """Return the blocks that ``length`` tokens take, and the tokens in the last (0 if full)."""
    return -(-length // pool.block_size), length % pool.block_size


def _truncate_last_block(
    pool: BlockPool, block_ids: list[int], cut: int, plans: list[AppendPlan]
) -> None:
    last = pool.infos[block_ids[-1] - pool.first_id]
    if cut == last.length:
        return
    if pool.refcounts[last.block_index] == 1:
        last.length = cut
        return
    new = pool.allocate(start=last.start, length=cut)
    pool.decref(last.block_index)
    block_ids[-1] = pool.first_id + new.block_index
    if new.block_index in plans[-1].copy_from:
        plans.append(AppendPlan(pool.layer, [], []))
    plans[-1].copy_from.append(last.block_index)
    plans[-1].copy_to.append(new.block_index)


def _check_holders(pool: BlockPool, block_lists: Sequence[list[int]]) -> None:
    """Raise if a list occurs twice, or a block is in more of the lists than hold it."""
    if len({id(block_ids) for block_ids in block_lists}) < len(block_lists):
        raise BadArgument("the same list object is given twice; one call can truncate a list once")
    for block_id, times in Counter(chain.from_iterable(block_lists)).items():
        if block_id == pool.first_id:
            continue  # scratch: replaces blocks that left the window
        if times > pool.refcount(block_id):
            raise BadRefcount(
                f"block {block_id} is in {times} of the lists and held {pool.refcount(block_id)} "
                "times: incref_blocks was not called when a list was shared"
            )
