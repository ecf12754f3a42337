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
        _DROP,
        "                    pass\n",
        ("S11",),
    ),
    Mutant(
        "truncated-under-others",
        "A block that is cut off a list is free, whoever else holds it.",
        _TRUNCATION,
        _DROP,
        "                    pool.refcounts[block_id - pool.first_id] = 1\n" + _DROP,
    ),
    Mutant(
        "truncated-and-still-counted",
        "The fill count of the last block stays as it was.",
        _TRUNCATION,
        "        last.length = cut\n",
        "",
        ("S11",),
    ),
    Mutant(
        "truncated-a-block-short",
        "A block of which a part is kept is given back, and the tokens in it are lost.",
        _TRUNCATION,
        "    return -(-length // pool.block_size), length % pool.block_size\n",
        "    return length // pool.block_size, 0\n",
        ("S11",),
    ),
    Mutant(
        "truncated-a-block-long",
        "A cut at the end of a block keeps the one behind it.",
        _TRUNCATION,
        "    return -(-length // pool.block_size), length % pool.block_size\n",
        "    return length // pool.block_size + 1, length % pool.block_size\n",
        ("S11",),
    ),
    Mutant(
        "truncated-in-place-though-shared",
        "A shared block is cut in place: others lose its end, and the list writes into it.",
        _TRUNCATION,
        _SHARED,
        "    if pool.refcounts[last.block_index]:\n",
    ),
    Mutant(
        "truncated-into-an-empty-block",
        "Of a shared block that is cut, nothing is copied to the list's own.",
        _MANAGER,
        "        for plan in cuts.commit():\n            self._mover.copy_shared(plan)\n",
        "        cuts.commit()\n",
    ),
    Mutant(
        "truncated-with-both-references",
        "The list keeps its reference on the shared block that it has a copy of.",
        _TRUNCATION,
        "    pool.drop(last.block_index)\n    block_ids[-1]",
        "    block_ids[-1]",
    ),
    Mutant(
        "truncated-without-a-look-for-blocks",
        "A batch is cut without a look at whether there is a block for every copy.",
        _TRUNCATION,
        "            if free < 0:\n",
        "            if False:\n",
        rows=("26",),
    ),
    Mutant(
        "refused-though-room-is-given-back",
        "Blocks that are cut off do not count as room for the copies.",
        _TRUNCATION,
        "                    free += leaving[info.block_index] ==",
        "                    leaving[info.block_index] ==",
        rows=("3",),
    ),
)
