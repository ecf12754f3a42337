"""Bugs in layers with windows, and with other traits of attention."""

from __future__ import annotations

from tests.mutants.mutant import ENGINE, WINDOWED, WINDOWED_PREFIXES, Mutant

_GROUPS = "roseinfer.kv.groups"
_POOL = "roseinfer.kv.pool"
_MANAGER = "roseinfer.kv.manager"
_PLAN = "roseinfer.kv.plan"
_SUPPLY = "roseinfer.engine.request"
_PREFIXES = "roseinfer.engine.prefix_cache"
_REFERENCE = "roseinfer.attention.reference"
_CHUNK = "roseinfer.kernels.triton.prefill_attention"
_DECODE = "roseinfer.kernels.triton.decode_attention"
_SCORES = "roseinfer.kernels.triton.softmax"


def _of_a_cache(
    name: str, wrong: str, module: str, function: str, find: str, replace: str
) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(WINDOWED,))


def _of_a_supply(
    name: str, wrong: str, module: str, function: str, find: str, replace: str
) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(WINDOWED_PREFIXES, ENGINE))


def _of_attention(
    name: str, wrong: str, module: str, function: str, find: str, replace: str
) -> Mutant:
    return Mutant(name, wrong, module, function, find, replace, targets=(ENGINE,))


