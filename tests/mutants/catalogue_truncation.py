"""Bugs in rolling sequences back: what is given back, copied, and still counted as stored."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TRUNCATION = "roseinfer.kv.truncation"
_MANAGER = "roseinfer.kv.manager"
_DROP = "                    pool.drop(block_id - pool.first_id)\n"
_SHARED = "    if pool.refcounts[last.block_index] == 1:\n"

MUTANTS = (
    Mutant(
        "truncated-and-still-held",
        "Blocks that are cut off leave the list and are never free.",
        _TRUNCATION,
        "TruncationBatch.commit",
        "pool.drop(block_id - pool.first_id)",
        "pass",
        ("S11",),
    ),
    Mutant(
        "truncated-under-others",
        "A block that is cut off a list is free, whoever else holds it.",
        _TRUNCATION,
        "TruncationBatch.commit",
        "pool.drop(block_id - pool.first_id)",
        """
        pool.refcounts[block_id - pool.first_id] = 1
        pool.drop(block_id - pool.first_id)
        """,
    ),
    Mutant(
        "truncated-and-still-counted",
        "The fill count of the last block stays as it was.",
        _TRUNCATION,
        "_truncate_last_block",
        "last.length = cut",
        "",
        ("S11",),
    ),
    Mutant(
        "truncated-a-block-short",
        "A block of which a part is kept is given back, and the tokens in it are lost.",
        _TRUNCATION,
        "split_length",
        "return -(-length // pool.block_size), length % pool.block_size",
        "return length // pool.block_size, 0",
        ("S11",),
    ),
    Mutant(
        "truncated-a-block-long",
        "A cut at the end of a block keeps the one behind it.",
        _TRUNCATION,
        "split_length",
        "return -(-length // pool.block_size), length % pool.block_size",
        "return length // pool.block_size + 1, length % pool.block_size",
        ("S11",),
    ),
    Mutant(
        "truncated-in-place-though-shared",
        "A shared block is cut in place: others lose its end, and the list writes into it.",
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
        "Of a shared block that is cut, nothing is copied to the list's own.",
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
        "The list keeps its reference on the shared block that it has a copy of.",
        _TRUNCATION,
        "_truncate_last_block",
        "pool.drop(last.block_index)",
        "",
    ),
    Mutant(
        "truncated-without-a-look-for-blocks",
        "A batch is cut without a look at whether there is a block for every copy.",
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
        "refused-though-room-is-given-back",
        "Blocks that are cut off do not count as room for the copies.",
        _TRUNCATION,
        "TruncationBatch.require_copy_blocks",
        "free += leaving[info.block_index] == pool.refcounts[info.block_index]",
        "leaving[info.block_index] == pool.refcounts[info.block_index]",
        rows=("3",),
    ),
)
