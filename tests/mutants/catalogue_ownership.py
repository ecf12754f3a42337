"""Bugs in who holds which block: the pool, and sharing and giving back in the manager."""

from __future__ import annotations

from tests.mutants.mutant import PER_LAYER, Mutant

_POOL = "roseinfer.kv.pool"
_MANAGER = "roseinfer.kv.manager"
_PER_LAYER = "roseinfer.kv.per_layer"

MUTANTS = (
    Mutant(
        "recycled-block-forgets-length",
        "A recycled block starts out empty, even as the target of a copy.",
        _POOL,
        "            info.length = length\n",
        "",
    ),
    Mutant(
        "recycled-block-forgets-start",
        "A recycled block claims to begin at position 0 of its sequence.",
        _POOL,
        "            info.start = start\n",
        "",
    ),
    Mutant(
        "freed-under-its-last-holder",
        "A block goes back to the pool when one holder is left.",
        _POOL,
        "        if not self.refcounts[index]:\n            info = self.infos[index]",
        "        if self.refcounts[index] <= 1:\n            info = self.infos[index]",
        rows=("1",),
    ),
    Mutant(
        "never-freed",
        "Blocks that nobody holds do not go back to the pool.",
        _POOL,
        "            self._recycled.append(index)\n",
        "            pass\n",
    ),
    Mutant(
        "freed-twice",
        "A freed block enters the free list twice and is handed to two sequences.",
        _POOL,
        "            self._recycled.append(index)\n",
        "            self._recycled += [index, index]\n",
        rows=("12",),
    ),
    Mutant(
        "third-holder-not-counted",
        "Sharing a block says it has two holders, however many there are.",
        _POOL,
        "        self.refcounts[index] += 1\n",
        "        self.refcounts[index] = 2\n",
        rows=("1",),
    ),
    Mutant(
        "capacity-off-by-one",
        "The capacity check lets through a batch that needs one block more than is free.",
        _POOL,
        "        if needed > self.num_free:\n",
        "        if needed > self.num_free + 1:\n",
        rows=("26",),
    ),
    Mutant(
        "last-block-never-used",
        "The capacity check refuses a batch that needs exactly what is free.",
        _POOL,
        "        if needed > self.num_free:\n",
        "        if needed >= self.num_free:\n",
    ),
    Mutant(
        "release-counts-a-block-once",
        "Freeing a list is checked as if each block occurred in it once.",
        _POOL,
        "in Counter(block_ids).items():",
        "in Counter(set(block_ids)).items():",
        rows=("12",),
    ),
    Mutant(
        "layer-before-accepted",
        "Block ids below a layer's range pass and index its books from the end.",
        _POOL,
        "        if not 0 <= index < self.size:\n",
        "        if index >= self.size:\n",
        rows=("27",),
    ),
    Mutant(
        "free-checks-as-it-goes",
        "Blocks are freed one by one, each checked when its turn comes.",
        _MANAGER,
        "        pool.check_release(block_ids)\n        for block_id in block_ids:\n",
        "        for block_id in block_ids:\n            pool.check_release([block_id])\n",
        rows=("12", "27"),
    ),
    Mutant(
        "free-checks-nothing",
        "Freeing trusts the list: another layer's block, or one that is free, corrupts the books.",
        _MANAGER,
        "        pool.check_release(block_ids)\n",
        "",
        rows=("12", "27"),
    ),
    Mutant(
        "repeated-block-shared-once",
        "A list that names a block twice gains one holder of it.",
        _MANAGER,
        "        for pool, index in held:\n",
        "        for pool, index in dict.fromkeys(held):\n",
        rows=("1",),
    ),
    Mutant(
        "shares-before-checking",
        "A list with a bad block at its end is refused after the others gained a holder.",
        _MANAGER,
        "            held.append((pool, pool.held(block_id).block_index))\n",
        "            pool.share(pool.held(block_id).block_index)\n",
        rows=("26",),
    ),
    Mutant(
        "reference-dropped-before-the-copy",
        "Copy-on-write of a single token lets go of the shared block before it has a new one.",
        _PER_LAYER,
        "            info = pool.take(start=last.start, length=last.length)\n"
        "            storage.copy_block(layer_idx, last.block_index, info.block_index)\n"
        "            pool.drop(last.block_index)\n",
        "            pool.drop(last.block_index)\n"
        "            info = pool.take(start=last.start, length=last.length)\n"
        "            storage.copy_block(layer_idx, last.block_index, info.block_index)\n",
        rows=("25",),
        targets=(PER_LAYER,),
    ),
)