MUTANTS = (
    _of_a_cache(
        "window-a-token-short",
        "A window starts one token late: the block with its first token is freed.",
        _GROUPS,
        "LayerGroup.first_seen",
        "return 0 if self.window is None else max(0, stored - self.window + 1)",
        "return 0 if self.window is None else max(0, stored - self.window + 2)",
    ),
    _of_a_cache(
        "fully-freed-table-taken-for-whole",
        "A table whose blocks were all freed counts as one with none freed.",
        _POOL,
        "count_out_of_window",
        """
        return next(
            (at for at, block_id in enumerate(block_ids) if block_id != SCRATCH), len(block_ids)
        )
        """,
        """
        return next(
            (at for at, block_id in enumerate(block_ids) if block_id != SCRATCH), 0
        )
        """,
    ),
    _of_a_cache(
        "freed-and-still-in-the-table",
        "Freed blocks are replaced by the scratch block in a copy of the table only.",
        _MANAGER,
        "KVBlockManager.free_out_of_window",
        "at = group.first_seen(stored) // self.block_size - 1",
        """
        at = group.first_seen(stored) // self.block_size - 1
        block_ids = [*block_ids]
        """,
    ),
    _of_a_cache(
        "capacity-of-the-largest-group-only",
        "The capacity check of a shared pool counts the group with the largest need only.",
        _MANAGER,
        "KVBlockManager.plan_groups",
        "self._pools[0].require_free_blocks(sum(seen.blocks_needed for seen in surveys))",
        "self._pools[0].require_free_blocks(max(seen.blocks_needed for seen in surveys))",
    ),
    _of_a_cache(
        "truncated-into-freed-blocks",
        "A sequence may be truncated to a length whose window has a freed block.",
        _PLAN,
        "check_truncation",
        """
        if length and group.first_seen(length) // pool.block_size < gone:
            ...
        """,
        """
        if length and -(-length // pool.block_size) < gone:
            ...
        """,
    ),
    _of_a_cache(
        "start-counted-from-the-window",
        "The record of a new block counts only the blocks that its list still holds.",
        _PLAN,
        "_allocate_row_blocks",
        "new = pool.allocate(start=len(block_ids) * pool.block_size, length=0)",
        """
        held = len(block_ids) - count_out_of_window(block_ids)
        new = pool.allocate(start=held * pool.block_size, length=0)
        """,
    ),
    _of_a_supply(
        "freed-blocks-of-the-wrong-group",
        "Groups are numbered by windows only: blocks of another group are freed.",
        _SUPPLY,
        "RequestBlockAllocator.publish_stored_blocks",
        """
        for at, group in self._windows:
            ...
        """,
        """
        for at, (_, group) in enumerate(self._windows):
            ...
        """,
    ),
    _of_a_supply(
        "hit-with-a-gap",
        "A prefix is found though the first block of its window is gone.",
        _PREFIXES,
        "PrefixCache._longest_complete_prefix",
        """
        if all(gap <= begin for gap, begin in zip(gaps, begins, strict=True)):
            ...
        """,
        """
        if all(gap <= begin + 1 for gap, begin in zip(gaps, begins, strict=True)):
            ...
        """,
    ),
    _of_a_supply(
        "borrowed-block-evictable",
        "A block that completes a prefix can be evicted while its sequence is live.",
        _PREFIXES,
        "PrefixCache._fill_missing_blocks",
        "self._borrowed_blocks.add(new_block_ids[group])",
        "",
    ),
    _of_attention(
        "chunk-starts-at-its-last-window",
        "A tile of a chunk starts at its last token's window, though its first sees more.",
        _CHUNK,
        "_chunk_kernel",
        "first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0",
        "first = tl.maximum(position + count - WINDOW, 0) if WINDOW else 0",
    ),
    _of_attention(
        "new-token-outside-its-window",
        "A kernel that stores the new token attends to W tokens and to itself.",
        _DECODE,
        "_decode_kernel",
        "first = tl.maximum(own - WINDOW + 1, 0) if WINDOW else 0",
        "first = tl.maximum(length - WINDOW, 0) if WINDOW else 0",
    ),
    _of_attention(
        "groups-found-by-their-window",
        "A layer reads the blocks of the first group with its window, though it is in another one.",
        _REFERENCE,
        "ReferenceAttention.store_and_attend",
        "lists = [lists_of_row[kv.group_of(layer)] for lists_of_row in block_lists]",
        """
        group, windows = kv.group_of(layer), [each.window for each in kv.groups]
        if windows[group] is not None:
            group = windows.index(windows[group])
        lists = [lists_of_row[group] for lists_of_row in block_lists]
        """,
    ),
    _of_attention(
        "window-a-token-wide-in-later-chunks",
        "In later chunks of a prompt, attention without kernels sees one token before the window.",
        _REFERENCE,
        "attend",
        "at = torch.arange(context - tokens, context, device=query.device)[None]",
        """
        from dataclasses import replace

        at = torch.arange(context - tokens, context, device=query.device)[None]
        if traits.window is not None and context > tokens > 1:
            traits = replace(traits, window=traits.window + 1)
        """,
    ),
    _of_attention(
        "window-a-token-wide-in-chunks",
        "The kernel of chunks sees one token before the window.",
        _CHUNK,
        "_chunk_kernel",
        "seen = seen & (distance < WINDOW)",
        "seen = seen & (distance <= WINDOW)",
    ),
    _of_attention(
        "last-part-dropped-in-chunks",
        "The kernel of chunks drops the tokens of a context after its 128th.",
        _CHUNK,
        "_chunk_kernel",
        """
        all_top, all_total, all_sums = merge_softmax(
            all_top, all_total, all_sums, top, row_weight_sum(total), sums
        )
        tl.store(
            out + (row + token)[:, None] * o_s + head[:, None] * o_h + dims[None, :] * o_d,
            (all_sums / all_total[:, None]).to(out.dtype.element_ty), there[:, None] & d_inside,
        )
        """,
        """
        if part == 0:
            all_top, all_total, all_sums = merge_softmax(
                all_top, all_total, all_sums, top, row_weight_sum(total), sums
            )
        tl.store(
            out + (row + token)[:, None] * o_s + head[:, None] * o_h + dims[None, :] * o_d,
            (all_sums / all_total[:, None]).to(out.dtype.element_ty), there[:, None] & d_inside,
        )
        """,
    ),
    _of_attention(
        "first-part-dropped-in-decode",
        "The kernel of single tokens drops the first 128 tokens of a longer context.",
        _DECODE,
        "_decode_kernel",
        """
        if SPLITS == 1:
            all_top, all_total, all_sums = merge_softmax(
                all_top, all_total, all_sums, top, row_weight_sum(total), sums
            )
        else:
            store_partial(
                partial, weights_max, weights_sum, row + 1 + part - first_part, top,
                row_weight_sum(total), sums, real & (part + 0 * members < last_part),
                d_inside, D,
            )
        """,
        """
        if SPLITS > 1:
            store_partial(
                partial, weights_max, weights_sum, row + 1 + part - first_part, top,
                row_weight_sum(total), sums, real & (part + 0 * members < last_part),
                d_inside, D,
            )
        """,
    ),
    _of_attention(
        "sinks-ignored-by-storing-kernels",
        "Kernels that store the new token ignore attention sinks.",
        _DECODE,
        "_append_own_token",
        """
        return init_softmax(
            tl.sum(products, 1), values, scale, cap, sinks, slopes, heads, real,
            CAPPED, SLOPED, SINKING,
        )
        """,
        """
        return init_softmax(
            tl.sum(products, 1), values, scale, cap, sinks, slopes, heads, real,
            CAPPED, SLOPED, SINKING and not APPENDS,
        )
        """,
    ),
    _of_attention(
        "cap-in-powers-of-e",
        "Scores are in base 2, and their soft cap in base e.",
        _SCORES,
        "score_arguments",
        """
        return {
            "scale": traits.scale * _LOG2_E if cap is None else traits.scale / cap,
            "cap": 0.0 if cap is None else cap * _LOG2_E,
            "sinks": unused if traits.sinks is None else traits.sinks,
            "slopes": unused if traits.slopes is None else traits.slopes,
            "WINDOW": traits.window or 0,
            "CAPPED": cap is not None,
            "SINKING": traits.sinks is not None,
            "SLOPED": traits.slopes is not None,
        }
        """,
        """
        return {
            "scale": traits.scale * _LOG2_E if cap is None else traits.scale / cap,
            "cap": 0.0 if cap is None else cap,
            "sinks": unused if traits.sinks is None else traits.sinks,
            "slopes": unused if traits.slopes is None else traits.slopes,
            "WINDOW": traits.window or 0,
            "CAPPED": cap is not None,
            "SINKING": traits.sinks is not None,
            "SLOPED": traits.slopes is not None,
        }
        """,
    ),
    _of_attention(
        "slopes-in-powers-of-e",
        "Scores are in base 2, and ALiBi slopes in base e.",
        _SCORES,
        "transform_scores",
        "slope = tl.load(slopes + heads, real, other=0.0).to(tl.float32) * _LOG2_E_IN_KERNELS",
        "slope = tl.load(slopes + heads, real, other=0.0).to(tl.float32)",
    ),
    _of_attention(
        "masked-before-the-cap",
        "Scores are capped after masking, so that masked tokens keep a weight.",
        _REFERENCE,
        "attend_sequences",
        """
        scores = scores.masked_fill(hidden, float("-inf"))
        """,
        """
        scores = scores.masked_fill(hidden, -(traits.softcap or float("inf")))
        """,
    ),
    _of_attention(
        "freed-values-weighed-by-zero",
        "Only the weights of freed tokens are zero, and zero times NaN is NaN.",
        _REFERENCE,
        "append_and_attend_reference",
        "unused = _attention_mask(distance, traits)[:, None, :, None]",
        "unused = (distance < 0)[:, None, :, None]",
    ),
)
