"""Plans of appends and truncations, in two phases: check every row or list, then commit.

``analyze_append``, ``check_truncation`` and ``TruncationBatch.require_copy_blocks`` only read, and
raise; ``commit`` and ``TruncationBatch.commit`` change metadata and cannot fail. None touches a
tensor.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import index as whole
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument, BadRefcount, to_argument_error
from roseinfer.kv.pool import SCRATCH, KVBlockInfo, count_out_of_window
from roseinfer.paths import Condition, Path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from torch import Tensor

    from roseinfer.kv.groups import LayerGroup
    from roseinfer.kv.pool import BlockPool


UnbatchedRows = Mapping[int, Callable[[], None]]
"""Callables that append one row each, by row: rows that need a block and may not be batched.

Each is called at the row's turn to allocate a block, so that every row gets the same block as if
all rows had been appended one by one.
"""


@dataclass(slots=True)
class AppendAnalysis:
    """State of every row of a batch before an append. The lists are parallel to the rows."""

    block_lists: Sequence[list[int] | None]
    last_infos: list[KVBlockInfo]
    """Record of each row's last block; the empty scratch block's for a row without blocks."""
    positions: list[int]
    """Position in its block of each row's first new token."""
    new_block_rows: dict[int, Condition] = field(default_factory=dict)
    """Conditions of the rows that cannot write in place, in row order."""
    num_padding_rows: int = 0
    """Padding rows among ``new_block_rows``, which need no block."""
    tail_blocks: int = 0
    """Blocks needed for the tokens after each row's first."""

    @property
    def blocks_needed(self) -> int:
        return len(self.new_block_rows) - self.num_padding_rows + self.tail_blocks


@dataclass(frozen=True, slots=True)
class StagedIndices:
    """Columns of indices on the device, valid until their ring buffer is reused."""

    columns: tuple[Tensor, ...]
    ring: object
    stage_count: int | None
    """Number of this staging in its ring, from 1; None for buffers outside the ring."""


@dataclass(slots=True)
class AppendPlan:
    """Positions of the tokens of one append. The metadata counts them as stored already."""

    layer: int
    """First layer that the pool's blocks serve."""
    blocks: Sequence[int]
    """Each token's block index, in the order of the rows."""
    positions: Sequence[int]
    """Each token's position within its block."""
    rows: list[int] | None = None
    """Indices of these tokens in the caller's batch; None for all of them, in order."""
    copy_from: list[int] = field(default_factory=list)
    """Blocks to copy to ``copy_to``, all at once, before any token is written."""
    copy_to: list[int] = field(default_factory=list)
    path: Path = Path.TORCH_VECTOR
    group: int = 0
    """Group of layers whose lists are appended to."""
    num_inputs: int = 0
    """Number of tokens that the caller's key and value must have."""
    staged_indices: StagedIndices | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.blocks)

    @property
    def constant_position(self) -> bool:
        positions = self.positions
        # A cheap test first, which rules out nearly all prompts.
        if not positions or positions[0] != positions[-1]:
            return False
        return positions.count(positions[0]) == len(positions)


def analyze_append(
    pool: BlockPool, block_lists: Sequence[list[int] | None], counts: Sequence[int] | None
) -> AppendAnalysis:
    """Analyze every row of an append, as if the rows before it had been appended.

    Anything that would make ``commit`` fail raises here, too few free blocks included.
    """
    try:
        block_lists[:0]  # rows are indexed, which a set does not support
        return _analyze_rows(pool, block_lists, counts)
    except Exception as error:
        wanted = (
            "block_ids_list must have a list of block ids, or None, for each row, and num_tokens a "
            "whole number, if it is not None"
        )
        raise to_argument_error(error, wanted, block_lists, counts) from None


def _analyze_rows(
    pool: BlockPool, block_lists: Sequence[list[int] | None], counts: Sequence[int] | None
) -> AppendAnalysis:
    infos: list[KVBlockInfo] = []
    positions: list[int] = []
    seen = AppendAnalysis(block_lists, infos, positions)
    pool_infos, refcounts = pool.infos, pool.refcounts
    first_id, block_size = pool.first_id, pool.block_size
    used = len(pool_infos)
    leaving: dict[int, int] = {}  # block index -> earlier rows that copy it
    for row, block_ids in enumerate(block_lists):
        if block_ids is not None and not isinstance(block_ids, list):
            raise BadArgument(f"row {row}: a block list must be a list, not {block_ids!r}")
        if not block_ids:
            infos.append(pool_infos[SCRATCH])
            positions.append(0)
            seen.new_block_rows[row] = Condition.PADDING if block_ids is None else Condition.FRESH
            seen.num_padding_rows += block_ids is None
            continue
        index = block_ids[-1] - first_id
        if not 0 < index < used or not refcounts[index]:
            if index == SCRATCH and pool.frees_out_of_window:
                infos.append(pool_infos[SCRATCH])
                positions.append(0)
                seen.new_block_rows[row] = Condition.ROLLOVER
                continue
            pool.held_block_info(block_ids[-1])  # raises, with the reason
        info = pool_infos[index]
        position = info.length
        holders = refcounts[index]
        infos.append(info)
        if position == block_size:
            positions.append(0)
            shared = holders > 1
            seen.new_block_rows[row] = Condition.ROLLOVER_SHARED if shared else Condition.ROLLOVER
            continue
        positions.append(position)
        if holders > 1 and holders - leaving.get(index, 0) > 1:
            leaving[index] = leaving.get(index, 0) + 1
            seen.new_block_rows[row] = Condition.COPY_ON_WRITE
    _check_rows_are_distinct(seen)
    if counts is not None:
        seen.tail_blocks = _tail_blocks(seen, counts, block_size)
    if seen.num_padding_rows:  # given another row's position, so that all may be equal
        padding_rows = {row for row, met in seen.new_block_rows.items() if met is Condition.PADDING}
        others = (position for row, position in enumerate(positions) if row not in padding_rows)
        position = next(others, 0)
        for row in padding_rows:
            positions[row] = position
    if seen.blocks_needed > pool.num_free:
        pool.require_free_blocks(seen.blocks_needed)  # raises, with the reason
    return seen


