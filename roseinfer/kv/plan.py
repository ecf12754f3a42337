"""Plans of appends, row by row: look first, then commit.

``survey`` reads and raises; ``commit`` changes metadata and cannot fail. Neither touches a tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import index as whole
from typing import TYPE_CHECKING

from roseinfer.errors import BadArgument, BadRefcount, wrong_kind
from roseinfer.kv.pool import SCRATCH, KVBlockInfo
from roseinfer.paths import Condition, Path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roseinfer.kv.pool import BlockPool


Apart = Mapping[int, Callable[[], None]]
"""Rows that need a block and that the policy keeps out of the batch, and what appends each.

It is called when the row's turn to take a block comes, so that every row gets the block it would
have got had all rows gone one by one.
"""


@dataclass(slots=True)
class Survey:
    """What every row of a batch met. The lists run parallel to the rows."""

    block_lists: Sequence[list[int] | None]
    last_infos: list[KVBlockInfo]
    """The scratch block's, which is empty, for a row that has no block yet."""
    positions: list[int]
    """Where the row's first new token goes."""
    needs_block: dict[int, Condition] = field(default_factory=dict)
    """Rows that cannot write in place, in order, and why."""
    padding: int = 0
    """How many of those are padding, which takes no block."""
    tail_blocks: int = 0
    """Blocks for the tokens that follow each row's first."""

    @property
    def blocks_needed(self) -> int:
        return len(self.needs_block) - self.padding + self.tail_blocks


@dataclass(frozen=True, slots=True)
class StagedIndices:
    """Columns of indices on the device, good until the ring they are in comes round again."""

    columns: tuple[Tensor, ...]
    ring: object
    ticket: int | None
    """How many times the ring had been staged to; None for buffers outside of it."""


@dataclass(slots=True)
class AppendPlan:
    """Where the tokens of one append go. The metadata counts them as stored already."""

    layer: int
    """First layer of those that the pool's blocks have room for."""
    blocks: Sequence[int]
    """Each token's block index, in the order of the rows."""
    positions: Sequence[int]
    """Each token's position within its block."""
    rows: list[int] | None = None
    """Which tokens of the caller's batch these are; None means all of them, in order."""
    copy_from: list[int] = field(default_factory=list)
    copy_to: list[int] = field(default_factory=list)
    """Blocks to copy, all at once, before any token is written."""
    path: Path = Path.TORCH_VECTOR
    group: int = 0
    """The group of layers whose lists it is for."""
    num_inputs: int = 0
    """Tokens the caller's key and value must hold."""
    staged: StagedIndices | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.blocks)

    @property
    def constant_position(self) -> bool:
        positions = self.positions
        if not positions or positions[0] != positions[-1]:  # so with nearly all prompts
            return False
        return positions.count(positions[0]) == len(positions)


def survey(
    pool: BlockPool, block_lists: Sequence[list[int] | None], counts: Sequence[int] | None
) -> Survey:
    """Find out what every row will meet, as if the rows before it had been appended.

    Anything that would keep ``commit`` from succeeding raises here, too few blocks included.
    """
    try:
        block_lists[:0]  # rows are found by their places, which a set has not
        return _look(pool, block_lists, counts)
    except Exception as error:
        wanted = (
            "block_ids_list must have a list of block ids, or None, for each row, and num_tokens a "
            "whole number, if it is not None"
        )
        raise wrong_kind(error, wanted, block_lists, counts) from None


def _look(
    pool: BlockPool, block_lists: Sequence[list[int] | None], counts: Sequence[int] | None
) -> Survey:
    infos: list[KVBlockInfo] = []
    positions: list[int] = []
    seen = Survey(block_lists, infos, positions)
    pool_infos, refcounts = pool.infos, pool.refcounts
    first_id, block_size = pool.first_id, pool.block_size
    used = len(pool_infos)
    leaving: dict[int, int] = {}  # block index -> earlier rows that will copy it and let go
    for row, block_ids in enumerate(block_lists):
        if block_ids is not None and not isinstance(block_ids, list):
            raise BadArgument(f"row {row}: a block list must be a list, not {block_ids!r}")
        if not block_ids:
            infos.append(pool_infos[SCRATCH])
            positions.append(0)
            seen.needs_block[row] = Condition.PADDING if block_ids is None else Condition.FRESH
            seen.padding += block_ids is None
            continue
        index = block_ids[-1] - first_id
        if not 0 < index < used or not refcounts[index]:
            if index == SCRATCH and pool.gives_back:
                infos.append(pool_infos[SCRATCH])
                positions.append(0)
                seen.needs_block[row] = Condition.ROLLOVER
                continue
            pool.held(block_ids[-1])  # raises, saying why
        info = pool_infos[index]
        position = info.length
        holders = refcounts[index]
        infos.append(info)
        if position == block_size:
            positions.append(0)
            shared = holders > 1
            seen.needs_block[row] = Condition.ROLLOVER_SHARED if shared else Condition.ROLLOVER
            continue
        positions.append(position)
        if holders > 1 and holders - leaving.get(index, 0) > 1:
            leaving[index] = leaving.get(index, 0) + 1
            seen.needs_block[row] = Condition.COPY_ON_WRITE
    _check_rows_are_distinct(seen)
    if counts is not None:
        seen.tail_blocks = _tail_blocks(seen, counts, block_size)
    if seen.padding:  # it follows another row, so that all may still have one position
        padding = {row for row, met in seen.needs_block.items() if met is Condition.PADDING}
        others = (position for row, position in enumerate(positions) if row not in padding)
        position = next(others, 0)
        for row in padding:
            positions[row] = position
    if seen.blocks_needed > pool.num_free:
        pool.require(seen.blocks_needed)  # raises, saying why
    return seen


