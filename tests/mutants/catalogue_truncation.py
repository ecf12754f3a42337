"""Bugs in truncating sequences: blocks freed, copied, and counted."""

from __future__ import annotations

from tests.mutants.mutant import WINDOWED, Mutant

_TRUNCATION = "roseinfer.kv.plan"
_MANAGER = "roseinfer.kv.manager"
_DROP = "                    pool.drop(block_id - pool.first_id)\n"
_SHARED = "    if pool.refcounts[last.block_index] == 1:\n"

MUTANTS = (
    Mutant(
        "truncated-and-still-held",
        "Truncated blocks leave the table and are never freed.",
        _TRUNCATION,
        "TruncationBatch.commit",
        "pool.drop(block_id - pool.first_id)",
        "pass",
        ("S11",),
    ),
    Mutant(
        "truncated-block-freed-while-shared",
        "A truncated block is freed even if others hold it.",
        _TRUNCATION,
        "TruncationBatch.commit",
        "pool.drop(block_id - pool.first_id)",
        """
        pool.refcounts[block_id - pool.first_id] = 1
        pool.drop(block_id - pool.first_id)
        """,
    ),
    Mutant(
        "truncated-length-kept",
        "The length of the last block is not reduced.",
        _TRUNCATION,
        "_truncate_last_block",
        "last.length = cut",
        "",
        ("S11",),
    ),
    Mutant(
        "truncated-a-block-short",
        "A partly kept block is freed, and its tokens are lost.",
        _TRUNCATION,
        "split_length",
        "return -(-length // pool.block_size), length % pool.block_size",
        "return length // pool.block_size, 0",
        ("S11",),
    ),
    Mutant(
        "truncated-a-block-long",
        "A truncation at the end of a block keeps the next one.",
        _TRUNCATION,
        "split_length",
        "return -(-length // pool.block_size), length % pool.block_size",
        "return length // pool.block_size + 1, length % pool.block_size",
        ("S11",),
    ),
    Mutant(
        "truncated-in-place-though-shared",
        "A shared block is truncated in place: others lose its end, and it is written to.",
        _TRUNCATION,
        "_truncate_last_block",
        """
        if pool.refcounts[last.block_index] == 1:
            ...
        """,
        """
        if pool.refcounts[last.block_index]:
            ...
        """,
    ),
    Mutant(
        "truncated-into-an-empty-block",
        "The copy of a truncated shared block stays empty.",
        _MANAGER,
        "KVBlockManager.truncate_batch",
        """
        for plan in cuts.commit():
            self._append_executor.copy_shared_blocks(plan)
        """,
        "cuts.commit()",
    ),
    Mutant(
        "truncated-with-both-references",
        "The sequence keeps its reference on the shared block that it has copied.",
        _TRUNCATION,
        "_truncate_last_block",
        "pool.drop(last.block_index)",
        "",
    ),
    Mutant(
        "truncated-without-a-capacity-check",
        "A batch is truncated without a check for the blocks of its copies.",
        _TRUNCATION,
        "TruncationBatch.require_copy_blocks",
        """
        if free < 0:
            ...
        """,
        """
        if False:
            ...
        """,
        rows=("26",),
    ),
    Mutant(
        "freed-room-not-counted",
        "Blocks that a truncation frees are not counted as room for its copies.",
        _TRUNCATION,
        "TruncationBatch.require_copy_blocks",
        "free += leaving[info.block_index] == pool.refcounts[info.block_index]",
        "leaving[info.block_index] == pool.refcounts[info.block_index]",
        rows=("3",),
    ),
    Mutant(
        "shared-block-freed-by-its-first-holder",
        "A block that two rows let go of is counted as free after the first of them.",
        _TRUNCATION,
        "TruncationBatch.require_copy_blocks",
        "free += leaving[info.block_index] == pool.refcounts[info.block_index]",
        "free += leaving[info.block_index] == 1",
    ),
    Mutant(
        "block-of-two-rows-never-counted",
        "A block that two rows let go of is not counted as room, since each sees another holder.",
        _TRUNCATION,
        "TruncationBatch.require_copy_blocks",
        "free += leaving[info.block_index] == pool.refcounts[info.block_index]",
        "free += pool.refcounts[info.block_index] == 1",
    ),
    Mutant(
        "cut-checked-group-by-group",
        "The room for a cut is checked for each group alone, though all share one pool.",
        _MANAGER,
        "KVBlockManager.truncate_groups",
        """
        if self.one_pool:
            by_row = [list(own) for own in zip(*stored, strict=True)]
            cuts = [planning.TruncationBatch(self._pools[0], block_lists, by_row, lengths)]
        else:
            cuts = [
                planning.TruncationBatch.with_row_per_list(self._pool(first), lists, own, lengths)
                for first, lists, own in zip(firsts, by_group, stored, strict=True)
            ]
        """,
        """
        cuts = [
            planning.TruncationBatch.with_row_per_list(self._pool(first), lists, own, lengths)
            for first, lists, own in zip(firsts, by_group, stored, strict=True)
        ]
        """,
        targets=(WINDOWED,),
    ),
    Mutant(
        "copied-before-all-groups-are-freed",
        "A group of layers makes its copy before the next group has freed its blocks.",
        _TRUNCATION,
        "TruncationBatch.commit",
        """
        for block_ids in lists:
            for block_id in block_ids[max(kept, count_out_of_window(block_ids)) :]:
                pool.decref(block_id - pool.first_id)
            del block_ids[kept:]
        for block_ids in lists if cut else ():
            _truncate_last_block(pool, block_ids, cut, plans)
        """,
        """
        for block_ids in lists:
            for block_id in block_ids[max(kept, count_out_of_window(block_ids)) :]:
                pool.decref(block_id - pool.first_id)
            del block_ids[kept:]
            if cut:
                _truncate_last_block(pool, block_ids, cut, plans)
        """,
        targets=(WINDOWED,),
    ),
)
