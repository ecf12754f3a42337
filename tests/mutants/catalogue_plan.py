"""Bugs in deciding what an append needs and where its tokens go."""

from __future__ import annotations

from tests.mutants.mutant import PER_LAYER, Mutant

_PLAN = "roseinfer.kv.plan"
_MANAGER = "roseinfer.kv.manager"
_PER_LAYER = "roseinfer.kv.calls"

MUTANTS = (
    Mutant(
        "rollover-copies-the-full-block",
        "A row whose full block is shared gets a copy of it instead of an empty block.",
        _PLAN,
        "_allocate_row_blocks",
        "new = pool.take(start=len(block_ids) * pool.block_size, length=0)",
        """
        new = pool.take(start=len(block_ids) * pool.block_size, length=0)
        if condition is Condition.ROLLOVER_SHARED:
            plan.copy_from.append(old.block_index)
            plan.copy_to.append(new.block_index)
        """,
        rows=("33",),
    ),
    Mutant(
        "rollover-drops-the-full-block",
        "A row that goes on after a shared full block gives up its hold on that block.",
        _PLAN,
        "_allocate_row_blocks",
        "new = pool.take(start=len(block_ids) * pool.block_size, length=0)",
        """
        new = pool.take(start=len(block_ids) * pool.block_size, length=0)
        if condition is Condition.ROLLOVER_SHARED:
            pool.drop(old.block_index)
        """,
        rows=("33",),
    ),
    Mutant(
        "shared-full-block-written-to",
        "A shared full block is copied on write, and the token goes past the copy's end.",
        _PLAN,
        "_analyze_rows",
        """
        if position == block_size:
            ...
        """,
        """
        if position == block_size and holders == 1:
            ...
        """,
        rows=("33",),
    ),
    Mutant(
        "last-sharer-copies-too",
        "Of the rows that share a block every one copies it, the last one too.",
        _PLAN,
        "_analyze_rows",
        """
        if holders > 1 and holders - leaving.get(index, 0) > 1:
            ...
        """,
        """
        if holders > 1:
            ...
        """,
        rows=("1",),
    ),
    Mutant(
        "second-sharer-writes-in-place",
        "Once one row has copied a shared block, the next writes to it whoever else holds it.",
        _PLAN,
        "_analyze_rows",
        "leaving[index] = leaving.get(index, 0) + 1",
        "leaving[index] = holders",
        rows=("1",),
    ),
    Mutant(
        "copy-on-write-keeps-its-hold",
        "Copy-on-write does not give up its hold on the shared block.",
        _PLAN,
        "_allocate_row_blocks",
        "pool.drop(old.block_index)",
        "",
        rows=("1",),
    ),
    Mutant(
        "copy-on-write-drops-twice",
        "Copy-on-write gives up two holds on the shared block.",
        _PLAN,
        "_allocate_row_blocks",
        "pool.drop(old.block_index)",
        """
        pool.drop(old.block_index)
        pool.drop(old.block_index)
        """,
        rows=("1",),
    ),
    Mutant(
        "copy-not-entered-in-the-list",
        "After copy-on-write the list still names the shared block, which freeing drops again.",
        _PLAN,
        "_allocate_row_blocks",
        "block_ids[-1] = pool.first_id + new.block_index",
        "",
        rows=("1",),
    ),
    Mutant(
        "copied-the-wrong-way",
        "Copy-on-write copies the new block over the shared one.",
        _PLAN,
        "_allocate_row_blocks",
        """
        plan.copy_from.append(old.block_index)
        plan.copy_to.append(new.block_index)
        """,
        """
        plan.copy_from.append(new.block_index)
        plan.copy_to.append(old.block_index)
        """,
        rows=("8",),
    ),
    Mutant(
        "batch-committed-before-it-fits",
        "Rows are committed one by one; the one that finds no block leaves the others longer.",
        _PER_LAYER,
        "PerLayerMixin.append_token_batch",
        "seen = planning.analyze_append(pool, block_ids_list, None)",
        """
        free, pool.num_free = pool.num_free, 1 << 60
        try:
            seen = planning.analyze_append(pool, block_ids_list, None)
        finally:
            pool.num_free = free
        """,
        rows=("26",),
        targets=(PER_LAYER,),
    ),
    Mutant(
        "plan-committed-before-it-fits",
        "A plan takes blocks before it is known that there are enough.",
        _MANAGER,
        "KVBlockManager.plan_append",
        """
        plan = self._commit(
            pool, planning.analyze_append(pool, block_ids_list, num_tokens), num_tokens
        )
        """,
        """
        free, pool.num_free = pool.num_free, 1 << 60
        try:
            seen = planning.analyze_append(pool, block_ids_list, num_tokens)
        finally:
            pool.num_free = free
        plan = self._commit(pool, seen, num_tokens)
        """,
        rows=("26",),
    ),
    Mutant(
        "tail-not-counted",
        "Only each row's first token is looked at when blocks are counted.",
        _PLAN,
        "AppendAnalysis.blocks_needed",
        "return len(self.new_block_rows) - self.num_padding_rows + self.tail_blocks",
        "return len(self.new_block_rows) - self.num_padding_rows",
        rows=("26",),
    ),
    Mutant(
        "tail-counted-too-high",
        "A row that exactly fills its last block is counted as needing one more.",
        _PLAN,
        "_tail_blocks",
        "needed += (position + count - 1) // block_size",
        "needed += (position + count) // block_size",
    ),
    Mutant(
        "tail-starts-too-early",
        "The later blocks of a long append claim to begin where the first one does.",
        _PLAN,
        "_extend_rows",
        "info = pool.take(start=info.start + block_size, length=0)",
        "info = pool.take(start=info.start, length=0)",
    ),
    Mutant(
        "tail-past-the-block",
        "The rest of a long append runs past the end of a block that was partly full.",
        _PLAN,
        "_extend_rows",
        "info.length += min(count, block_size - begin)",
        "info.length += min(count, block_size)",
    ),
    Mutant(
        "only-row-0-validated",
        "Only the first row's block is checked to be this layer's and held.",
        _PLAN,
        "_analyze_rows",
        """
        if not 0 < index < used or not refcounts[index]:
            ...
        """,
        """
        if row == 0 and (not 0 < index < used or not refcounts[index]):
            ...
        """,
        rows=("35",),
    ),
    Mutant(
        "one-list-in-two-rows",
        "A list that occurs twice in a batch is not noticed: both rows write one slot.",
        _PLAN,
        "_analyze_rows",
        "_check_rows_are_distinct(seen)",
        "",
        rows=("35",),
    ),
    Mutant(
        "subset-takes-the-first-positions",
        "Rows left in the batch take the positions of as many rows from its beginning.",
        _PLAN,
        "commit",
        "plan.positions = [seen.positions[row] for row in plan.rows]",
        "plan.positions = seen.positions[: len(plan.rows)]",
        rows=("31",),
        targets=(PER_LAYER,),
    ),
    Mutant(
        "constant-by-first-and-last-row",
        "All rows are taken to write one position when the first and last do.",
        _PLAN,
        "AppendPlan.constant_position",
        "return positions.count(positions[0]) == len(positions)",
        "return positions[0] == positions[-1]",
        rows=("32",),
    ),
    Mutant(
        "constant-by-first-neighbours",
        "All rows are taken to write one position when the first two do.",
        _PLAN,
        "AppendPlan.constant_position",
        "return positions.count(positions[0]) == len(positions)",
        "return positions[0] == positions[:2][-1]",
        rows=("32",),
    ),
    Mutant(
        "padding-writes-a-real-block",
        "Padding rows write to the block that was taken last instead of the scratch block.",
        _PLAN,
        "_allocate_row_blocks",
        "new = KVBlockInfo(pool.layer, SCRATCH, 0, 0)",
        "new = KVBlockInfo(pool.layer, len(pool.infos) - 1, 0, 0)",
        rows=("6",),
    ),
    Mutant(
        "padding-needs-a-block",
        "Padding rows are counted as needing a block, so that a batch that fits is refused.",
        _PLAN,
        "AppendAnalysis.blocks_needed",
        "return len(self.new_block_rows) - self.num_padding_rows + self.tail_blocks",
        "return len(self.new_block_rows) + self.tail_blocks",
        rows=("6",),
    ),
    Mutant(
        "padding-moves-the-others",
        "In a padded batch every row goes to the position of the first real one.",
        _PLAN,
        "_analyze_rows",
        """
        for row in padding:
            ...
        """,
        """
        for row in range(len(seen.positions)):
            ...
        """,
        rows=("6",),
    ),
    Mutant(
        "shared-rollover-counted-as-plain",
        "A rollover after a shared block is counted as one after a block of its own.",
        _PLAN,
        "_analyze_rows",
        "seen.new_block_rows[row] = Condition.ROLLOVER_SHARED if shared else Condition.ROLLOVER",
        "seen.new_block_rows[row] = Condition.ROLLOVER",
    ),
    Mutant(
        "in-place-counted-for-all",
        "Every row is counted as written in place, whatever it met besides.",
        _MANAGER,
        "KVBlockManager._commit",
        "in_place = len(seen.positions) - len(seen.new_block_rows)",
        "in_place = len(seen.positions)",
    ),
)
