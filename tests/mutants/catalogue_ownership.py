"""Bugs in who holds which block: the pool, and sharing and giving back in the manager."""

from __future__ import annotations

from tests.mutants.mutant import PER_LAYER, Mutant

_POOL = "roseinfer.kv.pool"
_MANAGER = "roseinfer.kv.manager"
_PER_LAYER = "roseinfer.kv.calls"

MUTANTS = (
    Mutant(
        "recycled-block-forgets-length",
        "A recycled block starts out empty, even as the target of a copy.",
        _POOL,
        "BlockPool.take",
        "info.length = length",
        "",
    ),
    Mutant(
        "recycled-block-forgets-start",
        "A recycled block claims to begin at position 0 of its sequence.",
        _POOL,
        "BlockPool.take",
        "info.start = start",
        "",
    ),
    Mutant(
        "freed-under-its-last-holder",
        "A block goes back to the pool when one holder is left.",
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
        "Blocks that nobody holds do not go back to the pool.",
        _POOL,
        "BlockPool.drop",
        "self._freed_indices.append(index)",
        "pass",
    ),
    Mutant(
        "freed-twice",
        "A freed block enters the free list twice and is handed to two sequences.",
        _POOL,
        "BlockPool.drop",
        "self._freed_indices.append(index)",
        "self._freed_indices += [index, index]",
        rows=("12",),
    ),
    Mutant(
        "third-holder-not-counted",
        "Sharing a block says it has two holders, however many there are.",
        _POOL,
        "BlockPool.share",
        "self.refcounts[index] += 1",
        "self.refcounts[index] = 2",
        rows=("1",),
    ),
    Mutant(
        "capacity-off-by-one",
        "The capacity check lets through a batch that needs one block more than is free.",
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
        "The capacity check refuses a batch that needs exactly what is free.",
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
        "Freeing a list is checked as if each block occurred in it once.",
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
        "layer-before-accepted",
        "Block ids below a layer's range pass and index its books from the end.",
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
        "free-checks-as-it-goes",
        "Blocks are freed one by one, each checked when its turn comes.",
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
        "Freeing trusts the list: another layer's block, or one that is free, corrupts the books.",
        _MANAGER,
        "KVBlockManager.free_blocks",
        "pool.check_decref(block_ids)",
        "",
        rows=("12", "27"),
    ),
    Mutant(
        "repeated-block-shared-once",
        "A list that names a block twice gains one holder of it.",
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
        "A list with a bad block at its end is refused after the others gained a holder.",
        _MANAGER,
        "KVBlockManager.incref_blocks",
        "held.append((pool, pool.held(block_id).block_index))",
        "pool.share(pool.held(block_id).block_index)",
        rows=("26",),
    ),
    Mutant(
        "reference-dropped-before-the-copy",
        "Copy-on-write of a single token lets go of the shared block before it has a new one.",
        _PER_LAYER,
        "PerLayerMixin.append_token",
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
