"""Bugs in planning an append: the blocks it needs, and the slots of its tokens."""

from __future__ import annotations

from tests.mutants.mutant import PER_LAYER, Mutant

_PLAN = "roseinfer.kv.plan"
_MANAGER = "roseinfer.kv.manager"

MUTANTS = (
    Mutant(
        "rollover-copies-the-full-block",
        "A rollover after a shared full block copies it instead of taking an empty block.",
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
        "A rollover after a shared full block drops the reference on it.",
        _PLAN,
        "_allocate_row_blocks",
        "new = pool.take(start=len(block_ids) * pool.block_size, length=0)",
        """
        new = pool.take(start=len(block_ids) * pool.block_size, length=0)
        if condition is Condition.ROLLOVER_SHARED:
            pool.decref(old.block_index)
        """,
        rows=("33",),
    ),
    Mutant(
        "shared-full-block-written-to",
        "A shared full block is copied on write, and the token is written after its end.",
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
        "last-holder-copies-too",
        "Every row that shares a block copies it, even its last holder.",
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
        "second-holder-writes-in-place",
        "After one row has copied a shared block, the next writes to it, whoever holds it.",
        _PLAN,
        "_analyze_rows",
        "leaving[index] = leaving.get(index, 0) + 1",
        "leaving[index] = holders",
        rows=("1",),
    ),
    Mutant(
        "copy-on-write-keeps-its-reference",
        "Copy-on-write does not drop its reference on the shared block.",
        _PLAN,
        "_allocate_row_blocks",
        "pool.drop(old.block_index)",
        "",
        rows=("1",),
    ),
    Mutant(
        "copy-on-write-drops-twice",
        "Copy-on-write drops two references on the shared block.",
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
        "copy-not-entered-in-the-table",
        "After copy-on-write the table still names the shared block, which is dropped again.",
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
        "Rows are committed one by one: if one finds no block, the others are longer already.",
        _MANAGER,
        "KVBlockManager.append_token_batch",
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
        "A plan takes blocks before a check that there are enough.",
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
        "Needed blocks are counted for each row's first token only.",
        _PLAN,
        "AppendAnalysis.blocks_needed",
        "return len(self.new_block_rows) - self.num_padding_rows + self.tail_blocks",
        "return len(self.new_block_rows) - self.num_padding_rows",
        rows=("26",),
    ),
    Mutant(
        "tail-counted-too-high",
        "A row that exactly fills its last block counts as needing one more.",
        _PLAN,
        "_tail_blocks",
        "needed += (position + count - 1) // block_size",
        "needed += (position + count) // block_size",
    ),
    Mutant(
        "tail-starts-too-early",
        "Later blocks of a long append start at the position of the first one.",
        _PLAN,
        "_extend_rows",
        "info = pool.take(start=info.start + block_size, length=0)",
        "info = pool.take(start=info.start, length=0)",
    ),
    Mutant(
        "tail-past-the-block",
        "A long append writes past the end of a partial block.",
        _PLAN,
        "_extend_rows",
        "info.length += min(count, block_size - begin)",
        "info.length += min(count, block_size)",
    ),
    Mutant(
        "only-row-0-validated",
        "Only the first row's block is checked to be held and of this layer.",
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
        "one-table-in-two-rows",
        "A table that occurs twice in a batch is accepted: both rows write one slot.",
        _PLAN,
        "_analyze_rows",
        "_check_rows_are_distinct(seen)",
        "",
        rows=("35",),
    ),
    Mutant(
        "subset-takes-the-first-positions",
        "Rows of a subset get the positions of the batch's first rows.",
        _PLAN,
        "commit",
        "plan.positions = [seen.positions[row] for row in plan.rows]",
        "plan.positions = seen.positions[: len(plan.rows)]",
        rows=("31",),
        targets=(PER_LAYER,),
    ),
    Mutant(
        "constant-by-first-and-last-row",
        "All rows are written at one position if the first and last row have the same.",
        _PLAN,
        "AppendPlan.constant_position",
        "return positions.count(positions[0]) == len(positions)",
        "return positions[0] == positions[-1]",
        rows=("32",),
    ),
    Mutant(
        "constant-by-first-two-rows",
        "All rows are written at one position if the first two rows have the same.",
        _PLAN,
        "AppendPlan.constant_position",
        "return positions.count(positions[0]) == len(positions)",
        "return positions[0] == positions[:2][-1]",
        rows=("32",),
    ),
    Mutant(
        "padding-writes-a-real-block",
        "Padding rows write to the block taken last instead of the scratch block.",
        _PLAN,
        "_allocate_row_blocks",
        "new = KVBlockInfo(pool.layer, SCRATCH, 0, 0)",
        "new = KVBlockInfo(pool.layer, len(pool.infos) - 1, 0, 0)",
        rows=("6",),
    ),
    Mutant(
        "padding-needs-a-block",
        "Padding rows count as needing a block, so that a batch that fits is refused.",
        _PLAN,
        "AppendAnalysis.blocks_needed",
        "return len(self.new_block_rows) - self.num_padding_rows + self.tail_blocks",
        "return len(self.new_block_rows) + self.tail_blocks",
        rows=("6",),
    ),
    Mutant(
        "padding-moves-other-rows",
        "In a padded batch every row is written at the position of the first real one.",
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
        "A rollover after a shared block is counted as one after an unshared block.",
        _PLAN,
        "_analyze_rows",
        "seen.new_block_rows[row] = Condition.ROLLOVER_SHARED if shared else Condition.ROLLOVER",
        "seen.new_block_rows[row] = Condition.ROLLOVER",
    ),
    Mutant(
        "in-place-counted-for-all",
        "Every row is counted as written in place, including rows with a new block.",
        _MANAGER,
        "KVBlockManager._commit",
        "in_place = len(seen.positions) - len(seen.new_block_rows)",
        "in_place = len(seen.positions)",
    ),
)
