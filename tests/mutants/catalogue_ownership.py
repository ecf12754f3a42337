"""Bugs in references on blocks: the pool, and sharing and freeing in the manager."""

from __future__ import annotations

from tests.mutants.mutant import PER_LAYER, Mutant

_POOL = "roseinfer.kv.pool"
_MANAGER = "roseinfer.kv.manager"

MUTANTS = (
    Mutant(
        "recycled-block-forgets-length",
        "A reused block starts with length 0, even as the target of a copy.",
        _POOL,
        "BlockPool.take",
        "info.length = length",
        "",
    ),
    Mutant(
        "recycled-block-forgets-start",
        "A reused block starts at position 0 of its sequence.",
        _POOL,
        "BlockPool.take",
        "info.start = start",
        "",
    ),
    Mutant(
        "freed-with-one-holder-left",
        "A block is freed when one holder is left.",
        _POOL,
        "BlockPool.drop",
        """
        if not self.refcounts[index]:
            ...
        """,
        """
        if self.refcounts[index] <= 1:
            ...
        """,
        rows=("1",),
    ),
    Mutant(
        "never-freed",
        "Blocks without holders are not returned to the pool.",
        _POOL,
        "BlockPool.drop",
        "self._freed_indices.append(index)",
        "pass",
    ),
    Mutant(
        "freed-twice",
        "A freed block enters the free list twice, so that two sequences get it.",
        _POOL,
        "BlockPool.drop",
        "self._freed_indices.append(index)",
        "self._freed_indices += [index, index]",
        rows=("12",),
    ),
    Mutant(
        "third-holder-not-counted",
        "Sharing a block sets its refcount to 2, however many holders it has.",
        _POOL,
        "BlockPool.share",
        "self.refcounts[index] += 1",
        "self.refcounts[index] = 2",
        rows=("1",),
    ),
    Mutant(
        "capacity-off-by-one",
        "The capacity check accepts a batch that needs one block more than is free.",
        _POOL,
        "BlockPool.require_free_blocks",
        """
        if needed > self.num_free:
            ...
        """,
        """
        if needed > self.num_free + 1:
            ...
        """,
        rows=("26",),
    ),
    Mutant(
        "last-block-never-used",
        "The capacity check refuses a batch that needs all free blocks.",
        _POOL,
        "BlockPool.require_free_blocks",
        """
        if needed > self.num_free:
            ...
        """,
        """
        if needed >= self.num_free:
            ...
        """,
    ),
    Mutant(
        "release-counts-a-block-once",
        "Freeing a table is checked as if each block occurred in it once.",
        _POOL,
        "BlockPool.check_decref",
        """
        for block_id, times in Counter(block_ids).items():
            ...
        """,
        """
        for block_id, times in Counter(set(block_ids)).items():
            ...
        """,
        rows=("12",),
    ),
    Mutant(
        "block-of-an-earlier-layer-accepted",
        "Block ids below a layer's range are accepted, and index its ledger from the end.",
        _POOL,
        "BlockPool.index_of",
        """
        if not 0 <= index < self.size:
            ...
        """,
        """
        if index >= self.size:
            ...
        """,
        rows=("27",),
    ),
    Mutant(
        "free-checks-one-by-one",
        "Blocks are freed one by one, each checked only when it is freed.",
        _MANAGER,
        "KVBlockManager.free_blocks",
        """
        pool.check_decref(block_ids)
        for block_id in block_ids:
            pool.drop(block_id - pool.first_id)
        """,
        """
        for block_id in block_ids:
            pool.check_decref([block_id])
            pool.drop(block_id - pool.first_id)
        """,
        rows=("12", "27"),
    ),
    Mutant(
        "free-checks-nothing",
        "Blocks are freed unchecked: free ones or another layer's corrupt the ledger.",
        _MANAGER,
        "KVBlockManager.free_blocks",
        "pool.check_decref(block_ids)",
        "",
        rows=("12", "27"),
    ),
    Mutant(
        "repeated-block-shared-once",
        "A table that names a block twice gets one reference on it.",
        _MANAGER,
        "KVBlockManager.incref_blocks",
        """
        for pool, index in held:
            ...
        """,
        """
        for pool, index in dict.fromkeys(held):
            ...
        """,
        rows=("1",),
    ),
    Mutant(
        "shares-before-checking",
        "A table with an invalid last block is refused after its other blocks were shared.",
        _MANAGER,
        "KVBlockManager.incref_blocks",
        "held.append((pool, pool.held(block_id).block_index))",
        "pool.incref(pool.held_block_info(block_id).block_index)",
        rows=("26",),
    ),
    Mutant(
        "reference-dropped-before-the-copy",
        "Copy-on-write of one token drops the shared block before it has a new one.",
        _MANAGER,
        "KVBlockManager.append_token",
        """
        info = pool.take(start=last.start, length=last.length)
        storage.copy_block(layer_idx, last.block_index, info.block_index)
        pool.drop(last.block_index)
        """,
        """
        pool.drop(last.block_index)
        info = pool.take(start=last.start, length=last.length)
        storage.copy_block(layer_idx, last.block_index, info.block_index)
        """,
        rows=("25",),
        targets=(PER_LAYER,),
    ),
)