def _check_rows_are_distinct(seen: AppendAnalysis) -> None:
    """Raise if a list occurs twice, or two rows would write to one block in place.

    A list that occurs twice has its last block twice, so where all rows write in place the second
    check is enough.
    """
    infos = seen.last_infos
    lists = seen.block_lists
    if seen.new_block_rows:
        _check_lists_differ(lists)
        infos = [info for row, info in enumerate(infos) if row not in seen.new_block_rows]
    if len(set(map(id, infos))) < len(infos):
        _check_lists_differ(lists)
        index = next(info.block_index for info in infos if infos.count(info) > 1)
        raise BadRefcount(
            f"block index {index} would be written in place by more rows than hold it: "
            "incref_blocks was not called when the list was shared"
        )


def _check_lists_differ(lists: Sequence[list[int] | None]) -> None:
    ids = [id(block_ids) for block_ids in lists if block_ids is not None]
    if len(set(ids)) < len(ids):
        ids = [id(lists) if block_ids is None else id(block_ids) for block_ids in lists]
        row = next(row for row, key in enumerate(ids) if key != id(lists) and key in ids[:row])
        raise BadArgument(f"row {row} is the same list object as row {ids.index(ids[row])}")


def _tail_blocks(seen: AppendAnalysis, counts: Sequence[int], block_size: int) -> int:
    if len(counts) != len(seen.positions):
        raise BadArgument(f"{len(counts)} token counts for {len(seen.positions)} block lists")
    needed = 0
    for row, (position, count) in enumerate(zip(seen.positions, counts, strict=True)):
        if whole(count) < 1:
            raise BadArgument(
                f"row {row}: cannot append {count} tokens; num_tokens must be 1 or more"
            )
        if count > 1 and seen.block_lists[row] is None:
            raise BadArgument(f"row {row} is padding and takes one token, not {count}")
        needed += (position + count - 1) // block_size
    return needed


def commit(
    pool: BlockPool,
    seen: AppendAnalysis,
    counts: Sequence[int] | None = None,
    unbatched_rows: UnbatchedRows | None = None,
) -> AppendPlan:
    """Allocate blocks, in row order, and count every row's tokens as stored."""
    plan = AppendPlan(pool.layer, [], seen.positions)
    targets = seen.last_infos
    if seen.new_block_rows:
        targets = _allocate_row_blocks(pool, seen, plan, unbatched_rows)
    if unbatched_rows:
        plan.rows = [row for row in range(len(targets)) if row not in unbatched_rows]
        plan.positions = [seen.positions[row] for row in plan.rows]
        targets = [targets[row] for row in plan.rows]
    for info in targets:
        info.length += 1
    plan.blocks = [info.block_index for info in targets]
    if counts is not None:
        _extend_rows(pool, plan, seen.block_lists, counts)
    plan.num_inputs = len(seen.positions) if unbatched_rows else len(plan.blocks)
    return plan


def _allocate_row_blocks(
    pool: BlockPool, seen: AppendAnalysis, plan: AppendPlan, unbatched_rows: UnbatchedRows | None
) -> list[KVBlockInfo]:
    """Allocate a block for every row that needs one; return the record each row writes to."""
    targets = list(seen.last_infos)
    for row, condition in seen.new_block_rows.items():
        if unbatched_rows and row in unbatched_rows:
            unbatched_rows[row]()
            continue
        old = seen.last_infos[row]
        block_ids = seen.block_lists[row]
        if block_ids is None:
            new = KVBlockInfo(pool.layer, SCRATCH, 0, 0)  # a throwaway record
        elif condition is Condition.COPY_ON_WRITE:
            new = pool.allocate(start=old.start, length=old.length)
            plan.copy_from.append(old.block_index)
            plan.copy_to.append(new.block_index)
            pool.decref(old.block_index)
            block_ids[-1] = pool.first_id + new.block_index
        else:
            new = pool.allocate(start=len(block_ids) * pool.block_size, length=0)
            block_ids.append(pool.first_id + new.block_index)
        targets[row] = new
    return targets


def _extend_rows(
    pool: BlockPool,
    plan: AppendPlan,
    block_lists: Sequence[list[int] | None],
    counts: Sequence[int],
) -> None:
    """Assign blocks and positions to the tokens after each row's first.

    A step of prompts has thousands. The results are arrays, which are copied to the device as they
    are; lists would be converted element by element while the GPU waits.
    """
    blocks = array("q")
    positions = array("q")
    block_size = pool.block_size
    places = _block_positions(block_size)
    for row, num_tokens in enumerate(counts):
        blocks.append(plan.blocks[row])
        positions.append(plan.positions[row])
        info, block_ids, count = pool.infos[plan.blocks[row]], block_lists[row], num_tokens - 1
        while count and block_ids is not None:
            if info.length == block_size:
                info = pool.allocate(start=info.start + block_size, length=0)
                block_ids.append(pool.first_id + info.block_index)
            begin = info.length
            info.length += min(count, block_size - begin)
            count -= info.length - begin
            blocks += array("q", (info.block_index,)) * (info.length - begin)
            positions += places[begin : info.length]
    plan.blocks, plan.positions = blocks, positions


@cache
def _block_positions(block_size: int) -> array[int]:
    """Return the positions 0 to ``block_size - 1``."""
    return array("q", range(block_size))


# Truncations, in the same two phases.


def check_truncation(
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