def _check_rows_are_distinct(seen: Survey) -> None:
    """Raise if a list occurs twice, or two rows would write to one block in place.

    A list that occurs twice brings its last block twice, so rows that all write in place need only
    the second check.
    """
    infos = seen.last_infos
    lists = seen.block_lists
    if seen.needs_block:
        _check_lists_differ(lists)
        infos = [info for row, info in enumerate(infos) if row not in seen.needs_block]
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


def _tail_blocks(seen: Survey, counts: Sequence[int], block_size: int) -> int:
    if len(counts) != len(seen.positions):
        raise BadArgument(f"{len(counts)} token counts for {len(seen.positions)} block lists")
    needed = 0
    for row, (position, count) in enumerate(zip(seen.positions, counts, strict=True)):
        if whole(count) < 1:
            raise BadArgument(f"row {row}: asked to append {count} tokens; at least 1 is needed")
        if count > 1 and seen.block_lists[row] is None:
            raise BadArgument(f"row {row} is padding and takes one token, not {count}")
        needed += (position + count - 1) // block_size
    return needed


def commit(
    pool: BlockPool, seen: Survey, counts: Sequence[int] | None = None, apart: Apart | None = None
) -> AppendPlan:
    """Take the blocks, in row order, and count every row's tokens as stored."""
    plan = AppendPlan(pool.layer, [], seen.positions)
    targets = seen.last_infos
    if seen.needs_block:
        targets = _open_blocks(pool, seen, plan, apart)
    if apart:
        plan.rows = [row for row in range(len(targets)) if row not in apart]
        plan.positions = [seen.positions[row] for row in plan.rows]
        targets = [targets[row] for row in plan.rows]
    for info in targets:
        info.length += 1
    plan.blocks = [info.block_index for info in targets]
    if counts is not None:
        _extend_rows(pool, plan, seen.block_lists, counts)
    plan.num_inputs = len(seen.positions) if apart else len(plan.blocks)
    return plan


def _open_blocks(
    pool: BlockPool, seen: Survey, plan: AppendPlan, apart: Apart | None
) -> list[KVBlockInfo]:
    """Give a new block to every row that needs one; return the block that each row writes to."""
    targets = list(seen.last_infos)
    for row, condition in seen.needs_block.items():
        if apart and row in apart:
            apart[row]()
            continue
        old = seen.last_infos[row]
        block_ids = seen.block_lists[row]
        if block_ids is None:
            new = KVBlockInfo(pool.layer, SCRATCH, 0, 0)  # one to count on and throw away
        elif condition is Condition.COPY_ON_WRITE:
            new = pool.take(start=old.start, length=old.length)
            plan.copy_from.append(old.block_index)
            plan.copy_to.append(new.block_index)
            pool.drop(old.block_index)
            block_ids[-1] = pool.first_id + new.block_index
        else:
            new = pool.take(start=len(block_ids) * pool.block_size, length=0)
            block_ids.append(pool.first_id + new.block_index)
        targets[row] = new
    return targets


def _extend_rows(
    pool: BlockPool,
    plan: AppendPlan,
    block_lists: Sequence[list[int] | None],
    counts: Sequence[int],
) -> None:
    """Find places for the tokens after each row's first.

    A step of prompts has thousands. The places are arrays, which are copied to the device as they
    are; lists would be gone through for that, one number after the other, while the GPU waits.
    """
    blocks = array("q")
    positions = array("q")
    block_size = pool.block_size
    places = _places(block_size)
    for row, num_tokens in enumerate(counts):
        blocks.append(plan.blocks[row])
        positions.append(plan.positions[row])
        info, block_ids, count = pool.infos[plan.blocks[row]], block_lists[row], num_tokens - 1
        while count and block_ids is not None:
            if info.length == block_size:
                info = pool.take(start=info.start + block_size, length=0)
                block_ids.append(pool.first_id + info.block_index)
            begin = info.length
            info.length += min(count, block_size - begin)
            count -= info.length - begin
            blocks += array("q", (info.block_index,)) * (info.length - begin)
            positions += places[begin : info.length]
    plan.blocks, plan.positions = blocks, positions


@cache
def _places(block_size: int) -> array[int]:
    """Return the positions of a block."""
    return array("q", range(block_size))
